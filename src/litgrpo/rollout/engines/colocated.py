"""VLLM inside of the trainer's process, on its own device.

Built against vLLM 0.32. Run on a CPU; on a GPU, with `sleep`, it was not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.distributed.together import several
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.publishing import FolderSender, FolderTransfer
from litgrpo.rollout.engines.served import Answer, Ask, Channel, ServedEngine


@dataclass(frozen=True)
class ColocatedEngine(ServedEngine):
    """Samples with a vLLM of its own, beside the policy in the same process.

    Needs `pip install vllm` in the trainer's environment. One process; prompts and completions
    together are at most `max_model_len` tokens.

    Args:
        gpu_memory_utilization: share of the device's memory that vLLM may take
            (`gpu_memory_utilization`).
        max_model_len: tokens of a row at most; None: as the model.
        enable_sleep_mode: give the memory back while the policy learns; GPUs only.
        engine_args: further arguments of vLLM's `LLM`.
    """

    gpu_memory_utilization: float = 0.4
    max_model_len: int | None = None
    enable_sleep_mode: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            0 < self.gpu_memory_utilization < 1,
            f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be "
            f"between 0 and 1.",
        )
        at_least("engine.max_model_len", self.max_model_len, 1)

    @cached_property
    def sender(self) -> FolderSender:
        """Writes the weights where vLLM reads them."""
        return FolderSender(FolderTransfer())

    @cached_property
    def llm(self) -> Any:
        """The sampler, started with the weights that were published first.

        Raises:
            ValueError: it is not installed, or several processes train.
        """
        require(not several(), "ColocatedEngine is for one process. Take a server for several.")
        # One process: it would start another for itself, which could not see the trainer's device.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                f"ColocatedEngine needs vLLM in this environment ({error}): pip install vllm, or "
                "take litgrpo.rollout.engines.server.ServerEngine."
            ) from error
        given: dict[str, Any] = {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
        }
        given |= {
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self.enable_sleep_mode,
        }
        return LLM(self.sender.place, **given | self.engine_args)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Let vLLM read the policy's weights; see `RolloutEngine.sync_weights`."""
        self.sender.prepare(policy, str(version))
        if "llm" not in vars(self):
            return  # it starts with them
        with self.awake() as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": self.sender.place})
            llm.reset_prefix_cache()

    @contextmanager
    def awake(self) -> Iterator[Any]:
        """The sampler with its memory; without it afterwards."""
        llm = self.llm
        if self.enable_sleep_mode:
            llm.wake_up()
        try:
            yield llm
        finally:
            if self.enable_sleep_mode:
                llm.sleep(level=1)

    @contextmanager
    def channel(self, requests: RolloutRequest) -> Iterator[Channel]:
        """See `ServedEngine.channel`."""
        with self.awake() as llm:
            yield Batches(llm)


class Batches(Channel):
    """Samples what was asked since the last look, all at once.

    Args:
        llm: vLLM.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.asked: list[Ask] = []

    def put(self, asks: Sequence[Ask]) -> None:
        """See `Channel.put`."""
        self.asked += asks

    def take(self, timeout_s: float | None) -> list[tuple[int, Answer]]:
        """See `Channel.take`."""
        from vllm import SamplingParams

        asked, self.asked = self.asked, []
        prompts = [{"prompt_token_ids": ask.ids} for ask in asked]
        params = [SamplingParams(**ask.params) for ask in asked]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [(ask.row, answered(output)) for ask, output in zip(asked, outputs, strict=True)]


def answered(output: Any) -> Answer:
    """What vLLM sampled for a row."""
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    return Answer(
        ids, [found[token].logprob for token, found in zip(ids, choice.logprobs, strict=True)]
    )
