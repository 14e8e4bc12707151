"""Engines that generate with vLLM: servers over HTTP, or vLLM in the trainer's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import above, at_least, require
from litgrpo.distributed.collectives import is_distributed
from litgrpo.http_client import MalformedReply
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.served import (
    SampleChannel,
    SampleRequest,
    SampleResult,
    ServedEngine,
    check_result,
)
from litgrpo.rollout.engines.server_pool import ServerChannel, ServerPool
from litgrpo.rollout.engines.vllm_client import Server, ServerFailure, normalize_url
from litgrpo.rollout.engines.weight_transfer import FolderSender, FolderTransfer, WeightTransfer


@dataclass(frozen=True)
@check_field_types
class ServerEngine(ServedEngine):
    """Samples with vLLM servers, which receive the policy's weights before each rollout.

    Every response names the version of the weights that sampled it, and responses of another
    version are rejected. A restarted server gets the weights again, and its rows are requested
    again. Servers need VLLM_SERVER_DEV_MODE=1 and --enable-scale-out; see docs/scale.md.

    Args:
        urls: addresses of the servers, in a private network; prompts are distributed over them.
        weight_transfer: how servers receive the weights.
        send_uniforms: send each row's random numbers to servers that sample with them
            (`vllm_uniforms`): tokens are then those of `LocalEngine` up to rounding, and
            log-probabilities count as the policy's own, which holds in float32. By default each
            row gets a seed derived from its random numbers.
        timeout_s: seconds that a request or a weight update may take, to the last byte of the
            response.
        wait_s: if no server responds, retry for this many seconds.
        retries: how often a server with stale weights gets them again, per row.
        max_concurrent_requests: maximal rows requested at the same time by this process; servers
            queue them.
        allow_public: allow public addresses. Anyone who reaches such a server can run code there.

    Example:
        >>> ServerEngine(["http://10.0.0.2:8000", "http://10.0.0.3:8000"]).exact_logprobs
        False
    """

    urls: list[str]
    weight_transfer: WeightTransfer = FolderTransfer()  # noqa: RUF009 (frozen)
    send_uniforms: bool = False
    timeout_s: float = 600.0
    wait_s: float = 300.0
    retries: int = 2
    max_concurrent_requests: int = 256
    allow_public: bool = False

    def __post_init__(self) -> None:
        """Check addresses and ranges."""
        require(bool(self.urls), "model.engine.urls is empty; set the address of a vLLM server.")
        for url in self.urls:
            normalize_url(url, self.allow_public)
        above("model.engine.timeout_s", self.timeout_s, 0)
        at_least("model.engine.wait_s", self.wait_s, 0)
        at_least("model.engine.retries", self.retries, 0)
        at_least("model.engine.max_concurrent_requests", self.max_concurrent_requests, 1)

    @property
    def samples_elsewhere(self) -> bool:
        """True: servers keep the weights of the last `sync_weights`."""
        return True

    @property
    def takes_uniforms(self) -> bool:  # type: ignore[override]
        """Return `send_uniforms`."""
        return self.send_uniforms

    @cached_property
    def pool(self) -> ServerPool:
        """The servers."""
        urls = [normalize_url(url, self.allow_public) for url in self.urls]
        servers = [Server(url, self.timeout_s, self.allow_public) for url in urls]
        # A server that draws with litgrpo's random numbers masks all tokens but the drawn one, so
        # its processed log-probabilities would all be 0.
        mode = "raw_logprobs" if self.send_uniforms else "processed_logprobs"
        return ServerPool(servers, self.weight_transfer.sender(), mode, self.wait_s, self.retries)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Send the weights to all servers; see `RolloutEngine.sync_weights`.

        Raises:
            ServerFailure: no server accepts them.
        """
        self.pool.publish(policy, version)

    @contextmanager
    def channel(self, request: RolloutRequest) -> Iterator[SampleChannel]:
        """See `ServedEngine.channel`; has up to `max_concurrent_requests` threads."""
        num_threads = min(self.max_concurrent_requests, request.num_rows)
        with ServerChannel(self.pool, num_threads) as channel:
            yield channel


