"""Off-policy by k iterations: sample rollouts while training on earlier ones.

`Ahead(staleness=k)`: iteration n trains on the rollout that was sampled with the weights before
iteration n - k (the first k + 1 iterations: with the initial weights). Staleness is exactly k,
never "up to k", so that a run does not depend on how fast anything is.

`InFlight(max_staleness=k)`: rollouts may be sampled up to k iterations ahead, and servers get new
weights while they sample (in-flight updates, as in PipelineRL, arXiv:2509.19128, section 3). How
old a token's weights are then depends on speed; `Rollout.token_versions` says it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, require
from litgrpo.distributed.collectives import all_gather_object
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.episodes import RolloutKey
from litgrpo.rollout.groups import (
    join_rollouts,
    move_rollout,
    pack_rollout,
    select_groups,
    unpack_rollout,
    with_token_versions,
)
from litgrpo.rollout.rollouter import PendingRollout, PendingRollouts
from litgrpo.rollout.sources.base import RolloutSource, SourceParts
from litgrpo.run_options import RunOptions
from litgrpo.types import STALE, PromptBatch, Rollout, Stats


class AheadOfTraining(RolloutSource):
    """Samples the rollouts of the next iterations, too.

    With an engine that samples elsewhere (a server), sampling overlaps the update. All other
    engines sample right away, with the same result.
    """

    provenance = STALE
    in_flight = False  # the engine gets new weights while it samples

    @property
    @abstractmethod
    def num_ahead(self) -> int:
        """Rollouts that are sampled ahead, k."""

    def connect(self, parts: SourceParts) -> None:
        """Let the rollouter know what is pending: it must not disturb that.

        Raises:
            ValueError: the engine samples with the policy's own weights, which are sharded.
        """
        super().connect(parts)
        shares_weights = parts.rollouter.engine.samples_in != "servers"
        require(
            not (shares_weights and is_sharded(parts.rollouter.policy)),
            f"model.source is {type(self).__name__}, but this engine generates with weights that "
            "trainer.strategy shards. Leave out the source, or use trainer.strategy ddp or a "
            "ServerEngine.",
        )
        parts.rollouter.pending = self.pending
        self.pending.in_flight = self.in_flight

    @cached_property
    def pending(self) -> PendingRollouts:
        """Rollouts that are being sampled, in the order of their iterations."""
        return PendingRollouts()

    def take(self, prompts: PromptBatch, iteration: int) -> Rollout:
        """Start the rollouts that may begin with the current weights, and return the one of now."""
        rollouter, queue = self.parts.rollouter, self.pending.queue
        with rollouter.clock.phase("time/rollout_s"):
            request = rollouter.build_request(prompts, self._key(iteration))
            rollouter.prepare(iteration)
            begin = queue[-1].iteration + 1 if queue else iteration
            for later in range(begin, iteration + self.num_ahead + 1):
                queue.append(self._start(request if later == iteration else None, later, iteration))
            self.pending.current = queue.popleft()
            rollout = _rollout_of(self.pending.current, prompts, iteration)
            return rollouter.finish(
                replace(with_token_versions(rollout), provenance=self.provenance)
            )

    def _key(self, iteration: int) -> RolloutKey:
        return RolloutKey(self.parts.rollouter.seed, "train", iteration, 0)

    def _start(self, request: RolloutRequest | None, iteration: int, now: int) -> PendingRollout:
        """Start the rollout of an iteration; without a request, for the prompts that come then."""
        rollouter, key = self.parts.rollouter, self._key(iteration)
        if request is None:
            request = rollouter.build_request(self.parts.next_prompts(iteration - now), key)

        def sample() -> Rollout:
            return replace(rollouter.run_engine(request, key), policy_version=now)

        if rollouter.engine.samples_in == "servers":
            # The environments of a rollout are reset for the next one.
            together = self.in_flight and rollouter.episodes is None
            threads = self._threads if together else self._one_thread
            return PendingRollout(iteration, threads.submit(sample))
        return PendingRollout(iteration, _finished(sample()))

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.num_ahead + 1, thread_name_prefix="litgrpo-ahead")

    @cached_property
    def _one_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="litgrpo-ahead")

    def stats(self, rollout: Rollout, iteration: int) -> Stats:
        """Return the age of the weights that sampled the tokens, in iterations."""
        assert rollout.token_versions is not None
        age, sampled = (iteration - rollout.token_versions).float(), rollout.loss_mask
        total = torch.where(sampled, age, 0.0).sum()
        return {
            "async/staleness_mean": torch.stack([total, sampled.sum()]),
            "async/staleness_max": torch.where(sampled, age, -torch.inf).max(),
        }

    def state_dict(self, iteration: int) -> list[dict[str, Any]]:
        """Return the rollouts from an iteration on as plain values and host tensors.

        Every rank must call this; the result holds the prompts of all ranks.
        """
        self.pending.wait()
        rollouts = [r for r in self.pending.with_current if r.iteration >= iteration]
        packed = [_pack_without_columns(r.future.result()) for r in rollouts]
        of_ranks = zip(*all_gather_object(packed), strict=True)
        return [
            {"iteration": rollout.iteration, "parts": list(parts)}
            for rollout, parts in zip(rollouts, of_ranks, strict=True)
        ]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore saved rollouts; the columns of their prompts come with the next batches."""
        self.pending.queue.clear()
        self.pending.current = None
        for saved in state:
            parts = [unpack_rollout(values, "cpu") for values in saved["parts"]]
            self.pending.queue.append(
                PendingRollout(saved["iteration"], _finished(join_rollouts(parts)))
            )

    def close(self) -> None:
        """Wait until nothing is being sampled, at the end of a run."""
        self.pending.finish()


