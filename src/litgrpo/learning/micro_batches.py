"""Split the rows of an iteration into mini-batches (optimizer steps) and micro-batches (passes)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from litgrpo.distributed.collectives import Comm
from litgrpo.distributed.fsdp.units import is_gathered
from litgrpo.metrics import StepSums
from litgrpo.models.packing import bucket_by_parent
from litgrpo.models.policy import Policy
from litgrpo.tensors import length_buckets
from litgrpo.types import TokenLogprobs, TokenRows, TrainingBatch, to_device

LogprobsOf = Callable[[TokenRows], TokenLogprobs]
FieldsOf = Callable[[TokenRows], dict[str, Tensor]]


@dataclass(frozen=True)
class BatchLimits:
    """Largest micro-batch; None: no limit.

    Args:
        max_rows: completions.
        max_tokens: tokens, see `UpdateConfig.micro_batch_tokens`.
        shared: True if the model reads a prompt once for all of its completions. Then completions
            of a prompt stay together and real tokens count; otherwise completions of similar length
            do, and padded tokens count, the prompt's for each row.

    Example:
        >>> BatchLimits(max_rows=8, max_tokens=2048)
        BatchLimits(max_rows=8, max_tokens=2048, shared=False)
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Args:
        rows: M rows on the device.
        is_last: True for the last one of its optimizer step on this rank; gradients are averaged
            over ranks with its backward pass.
        is_filler: True if it repeats a row with zero weight, so that all ranks compute equally many
            micro-batches (FSDP); it is left out of losses and metrics.
    """

    rows: TrainingBatch
    is_last: bool
    is_filler: bool = False


class MicroBatching(ABC):
    """Splits the rows of an optimizer step into micro-batches on the device."""

    @property
    def computes_alone(self) -> bool:
        """True if no pass of a micro-batch needs the other ranks, so that one can repeat it."""
        return False

    @abstractmethod
    def select_mini_batch(self, batch: TrainingBatch, rows: Tensor) -> TrainingBatch:
        """Select the rows [m] of one optimizer step."""

    @abstractmethod
    def buckets(self, tokens: TokenRows, limits: BatchLimits) -> list[Tensor]:
        """Return row numbers of each micro-batch; together every row once."""

    @abstractmethod
    def split(
        self, batch: TrainingBatch, rows: Tensor | None, limits: BatchLimits
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches of the given rows [m], or of all rows."""

    @abstractmethod
    def compute_fields(
        self, tokens: TokenRows, fields_of: FieldsOf, limits: BatchLimits
    ) -> dict[str, Tensor]:
        """Compute {name: [N, C, ...]} of all rows, without gradient, micro-batch by micro-batch.

        Args:
            tokens: N rows.
            fields_of: computes {name: [M, C, ...]} of a micro-batch.
            limits: of a micro-batch.
        """

    def compute_logprobs(
        self, tokens: TokenRows, logprobs_of: LogprobsOf, limits: BatchLimits
    ) -> TokenLogprobs:
        """Compute [N, C] log-probabilities and entropies of all rows, without gradient.

        Args:
            tokens: N rows.
            logprobs_of: computes those of a micro-batch.
            limits: of a micro-batch.
        """
        fields = self.compute_fields(tokens, lambda rows: logprobs_of(rows).row_fields(), limits)
        return TokenLogprobs(**fields)

    def sums(self) -> StepSums:
        """Return an empty accumulator for the micro-batches of a step."""
        return StepSums()


