"""Engines that generate with vLLM: servers over HTTP, or vLLM in the trainer's own process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, require
from litgrpo.distributed.collectives import is_distributed
from litgrpo.http import MalformedReply
from litgrpo.models.adapters import is_quantized
from litgrpo.models.loading.sharded_weights import iterate_weights
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.servers.client import (
    SampleRequest,
    SampleResult,
    ServerFailure,
    check_result,
)
from litgrpo.rollout.servers.external import ExternalEngine, RemoteEngine, SampleTurns
from litgrpo.rollout.servers.vllm_client import VllmServer, sampling_params
from litgrpo.rollout.servers.vllm_head import has_head, iterate_with_head, write_head
from litgrpo.rollout.servers.weight_transfer import (
    FolderSender,
    FolderTransfer,
    find_tied_head,
)

# Fractions of a device's memory. A vLLM that stays awake shares it with the update; one that sleeps
# leaves some for cuBLAS, NCCL and memory that torch cannot join.
AWAKE_FRAC, RESERVED_FRAC = 0.4, 0.05


@check_field_types
@dataclass(frozen=True)
class ServerEngine(RemoteEngine):
    """Samples with vLLM servers, which receive the policy's weights before each rollout.

    Servers need VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/explanation/scale.md). Further
    options, such as `urls`, are those of the base class `RemoteEngine`.

    Args:
        send_uniforms: send each row's random numbers to servers that sample with them
            (`vllm_uniforms`): tokens are then those of `LocalEngine` up to rounding, and
            log-probabilities count as the policy's own, which holds in float32. By default each
            row gets a seed derived from its random numbers.

    Example:
        >>> ServerEngine(["http://10.0.0.2:8000", "http://10.0.0.3:8000"]).exact_logprobs
        False
    """

    send_uniforms: bool = False

    @property
    def takes_uniforms(self) -> bool:  # type: ignore[override]
        """Return `send_uniforms`."""
        return self.send_uniforms

    def connect(self, url: str) -> VllmServer:
        # A server that draws with litgrpo's random numbers masks all tokens but the drawn one, so
        # its processed log-probabilities would all be 0.
        mode = "raw_logprobs" if self.send_uniforms else "processed_logprobs"
        return VllmServer(url, self.timeout_s, self.allow_public, mode)


@dataclass
class RunningVllm:
    """VLLM's `LLM` in this process, and its state."""

    llm: Any
    loads_from_memory: bool  # if not, vLLM reads weights from files; see `has_names_of_files`
    copies_head: bool = False  # samples with a copy of the output head; see `vllm_head`
    has_weights: bool = True  # those of the last `sync_weights`
    asleep: bool = False  # its memory is released