@check_field_types
@dataclass
class Ahead(AheadOfTraining):
    """Rollouts of the weights of exactly `staleness` iterations ago.

    The next rollouts are sampled during the update, which hides the time of engines on other
    devices. Reproducible, and a resumed run has the same rollouts. An importance correction is
    added to the objective.

    Args:
        staleness: k, age of the weights in iterations.

    Example:
        >>> Ahead(staleness=2).num_ahead
        2
    """

    staleness: int = 1

    def __post_init__(self) -> None:
        at_least("model.source.staleness", self.staleness, 1)

    @property
    def num_ahead(self) -> int:
        """Rollouts that are sampled ahead, k."""
        return self.staleness


@check_field_types
@dataclass
class InFlight(AheadOfTraining):
    """Rollouts on servers that get new weights while they sample.

    Faster than `Ahead`, and not reproducible: how old a token's weights are depends on speed.

    Args:
        max_staleness: k: up to k rollouts are sampled ahead; a token's weights are at most k
            iterations old.

    Example:
        >>> InFlight(max_staleness=4).num_ahead
        4

    Source: PipelineRL, arXiv:2509.19128, section 3.
    """

    max_staleness: int = 1
    in_flight = True

    def __post_init__(self) -> None:
        at_least("model.source.max_staleness", self.max_staleness, 1)

    @property
    def num_ahead(self) -> int:
        """Rollouts that are sampled ahead, k."""
        return self.max_staleness

    def check(self, run: RunOptions) -> None:
        """Check that the engine receives weights while it samples.

        Raises:
            ValueError: it does not.
        """
        require(
            "in-flight updates" in run.engine.allows,
            "model.source is InFlight, which needs an engine that receives weights while it "
            f"samples (ServerEngine); {type(run.engine).__name__} does not. Use Ahead.",
        )

    def state_dict(self, iteration: int) -> list[dict[str, Any]]:
        """Return nothing: a resumed run samples the next rollouts with its weights."""
        return []

    def close(self) -> None:
        """Drop rollouts that have not begun, and wait for the others."""
        for rollout in self.pending.queue:
            rollout.future.cancel()
        super().close()


def _finished(rollout: Rollout) -> Future[Rollout]:
    future: Future[Rollout] = Future()
    future.set_result(rollout)
    return future


def _pack_without_columns(rollout: Rollout) -> dict[str, Any]:
    on_host = move_rollout(replace(rollout, prompts=replace(rollout.prompts, columns={})), "cpu")
    return pack_rollout(on_host)


def _rollout_of(pending: PendingRollout, prompts: PromptBatch, iteration: int) -> Rollout:
    """Return the rollout of the prompts of an iteration, which was sampled before.

    Raises:
        ValueError: it was sampled for other prompts.
    """
    rollout = pending.future.result()
    sampled, indices = rollout.prompts.index.cpu().tolist(), prompts.index.cpu().tolist()
    if pending.iteration != iteration or not set(indices) <= set(sampled):
        raise ValueError(
            f"The rollout that was generated ahead is for iteration {pending.iteration} and other "
            f"prompts than those of iteration {iteration}: the data have changed."
        )
    if sampled != indices:  # a checkpoint holds the prompts of all ranks
        rollout = select_groups(rollout, [sampled.index(index) for index in indices])
    # An environment may have extended the prompts.
    extended = replace(rollout.prompts, columns=prompts.columns, set_name=prompts.set_name)
    return move_rollout(replace(rollout, prompts=extended), prompts.prompt_ids.device)
