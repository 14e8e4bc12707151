"""As many micro-batches on every process: each takes part in every pass of a divided model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.distributed.comm import Comm
from litgrpo.distributed.fsdp.units import is_gathered
from litgrpo.models.policy import Policy
from litgrpo.training.micro_batches import Limits, LogprobsOf, Ragged, Rows, StepSums
from litgrpo.types import LossOutput, TokenLogprobs, TokenRows, TrainingBatch


class Even(Ragged):
    """Ragged micro-batches, filled up to the largest number of any process.

    What is added is one row without weight: its gradient is 0, and it counts nowhere.

    Args:
        policy: divided over processes; while it is gathered each process works alone.
        comm: of the processes.
    """

    def __init__(self, policy: Policy, comm: Comm) -> None:
        self.policy, self.comm = policy, comm
        self.own = 0  # micro-batches of the last split that have rows of this process

    def missing(self, number: int) -> int:
        """How many more micro-batches than `number` another process has."""
        if is_gathered(self.policy):
            return 0
        return int(self.comm.max(torch.tensor(float(number), device=self.device))) - number

    @property
    def device(self) -> torch.device:
        """Of the policy."""
        return self.policy.model.device

    def split(
        self, carrier: Rows, rows: Tensor | None, limits: Limits
    ) -> Iterator[tuple[Rows, bool]]:
        """Micro-batches of this process, then rows without weight; see `Ragged.split`."""
        chosen = carrier if rows is None else carrier.select(rows)
        buckets = self.buckets(chosen, limits)
        self.own, missing = len(buckets), self.missing(len(buckets))
        for number, bucket in enumerate(buckets, start=1):
            yield chosen.select(bucket), number == len(buckets) + missing
        for number in range(1, missing + 1):
            yield without_weight(chosen.select(buckets[0][:1])), number == missing

    @torch.no_grad()
    def scored(self, tokens: TokenRows, logprobs_of: LogprobsOf, limits: Limits) -> TokenLogprobs:
        """As often as the process with the most micro-batches; see `Ragged.scored`."""
        found = super().scored(tokens, logprobs_of, limits)
        buckets = self.buckets(tokens, limits)
        for _ in range(self.missing(len(buckets))):
            logprobs_of(tokens.select(buckets[0][:1]))
        return found

    def sums(self) -> StepSums:
        """Counts the process's own micro-batches."""
        return OwnSums(self)


class OwnSums(StepSums):
    """Sums over micro-batches that have rows of this process.

    Args:
        batches: knows how many there are.
    """

    def __init__(self, batches: Even) -> None:
        super().__init__()
        self.batches = batches

    def add(self, output: LossOutput) -> None:
        """Count a micro-batch, unless it only fills up."""
        if len(self.losses) < self.batches.own:
            super().add(output)


def without_weight(carrier: Any) -> Any:
    """The same rows, of which nothing is learned."""
    if not isinstance(carrier, TrainingBatch):
        return carrier
    weights, advantages = (torch.zeros_like(x) for x in (carrier.weights, carrier.advantages))
    return replace(carrier, weights=weights, advantages=advantages)