@check_field_types
@dataclass(frozen=True)
class ColocatedEngine(ExternalEngine):
    """Samples with vLLM inside the trainer's process.

    Needs `pip install vllm` in the trainer's environment, and a single process. Prompt and
    completion together have at most `max_model_len` tokens. vLLM takes the policy's tensors from
    memory, layer by layer, with adapters merged. A rollout is seeded as a whole: a seed per row
    would make vLLM draw row by row.

    Args:
        gpu_memory_utilization: fraction of the device's memory for vLLM; null: what the weights and
            the optimizer state leave, because the update does not run at the same time. Without
            `enable_sleep_mode` null is 0.4.
        max_model_len: maximal tokens of a row; None: the model's limit.
        enable_sleep_mode: release vLLM's memory during training; GPUs only.
        engine_args: further arguments of vLLM's `LLM`.

    Example:
        >>> ColocatedEngine(gpu_memory_utilization=0.3, max_model_len=1024).enable_sleep_mode
        True
    """

    samples_in = "colocated"

    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    enable_sleep_mode: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)
    # Started by the first rollout; a list, because the dataclass is frozen.
    _started: list[RunningVllm] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(
            self.gpu_memory_utilization is None or 0 < self.gpu_memory_utilization < 1,
            f"model.engine.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be "
            "between 0 and 1, or null.",
        )
        at_least("model.engine.max_model_len", self.max_model_len, 1)

    @cached_property
    def sender(self) -> FolderSender:
        """Writes the folder that vLLM starts with."""
        return FolderSender(FolderTransfer())

    @property
    def exported_folder(self) -> str:
        """Folder of the weights that were written last."""
        return str(self.sender.written[-1])

    @property
    def llm(self) -> Any:
        """VLLM's `LLM`; None before the first rollout."""
        return self._started[0].llm if self._started else None

    def _start(self, policy: Policy) -> RunningVllm:
        """Start vLLM with the weights that `sync_weights` wrote."""
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
                "use litgrpo.rollout.servers.vllm.ServerEngine."
            ) from error
        torch.cuda.empty_cache()
        defaults: dict[str, Any] = {
            "gpu_memory_utilization": self._choose_memory(policy),
            "max_model_len": self.max_model_len,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self.enable_sleep_mode,
        }
        llm = LLM(self.exported_folder, **defaults | self.engine_args)
        on_cpu = policy.model.device.type == "cpu" and find_tied_head(policy) is not None
        copies_head = on_cpu and has_head(str(llm.collective_rpc("get_model_inspection")))
        from_memory = has_names_of_files(policy, Path(self.exported_folder))
        return RunningVllm(llm, from_memory, copies_head)

    def _choose_memory(self, policy: Policy) -> float:
        """Return the fraction of the device's memory for vLLM."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        if not self.enable_sleep_mode or policy.model.device.type != "cuda":
            return AWAKE_FRAC
        free, total = torch.cuda.mem_get_info(policy.model.device)
        # Adam's two running means come with the first update. A resumed run has them already, and
        # its KV cache is smaller than it could be.
        trained = (weight for weight in policy.parameters() if weight.requires_grad)
        states = sum(2 * weight.nbytes for weight in trained)
        share = (free - states) / total - RESERVED_FRAC
        require(
            share > 0,
            f"ColocatedEngine: {free / 2**30:.1f} GiB of the device are free, and the optimizer "
            f"state takes {states / 2**30:.1f} GiB, so nothing is left for vLLM. Train an adapter "
            "(model.lora), or use ServerEngine on another device.",
        )
        return share

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Let the next rollout load the weights; see `RolloutEngine.sync_weights`."""
        if not (self._started and self._started[0].loads_from_memory):
            self.sender.prepare(policy, str(version))
        for running in self._started:
            running.has_weights = False

    @contextmanager
    def awake(self, policy: Policy) -> Iterator[Any]:
        """Yield vLLM with its memory and the policy's weights, and release both afterwards."""
        if not self._started:  # vLLM starts with the weights
            self._started.append(self._start(policy))
        running = self._started[0]
        if running.asleep:
            # Blocks that torch has cached since the rollout before are vLLM's memory.
            torch.cuda.empty_cache()
            running.llm.wake_up()
            running.asleep = False
        if not running.has_weights:
            self._load_weights(running, policy)
        try:
            yield running.llm
        finally:
            if self.enable_sleep_mode:
                # Level 2 drops the weights: they are the policy's, so no copy on the host is kept.
                running.asleep, running.has_weights = True, False
                running.llm.sleep(level=2)

    def _load_weights(self, running: RunningVllm, policy: Policy) -> None:
        head = find_tied_head(policy) if running.copies_head else None
        source: dict[str, Any] = {"weights_path": self.exported_folder}
        if running.loads_from_memory:
            source = {"weights_iterator": iterate_with_head(policy, head)}
        elif head is not None:
            write_head(Path(self.exported_folder), head)
        running.llm.collective_rpc("reload_weights", kwargs=source)
        running.llm.reset_prefix_cache()
        running.has_weights = True

    @contextmanager
    def open_sampler(self, request: RolloutRequest) -> Iterator[SampleTurns]:
        """See `ExternalEngine.open_sampler`; requests that begin together are one batch."""
        device = request.policy.model.device
        devices = [device.index] if device.type == "cuda" else []
        with self.awake(request.policy) as llm, torch.random.fork_rng(devices):
            torch.manual_seed(int(request.uniforms[0, 0] * 2**31))
            yield partial(sample_batch, llm)


def sample_batch(llm: Any, requests: Sequence[SampleRequest]) -> list[Future[SampleResult]]:
    """Sample requests together; the futures have their results."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": request.ids} for request in requests]
    # Requests with a seed are drawn one after another by vLLM.
    params = [SamplingParams(**sampling_params(request) | {"seed": None}) for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    turns = []
    for request, output in zip(requests, outputs, strict=True):
        turn: Future[SampleResult] = Future()
        turn.set_result(to_sample_result(request, output))
        turns.append(turn)
    return turns


def has_names_of_files(policy: Policy, folder: Path) -> bool:
    """Return True if vLLM can load the policy's tensors under their names in memory.

    Transformers renames the weights of some models when it writes them, and 4-bit weights are
    written in full precision.
    """
    if is_quantized(policy.model):
        return False
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names.update(opened.keys())
    return names == {name for name, _ in iterate_weights(policy.model)}


def to_sample_result(request: SampleRequest, output: Any) -> SampleResult:
    """Convert vLLM's output for a request, and check it."""
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    if choice.finish_reason == "length" and len(ids) < request.max_tokens:
        raise ServerFailure(
            f"vLLM ended a row after {len(request.ids) + len(ids)} tokens. Set "
            f"model.engine.max_model_len to {len(request.ids) + request.max_tokens} or more."
        )
    pairs = zip(ids, choice.logprobs, strict=True)
    logprobs = [entry[token].logprob for token, entry in pairs]
    result = SampleResult(ids, logprobs, choice.finish_reason)
    try:
        check_result(request, result)
    except MalformedReply as error:
        raise ServerFailure(f"vLLM returned {error}.") from error
    return result
