"""What a rollout process does: samples completions for some prompts, with weights it shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray

from litgrpo.distributed.memory import is_out_of_memory
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import Requests
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.types import PromptBatch, Rollout
from litgrpo.workers.failures import WorkerError, portable

POLICY = "policy"  # the name under which a process keeps it
SAMPLED = ("completion_ids", "completion_mask", "sampler_logprobs", "truncated", "candidate_ids")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Share:
    """Prompts of one process, as plain values.

    Args:
        engine: samples.
        arrays: `prompt_ids`, `prompt_mask` [b, P] and `uniforms` [b * G, C].
        group_size: completions of each prompt, G.
        sampling: temperature and filters.
        eos_ids: tokens that end a completion, by the policy.
        max_rows: rows that decode at once at most, where memory was short.
        stops: texts at which completions end.
        autocast: dtype of matrix products by the trainer's precision; None: the weights' own.
        matmul: torch's precision of float32 matrix products.
        policy: a `SharedPolicy`, which arrives as the policy; None: the one that the process has.
    """

    engine: LocalEngine
    arrays: Arrays
    group_size: int
    sampling: Sampling
    eos_ids: tuple[int, ...]
    max_rows: int | None
    stops: tuple[str, ...]
    autocast: torch.dtype | None
    matmul: str
    policy: Any = None


@dataclass(frozen=True)
class Failed:
    """Why nothing was sampled, and whether memory was short."""

    error: WorkerError
    out_of_memory: bool


def sample(loaded: dict[str, Any], share: Share, send: Callable[[Any], None]) -> Arrays | Failed:
    """Sample a share; see `litgrpo.workers.worker.Handler`."""
    policy: Policy = loaded[POLICY] if share.policy is None else share.policy.eval()
    loaded[POLICY], policy.eos_ids = policy, share.eos_ids
    torch.set_float32_matmul_precision(share.matmul)
    try:
        with torch.autocast("cpu", share.autocast, enabled=share.autocast is not None):
            rollout = share.engine.generate(requests(policy, share))
    except Exception as error:
        return Failed(portable(error), is_out_of_memory(error))
    return arrays_of(rollout)


def requests(policy: Policy, share: Share) -> Requests:
    """What the engine of this process is asked."""
    ids, mask, uniforms = (
        torch.from_numpy(share.arrays[name]) for name in ("prompt_ids", "prompt_mask", "uniforms")
    )
    rows = torch.zeros(len(ids), dtype=torch.long)  # places in the data set, which nobody asks here
    prompts = PromptBatch(ids, mask, [""] * len(ids), {}, rows)
    stops = _stop_strings(policy, share.stops) if share.stops else None
    given = (policy, prompts, share.group_size, uniforms, share.sampling)
    return Requests(*given, max_rows=share.max_rows, stops=stops)


@cache
def _stop_strings(policy: Policy, stops: tuple[str, ...]) -> StopStrings:
    return StopStrings(stops, policy.tokenizer, policy.vocab_size)


def arrays_of(rollout: Rollout) -> Arrays:
    """What was sampled."""
    found = {name: vars(rollout)[name] for name in SAMPLED}
    return {name: each.numpy() for name, each in found.items() if each is not None}