class RaggedBatches(MicroBatching):
    """Micro-batches without unused columns, on the rollout's device: for CPU and CUDA."""

    @property
    def computes_alone(self) -> bool:
        """True: every rank has all weights."""
        return True

    def select_mini_batch(self, batch: TrainingBatch, rows: Tensor) -> TrainingBatch:
        """Select rows, without columns that none of them uses."""
        return batch.select(rows)

    def count_fillers(self, number: int) -> int:
        """Return how many passes without weight follow `number` micro-batches."""
        return 0

    def buckets(self, tokens: TokenRows, limits: BatchLimits) -> list[Tensor]:
        """Group rows by prompt if it is read once for all of them, else by length."""
        max_rows, max_tokens = limits.max_rows, limits.max_tokens
        masks = tokens.on_host
        lengths = masks.completion_mask.sum(1)
        if limits.shared:
            return bucket_by_parent(
                lengths,
                masks.prompt_mask.sum(1),
                masks.prompt_of,
                max_rows=max_rows,
                max_tokens=max_tokens,
            )
        lengths = lengths + tokens.prompt_mask.shape[1]
        return length_buckets(lengths, max_rows=max_rows, max_tokens=max_tokens)

    def split(
        self, batch: TrainingBatch, rows: Tensor | None, limits: BatchLimits
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches without columns that none of their rows uses."""
        batch = batch if rows is None else batch.select(rows)
        buckets = self.buckets(batch.tokens, limits)
        fillers = self.count_fillers(len(buckets))
        for number, bucket in enumerate(buckets, start=1):
            yield MicroBatch(batch.select(bucket), is_last=number == len(buckets) + fillers)
        for number in range(1, fillers + 1):
            filler = _without_weight(batch.select(buckets[0][:1]))
            yield MicroBatch(filler, is_last=number == fillers, is_filler=True)

    @torch.no_grad()
    def compute_fields(
        self, tokens: TokenRows, fields_of: FieldsOf, limits: BatchLimits
    ) -> dict[str, Tensor]:
        """Compute micro-batches, and write each to its rows."""
        shape, device = tokens.completion_ids.shape, tokens.completion_ids.device
        fields: dict[str, Tensor] = {}
        buckets = self.buckets(tokens, limits)
        for rows in buckets:
            part = fields_of(tokens.select(rows))
            (index,) = to_device([rows], device)
            for name, values in part.items():
                if name not in fields:
                    dtype = values.dtype if name == "hidden" else torch.float32
                    size = (*shape, *values.shape[2:])
                    fields[name] = torch.zeros(size, dtype=dtype, device=device)
                fields[name][index, : values.shape[1]] = values.to(fields[name].dtype)
        for _ in range(self.count_fillers(len(buckets))):
            fields_of(tokens.select(buckets[0][:1]))
        return fields


class EvenBatches(RaggedBatches):
    """Ragged micro-batches, padded to an equal count on every rank as FSDP collectives require.

    A filler is one row with zero weight: its gradient is 0, and it counts in no average.

    Args:
        policy: sharded; while its weights are gathered, ranks work independently.
        comm: collectives of the ranks.
    """

    def __init__(self, policy: Policy, comm: Comm) -> None:
        self.policy, self.comm = policy, comm

    @property
    def computes_alone(self) -> bool:
        """True while this rank has all weights."""
        return is_gathered(self.policy)

    def count_fillers(self, number: int) -> int:
        """Return how many more than `number` micro-batches the rank with the most of them has."""
        if is_gathered(self.policy):
            return 0
        of_rank = torch.tensor(float(number), device=self.policy.model.device)
        return int(self.comm.max(of_rank)) - number


def _without_weight(rows: TrainingBatch) -> TrainingBatch:
    weights, advantages = (torch.zeros_like(x) for x in (rows.loss_weights, rows.advantages))
    term_weights = None if rows.term_weights is None else torch.zeros_like(rows.term_weights)
    return replace(rows, loss_weights=weights, advantages=advantages, term_weights=term_weights)


def mini_batches(num_rows: int, group_size: int, num_mini_batches: int) -> list[Tensor]:
    """Return the rows of each optimizer step: whole groups in order, the same in every epoch.

    Args:
        num_rows: N.
        group_size: G.
        num_mini_batches: optimizer steps of one pass over the rollout (`UpdateConfig`); all passes
            together take `UpdateConfig.num_steps`.

    Returns:
        Row numbers of each step; together every row once.

    Example:
        >>> [rows.tolist() for rows in mini_batches(6, group_size=2, num_mini_batches=2)]
        [[0, 1, 2, 3], [4, 5]]
    """
    groups = torch.arange(num_rows).view(-1, group_size)
    return [part.flatten() for part in groups.tensor_split(num_mini_batches) if part.numel()]


def rows_with_gradient(batch: TrainingBatch) -> Tensor:
    """Return the rows that have a gradient if no term needs all rows, on the host.

    The tokens of the other rows stay in the denominators of the weights. One row is always kept, so
    that every rank takes part in every optimizer step.

    Args:
        batch: M rows.

    Returns:
        [m] row numbers, at least one.
    """
    rows = batch.has_gradient.cpu().nonzero().squeeze(1)
    return rows if len(rows) else torch.zeros(1, dtype=torch.long)