@dataclass(frozen=True)
@check_field_types
class ColocatedEngine(ServedEngine):
    """Samples with vLLM inside the trainer's process.

    Needs `pip install vllm` in the trainer's environment, and a single process. Prompt and
    completion together have at most `max_model_len` tokens.

    Args:
        gpu_memory_utilization: fraction of the device's memory for vLLM.
        max_model_len: maximal tokens of a row; None: the model's limit.
        enable_sleep_mode: release vLLM's memory during training; GPUs only.
        engine_args: further arguments of vLLM's `LLM`.

    Example:
        >>> ColocatedEngine(gpu_memory_utilization=0.3, max_model_len=1024).enable_sleep_mode
        True
    """

    gpu_memory_utilization: float = 0.4
    max_model_len: int | None = None
    enable_sleep_mode: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)
    # vLLM's `LLM`, started by the first rollout; a list, because the dataclass is frozen.
    _started: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            0 < self.gpu_memory_utilization < 1,
            f"model.engine.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be "
            "between 0 and 1.",
        )
        at_least("model.engine.max_model_len", self.max_model_len, 1)

    @cached_property
    def sender(self) -> FolderSender:
        """Writes the weights to a folder that vLLM loads."""
        return FolderSender(FolderTransfer())

    @property
    def llm(self) -> Any:
        """VLLM's `LLM`, started with the first published weights.

        Raises:
            ValueError: vLLM is not installed, or the run is distributed.
        """
        if not self._started:
            self._started.append(self._start())
        return self._started[0]

    def _start(self) -> Any:
        require(
            not is_distributed(),
            "ColocatedEngine supports a single process. For distributed training use ServerEngine.",
        )
        # By default vLLM starts another process, which could not share the trainer's device.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                f"ColocatedEngine needs vLLM in this environment ({error}): pip install vllm, or "
                "use litgrpo.rollout.engines.vllm.ServerEngine."
            ) from error
        defaults: dict[str, Any] = {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self.enable_sleep_mode,
        }
        return LLM(self.sender.location, **defaults | self.engine_args)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Reload vLLM's weights from the policy; see `RolloutEngine.sync_weights`."""
        self.sender.prepare(policy, str(version))
        if not self._started:  # vLLM will start with these weights
            return
        with self.awake() as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": self.sender.location})
            llm.reset_prefix_cache()

    @contextmanager
    def awake(self) -> Iterator[Any]:
        """Yield vLLM with its GPU memory, and release the memory afterwards."""
        llm = self.llm
        if self.enable_sleep_mode:
            llm.wake_up()
        try:
            yield llm
        finally:
            if self.enable_sleep_mode:
                llm.sleep(level=1)

    @contextmanager
    def channel(self, request: RolloutRequest) -> Iterator[SampleChannel]:
        """See `ServedEngine.channel`."""
        with self.awake() as llm:
            yield ColocatedChannel(llm)


class ColocatedChannel(SampleChannel):
    """Samples all requests since the last `take` in one batch.

    Args:
        llm: vLLM's `LLM`.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.pending: list[SampleRequest] = []

    def put(self, requests: Sequence[SampleRequest]) -> None:
        """See `SampleChannel.put`."""
        self.pending += requests

    def take(self, timeout_s: float | None) -> list[tuple[int, SampleResult]]:
        """See `SampleChannel.take`."""
        from vllm import SamplingParams

        requests, self.pending = self.pending, []
        prompts = [{"prompt_token_ids": request.ids} for request in requests]
        params = [SamplingParams(**request.params) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        pairs = zip(requests, outputs, strict=True)
        return [(request.row, to_sample_result(request, output)) for request, output in pairs]


def to_sample_result(request: SampleRequest, output: Any) -> SampleResult:
    """Convert vLLM's output for a request.

    Raises:
        ServerFailure: the output does not match the request.
    """
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    pairs = zip(ids, choice.logprobs, strict=True)
    logprobs = [found[token].logprob for token, found in pairs]
    result = SampleResult(ids, logprobs, choice.finish_reason)
    try:
        check_result(request, result)
    except MalformedReply as error:
        raise ServerFailure(f"vLLM returned {error}.") from error
    return result
