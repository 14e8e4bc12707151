"""Off-policy by k iterations: generate rollouts while training on earlier ones.

With `staleness: k` iteration n trains on the rollout that was generated with the weights before
iteration n - k (the first k + 1 iterations: with the initial weights). Staleness is exactly k,
never "up to k", so that a run does not depend on how fast anything is.

With `max_staleness: k` rollouts may be generated up to k iterations ahead, and servers get new
weights while they generate (in-flight updates, as in PipelineRL, arXiv:2509.19128, section 3). How
old a token's weights are then depends on speed; `Rollout.token_versions` says it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from litgrpo.distributed.collectives import all_gather_object
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.episodes import EpisodeRunner, RolloutKey
from litgrpo.rollout.groups import (
    join_rollouts,
    move_rollout,
    pack_rollout,
    select_groups,
    unpack_rollout,
)
from litgrpo.types import PromptBatch, Rollout


class Generator(Protocol):
    """The parts of a rollouter that generate."""

    seed: int
    engine: RolloutEngine
    episodes: EpisodeRunner | None

    def build_request(self, prompts: PromptBatch, key: RolloutKey) -> RolloutRequest:
        """Build the engine's request for a rollout."""

    def sample(self, request: RolloutRequest, key: RolloutKey) -> Rollout:
        """Generate the tokens of a rollout."""


@dataclass
class PendingRollout:
    """A rollout that is being generated.

    Args:
        iteration: that trains on it.
        future: of the rollout, without texts; from a checkpoint, of the prompts of all ranks.
    """

    iteration: int
    future: Future[Rollout]


@dataclass
class Prefetch:
    """Generates the rollouts of the next iterations.

    With an engine that samples elsewhere (a server), generation overlaps the update. All other
    engines generate right away, with the same result.

    Args:
        next_prompts: returns the prompts of the k-th next iteration, k = 1, 2, ...
        steps: number of iterations ahead, k.
        in_flight: the engine gets new weights while it generates (`max_staleness`).
    """

    next_prompts: Callable[[int], PromptBatch]
    steps: int = 1
    in_flight: bool = False
    queue: deque[PendingRollout] = field(default_factory=deque, init=False)
    # The rollout that the current iteration trains on. A signal may drop this iteration; it then
    # repeats with the same rollout, which the checkpoint holds.
    current: PendingRollout | None = field(default=None, init=False)

    def take(self, rollouter: Generator, request: RolloutRequest, key: RolloutKey) -> Rollout:
        """Start the rollouts that may begin with the current weights, and return the one of now.

        Args:
            rollouter: generates.
            request: of this iteration.
            key: of this iteration's rollout.
        """
        now = key.iteration
        begin = self.queue[-1].iteration + 1 if self.queue else now
        for iteration in range(begin, now + self.steps + 1):
            own = request if iteration == now else None
            self.queue.append(self._start(rollouter, own, iteration, ahead=iteration - now))
        self.current = self.queue.popleft()
        return _rollout_of(self.current, request, now)

    def _start(
        self, rollouter: Generator, request: RolloutRequest | None, iteration: int, ahead: int
    ) -> PendingRollout:
        key = RolloutKey(rollouter.seed, "train", iteration, 0)
        if request is None:
            request = rollouter.build_request(self.next_prompts(ahead), key)
        version = iteration - ahead

        def generate() -> Rollout:
            return replace(rollouter.sample(request, key), policy_version=version)

        if rollouter.engine.samples_elsewhere:
            # The environments of a rollout are reset for the next one.
            together = self.in_flight and rollouter.episodes is None
            threads = self._threads if together else self._one_thread
            return PendingRollout(iteration, threads.submit(generate))
        return PendingRollout(iteration, _finish_with(generate()))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.steps + 1, thread_name_prefix="litgrpo-prefetch")

    @cached_property
    def _one_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="litgrpo-prefetch")

    def wait(self) -> None:
        """Wait until nothing is being generated.

        Raises:
            ServerFailure: the engine's servers failed.
        """
        for pending in self.queue:
            pending.future.result()

    def state_dict(self, iteration: int) -> list[dict[str, Any]]:
        """Return the rollouts from an iteration on as plain values and host tensors.

        Every rank must call this; the result holds the prompts of all ranks. It is empty with
        in-flight updates: a resumed run generates the next rollouts with its weights.

        Args:
            iteration: that resumes from the checkpoint.
        """
        if self.in_flight:
            return []
        self.wait()
        known = ([] if self.current is None else [self.current]) + list(self.queue)
        kept = [each for each in known if each.iteration >= iteration]
        own = [_pack_without_columns(each.future.result()) for each in kept]
        parts = zip(*all_gather_object(own), strict=True)
        return [
            {"iteration": each.iteration, "parts": list(of_ranks)}
            for each, of_ranks in zip(kept, parts, strict=True)
        ]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore saved rollouts; the columns of their prompts come with the next batches."""
        self.queue.clear()
        self.current = None
        for saved in state:
            parts = [unpack_rollout(values, "cpu") for values in saved["parts"]]
            pending = PendingRollout(saved["iteration"], _finish_with(join_rollouts(parts)))
            self.queue.append(pending)

    def close(self) -> None:
        """Wait until nothing is being generated, at the end of a run.

        With in-flight updates, rollouts that have not begun are dropped.
        """
        if self.in_flight:
            for pending in self.queue:
                pending.future.cancel()
        wait([pending.future for pending in self.queue])


def _finish_with(rollout: Rollout) -> Future[Rollout]:
    future: Future[Rollout] = Future()
    future.set_result(rollout)
    return future


def _pack_without_columns(rollout: Rollout) -> dict[str, Any]:
    on_host = move_rollout(replace(rollout, prompts=replace(rollout.prompts, columns={})), "cpu")
    return pack_rollout(on_host)


def _rollout_of(pending: PendingRollout, request: RolloutRequest, iteration: int) -> Rollout:
    """Return the rollout of a request, which was generated before.

    Raises:
        ValueError: it was generated for other prompts.
    """
    rollout, prompts = pending.future.result(), request.prompts
    known, wanted = rollout.prompts.index.cpu().tolist(), prompts.index.cpu().tolist()
    if pending.iteration != iteration or not set(wanted) <= set(known):
        raise ValueError(
            f"The rollout that was generated ahead is for iteration {pending.iteration} and other "
            f"prompts than those of iteration {iteration}: the data have changed."
        )
    if known != wanted:  # a checkpoint holds the prompts of all ranks
        rollout = select_groups(rollout, [known.index(index) for index in wanted])
    # An environment may have extended the prompts.
    read = replace(rollout.prompts, columns=prompts.columns, set_name=prompts.set_name)
    return move_rollout(replace(rollout, prompts=read), prompts.prompt_ids.device)
