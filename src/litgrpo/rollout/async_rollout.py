"""One-step off-policy: generate the next rollout while training on the current one.

Iteration n trains on the rollout that was generated with the weights before iteration n - 1;
iteration 0 on its own. Staleness is exactly 1, never "up to 1", so that a run does not depend on
how fast anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from litgrpo.distributed.collectives import all_gather_object
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.episodes import RolloutKey
from litgrpo.types import PromptBatch, Rollout

# Tensors of a rollout that an engine computes.
TENSORS = ("completion_ids", "completion_mask", "sampler_logprobs", "truncated", "candidate_ids")


class Generator(Protocol):
    """The parts of a rollouter that generate."""

    seed: int
    engine: RolloutEngine

    def build_request(self, prompts: PromptBatch, key: RolloutKey) -> RolloutRequest:
        """Build the engine's request for a rollout."""

    def sample(self, request: RolloutRequest, key: RolloutKey) -> Rollout:
        """Generate the tokens of a rollout."""


@dataclass
class PendingRollout:
    """A rollout that is being generated.

    Args:
        iteration: that trains on it.
        version: finished iterations of the weights that generate it.
        index: [B] positions of its prompts in the data; from a checkpoint, those of all ranks.
        future: of the rollout, without texts.
    """

    iteration: int
    version: int
    index: torch.Tensor
    future: Future[Rollout]


@dataclass
class Prefetch:
    """Generates the rollout of the next iteration.

    With an engine that samples elsewhere (a server), generation overlaps the update. All other
    engines generate right away, with the same result.

    Args:
        next_prompts: returns the prompts of the next iteration.
    """

    next_prompts: Callable[[], PromptBatch]
    pending: PendingRollout | None = field(default=None, init=False)
    # The rollout that the current iteration trains on. A signal may drop this iteration; it then
    # repeats with the same rollout, which the checkpoint holds.
    current: PendingRollout | None = field(default=None, init=False)

    def take_and_start_next(
        self, rollouter: Generator, request: RolloutRequest, key: RolloutKey
    ) -> tuple[Rollout, int]:
        """Return the rollout of this iteration and its weight version, and start the next one.

        Args:
            rollouter: generates.
            request: of this iteration.
            key: of this iteration's rollout.
        """
        if self.pending is None:
            rollout, version = rollouter.sample(request, key), key.iteration
            self.current = None
        else:
            self.current, self.pending = self.pending, None
            rollout, version = _take(self.current, request, key), self.current.version
        self._start(rollouter, key.iteration)
        return rollout, version

    def _start(self, rollouter: Generator, iteration: int) -> None:
        prompts = self.next_prompts()
        key = RolloutKey(rollouter.seed, "train", iteration + 1, 0)
        request = rollouter.build_request(prompts, key)
        future: Future[Rollout] = Future()
        if rollouter.engine.samples_elsewhere:
            threads = ThreadPoolExecutor(1, thread_name_prefix="litgrpo-prefetch")
            future = threads.submit(rollouter.sample, request, key)
            threads.shutdown(wait=False)
        else:
            future.set_result(rollouter.sample(request, key))
        self.pending = PendingRollout(iteration + 1, iteration, prompts.index.cpu(), future)

    def wait(self) -> None:
        """Wait until nothing is being generated.

        Raises:
            ServerFailure: the engine's servers failed.
        """
        if self.pending is not None:
            self.pending.future.result()

    def state_dict(self, iteration: int) -> dict[str, Any] | None:
        """Return the rollout of an iteration as plain values and host tensors, if there is one.

        Every rank must call this; the result holds the prompts of all ranks.

        Args:
            iteration: that resumes from the checkpoint.
        """
        self.wait()
        candidates = [each for each in (self.pending, self.current) if each is not None]
        pending = next((each for each in candidates if each.iteration == iteration), None)
        if pending is None:
            return None
        rollout = pending.future.result()
        tensors = {name: each.cpu() for name, each in _tensors_of(rollout).items()}
        indices, parts = zip(*all_gather_object((pending.index, tensors)), strict=True)
        return {
            "iteration": pending.iteration,
            "version": pending.version,
            "group": rollout.group_size,
            "index": torch.cat(indices),
            "rollout": _stack_rows(parts),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a saved rollout, if there is one; its prompts come with the next batch."""
        self.pending = None
        if state is not None:
            future: Future[Rollout] = Future()
            prompts = _prompts_without_tokens(state["index"])
            future.set_result(Rollout(prompts, state["group"], **state["rollout"]))
            numbers = state["iteration"], state["version"], state["index"]
            self.pending = PendingRollout(*numbers, future)


def _take(pending: PendingRollout, request: RolloutRequest, key: RolloutKey) -> Rollout:
    """Return the rollout of a request, which was generated before.

    Raises:
        ValueError: it was generated for other prompts.
    """
    index = request.prompts.index.cpu()
    if pending.iteration != key.iteration or not bool(torch.isin(index, pending.index).all()):
        raise ValueError(
            f"The rollout that was generated ahead is for iteration {pending.iteration} and other "
            f"prompts than those of iteration {key.iteration}: the data have changed."
        )
    rollout, device = pending.future.result(), request.prompts.prompt_ids.device
    if not torch.equal(pending.index, index):  # a checkpoint holds the prompts of all ranks
        rollout = _select_prompts(rollout, pending.index, index)
    tensors: dict[str, Any] = {name: each.to(device) for name, each in _tensors_of(rollout).items()}
    return replace(rollout, prompts=request.prompts, **tensors)


def _tensors_of(rollout: Rollout) -> dict[str, torch.Tensor]:
    return {name: getattr(rollout, name) for name in TENSORS if getattr(rollout, name) is not None}


def _stack_rows(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate the rows of several rollouts, padding short ones on the right."""
    found = {}
    for name, first in parts[0].items():
        sizes = zip(*[part[name].shape for part in parts], strict=True)
        number, *widest = [sum(size) if dim == 0 else max(size) for dim, size in enumerate(sizes)]
        rows = found[name] = first.new_zeros(number, *widest)
        begin = 0
        for part in [part[name] for part in parts]:
            end = begin + len(part)
            rows[(slice(begin, end), *[slice(size) for size in part.shape[1:]])] = part
            begin = end
    return found


def _select_prompts(rollout: Rollout, known: torch.Tensor, wanted: torch.Tensor) -> Rollout:
    """Select the groups of some prompts, without columns that none of them uses.

    Args:
        rollout: of all prompts.
        known: [B] their positions in the data.
        wanted: [b] positions of some of them.
    """
    group = rollout.group_size
    places = torch.stack([(known == each).nonzero()[0, 0] for each in wanted])
    rows = (places[:, None] * group + torch.arange(group)).flatten()
    tensors = {name: each[rows] for name, each in _tensors_of(rollout).items()}
    used = max(1, int(tensors["completion_mask"].sum(1).max()))
    cut: dict[str, Any] = {
        name: each if each.dim() == 1 else each[:, :used] for name, each in tensors.items()
    }
    return Rollout(_prompts_without_tokens(wanted), group, **cut)


def _prompts_without_tokens(index: torch.Tensor) -> PromptBatch:
    empty = torch.zeros(len(index), 1, dtype=torch.long)
    return PromptBatch(empty, empty.bool(), [""] * len(index), {}, index)
