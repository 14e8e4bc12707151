"""One step off: the rollout of the next iteration is sampled while this one is learned from.

Iteration n learns from the rollout that the weights before iteration n - 1 sampled, 0 from its own:
staleness is exactly 1, never "at most", so that a run is the same however fast anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from litgrpo.arguments import require
from litgrpo.distributed.together import from_all
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.episodes import RolloutKey
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Purpose
from litgrpo.types import PromptBatch, Rollout

TENSORS = ("completion_ids", "completion_mask", "sampler_logprobs", "truncated", "candidate_ids")


@dataclass
class Pending:
    """A rollout that is being sampled.

    Args:
        iteration: that learns from it.
        version: finished iterations of the weights that sample it.
        index: [B] of its prompts; out of a checkpoint those of all processes.
        future: of it, texts not yet decoded.
    """

    iteration: int
    version: int
    index: torch.Tensor
    future: Future[Rollout]


@dataclass
class AsyncRollouter(Rollouter):
    """Samples the next iteration's rollout in each training call, and returns the last call's.

    With an engine that samples elsewhere the call returns at once; the others sample within it,
    with the same result.

    `source`: the prompts of the next iteration; without one nothing is sampled ahead.
    """

    source: Callable[[], PromptBatch] | None = field(default=None, init=False)
    _pending: Pending | None = field(default=None, init=False)
    _taken: Pending | None = field(default=None, init=False)  # what the call before returned
    _version: int = field(default=0, init=False)  # of the weights of the rollout at hand

    def generate(
        self, prompts: PromptBatch, purpose: Purpose, iteration: int = 0, **settings: Any
    ) -> Rollout:
        """Sample completions and decode them; see `Rollouter.generate`.

        Raises:
            ValueError: the prompts are not those that were to come.
        """
        self.settle()  # weights must not change while they sample
        if purpose != "train" or self.source is None:
            return super().generate(prompts, purpose, iteration, **settings)
        self._version = iteration
        rollout = super().generate(prompts, purpose, iteration, **settings)
        with self.clock.phase("time/rollout_s"):
            self._begin(iteration)
        return replace(rollout, policy_version=self._version)

    def _within_memory(self, requests: RolloutRequest, named: RolloutKey) -> Rollout:
        """The rollout that is pending where it is this one, else one that is sampled now."""
        if self._pending is None or self.source is None or named.purpose != "train":
            return super()._within_memory(requests, named)
        pending, self._pending, self._taken = self._pending, None, self._pending
        wanted = requests.prompts.index.cpu()
        require(
            pending.iteration == named.iteration and bool(torch.isin(wanted, pending.index).all()),
            f"The rollout that was sampled ahead is of iteration {pending.iteration} and other "
            f"prompts than those of iteration {named.iteration}: the data have changed.",
        )
        self._version = pending.version
        rollout, device = pending.future.result(), requests.prompts.prompt_ids.device
        if not torch.equal(pending.index, wanted):
            rollout = of_prompts(rollout, pending.index, wanted)
        tensors: dict[str, Any] = {
            name: each.to(device) for name, each in tensors_of(rollout).items()
        }
        return replace(rollout, prompts=requests.prompts, **tensors)

    def _begin(self, iteration: int) -> None:
        """Sample for the iteration after this one, with the weights before this one."""
        assert self.source is not None
        prompts, following = self.source(), iteration + 1
        named = RolloutKey(self.seed, "train", following, 0)
        requests = self.requests(prompts, named, None, None)
        future: Future[Rollout] = Future()
        if self.engine.samples_elsewhere:
            threads = ThreadPoolExecutor(1, thread_name_prefix="litgrpo-ahead")
            future = threads.submit(super()._within_memory, requests, named)
            threads.shutdown(wait=False)
        else:
            with self.policy.autocast():
                future.set_result(super()._within_memory(requests, named))
        self._pending = Pending(following, iteration, prompts.index.cpu(), future)

    def settle(self) -> None:
        """Wait until nothing is sampled.

        Raises:
            ServerFailure: whatever ended the sampling.
        """
        if self._pending is not None:
            with self.clock.phase("time/rollout_s"):
                self._pending.future.result()

    def state_dict(self, iteration: int) -> dict[str, Any] | None:
        """What is sampled for an iteration as plain values and tensors on the host, if anything.

        Every process takes part, and gets the prompts of all.

        Args:
            iteration: that goes on; also the one at hand, which may be dropped by a signal.
        """
        self.settle()
        known = [each for each in (self._pending, self._taken) if each is not None]
        pending = next((each for each in known if each.iteration == iteration), None)
        if pending is None:
            return None
        rollout = pending.future.result()
        tensors = {name: each.cpu() for name, each in tensors_of(rollout).items()}
        indices, parts = zip(*from_all((pending.index, tensors)), strict=True)
        numbers = {"iteration": pending.iteration, "version": pending.version}
        numbers |= {"group": rollout.group_size}
        return {**numbers, "index": torch.cat(indices), "rollout": stacked(parts)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on with a rollout that was saved; None: without one."""
        self._pending = None if state is None else restored(state)


def tensors_of(rollout: Rollout) -> dict[str, torch.Tensor]:
    """{name: tensor} of what was sampled."""
    return {name: vars(rollout)[name] for name in TENSORS if vars(rollout)[name] is not None}


def stacked(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The rows of several rollouts below each other, short ones filled up on the right."""
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


def of_prompts(rollout: Rollout, known: torch.Tensor, wanted: torch.Tensor) -> Rollout:
    """The rows of some prompts, without columns that none of them uses.

    Args:
        rollout: of all prompts.
        known: [B] their numbers in the data.
        wanted: [b] numbers of some of them.
    """
    group = rollout.group_size
    places = torch.stack([(known == each).nonzero()[0, 0] for each in wanted])
    rows = (places[:, None] * group + torch.arange(group)).flatten()
    tensors = {name: each[rows] for name, each in tensors_of(rollout).items()}
    used = max(1, int(tensors["completion_mask"].sum(1).max()))
    cut: dict[str, Any] = {
        name: each if each.dim() == 1 else each[:, :used] for name, each in tensors.items()
    }
    empty = torch.zeros(len(wanted), 1, dtype=torch.long)
    prompts = PromptBatch(empty, empty.bool(), [""] * len(wanted), {}, wanted)
    return Rollout(prompts, group, **cut)


def restored(state: dict[str, Any]) -> Pending:
    """The rollout of a checkpoint; its prompts come with the next batch."""
    index, future = state["index"], Future[Rollout]()
    empty = torch.zeros(len(index), 1, dtype=torch.long)
    prompts = PromptBatch(empty, empty.bool(), [""] * len(index), {}, index)
    future.set_result(Rollout(prompts, state["group"], **state["rollout"]))
    return Pending(state["iteration"], state["version"], index, future)
