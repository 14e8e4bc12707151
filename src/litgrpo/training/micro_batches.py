"""Which rows share an optimizer step, and which go through the model together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.estimators import DecoupledNormalized
from litgrpo.algorithms.losses import RATIO_MAX, Normalizers, Objective
from litgrpo.distributed.comm import Comm
from litgrpo.models.packing import bucket_by_parent
from litgrpo.tensors import length_buckets
from litgrpo.types import LossOutput, Stats, StepReport, TokenLogprobs, TokenRows, TrainingBatch

Rows = TypeVar("Rows", TokenRows, TrainingBatch)
LogprobsOf = Callable[[TokenRows], TokenLogprobs]


@dataclass(frozen=True)
class Limits:
    """How much goes through the model at once; None sets no limit.

    Args:
        max_rows: completions.
        max_tokens: tokens, see `UpdateConfig.micro_batch_tokens`.
        shared: whether the model reads a prompt once for all of its rows: then rows of a prompt
            stay together and real tokens count; else rows of similar length do, and padded tokens
            count, the prompt's in each row.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    shared: bool = False


class Totals:
    """Sums and counts that micro-batches contribute to; their quotients are exact averages."""

    def __init__(self) -> None:
        self.sums: Stats = {}

    def add(self, stats: Stats) -> None:
        """Count {name: [2] sum and count}; of a largest ratio keep the largest."""
        for name, pair in stats.items():
            known, new = self.sums.get(name), pair.detach().double()
            join = torch.maximum if name == RATIO_MAX else torch.add
            self.sums[name] = new if known is None else join(known, new)

    def add_value(self, name: str, value: Tensor) -> None:
        """Count one number."""
        self.add({name: torch.stack([value.detach(), torch.ones_like(value)])})

    def add_steps(self, reports: list[StepReport]) -> None:
        """Count what optimizer steps report; the learning rate of skipped ones, too."""
        for report in reports:
            self.add(report.sums)
            self.add_value("optim/lr", torch.tensor(report.lr))

    def averages(self, comm: Comm, device: torch.device) -> Stats:
        """{name: []} averages over everything that all processes counted, by one collective.

        Args:
            comm: of the processes; all of them count the same names.
            device: where the numbers are put together.
        """
        table = torch.stack([pair.to(device) for pair in self.sums.values()])
        sums, counts = comm.sum(table).unbind(-1)
        means = sums / counts.clamp(min=1)
        return dict(zip(self.sums, means.float(), strict=True))


class StepSums:
    """What the micro-batches of one optimizer step add up to."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.losses: list[Tensor] = []

    def add(self, output: LossOutput) -> None:
        """Count a micro-batch whose gradient has been computed."""
        self.totals.add(output.stats)
        self.losses.append(output.loss.detach())

    def read(self, grad_norm: Tensor) -> tuple[Stats, Tensor, Tensor]:
        """Everything that was counted.

        Args:
            grad_norm: [] norm of the gradient.

        Returns:
            {name: [2] sum and count}, [] the loss of all micro-batches, and the norm.
        """
        loss = torch.zeros((), device=grad_norm.device)
        for part in self.losses:
            loss += part
        return self.totals.sums, loss, grad_norm


class MicroBatching(ABC):
    """How the rows of an optimizer step become micro-batches on the device."""

    @abstractmethod
    def step_rows(self, experience: TrainingBatch, rows: Tensor) -> TrainingBatch:
        """The rows [m] of one optimizer step."""

    @abstractmethod
    def buckets(self, carrier: Rows, limits: Limits) -> list[Tensor]:
        """Lists of row numbers that go through the model together; together every row once."""

    @abstractmethod
    def split(
        self, carrier: Rows, rows: Tensor | None, limits: Limits
    ) -> Iterator[tuple[Rows, bool]]:
        """Micro-batches of some rows [m] or of all of them, and whether each is the last."""

    @abstractmethod
    def scored(self, tokens: TokenRows, logprobs_of: LogprobsOf, limits: Limits) -> TokenLogprobs:
        """[N, C] log-probabilities and entropies of all rows, a micro-batch at a time.

        Args:
            tokens: N rows.
            logprobs_of: asks a model about a micro-batch.
            limits: of a micro-batch.
        """

    def sums(self) -> StepSums:
        """Where the micro-batches of a step are counted."""
        return StepSums()

    def on_device(self, normalizers: Normalizers) -> Normalizers:
        """The same numbers where the losses are computed."""
        return normalizers


class Ragged(MicroBatching):
    """Micro-batches as small as their content, where the rollout is: on CPU and CUDA."""

    def step_rows(self, experience: TrainingBatch, rows: Tensor) -> TrainingBatch:
        """The rows without columns that none of them uses."""
        return experience.select(rows)

    def buckets(self, carrier: Rows, limits: Limits) -> list[Tensor]:
        """Rows of a prompt together where it is read once for all of them, else by length."""
        most = {"max_rows": limits.max_rows, "max_tokens": limits.max_tokens}
        lengths = carrier.completion_mask.sum(1)
        if limits.shared:
            return bucket_by_parent(lengths, carrier.prompt_mask.sum(1), carrier.prompt_of, **most)
        return length_buckets(lengths + carrier.prompt_mask.shape[1], **most)

    def split(
        self, carrier: Rows, rows: Tensor | None, limits: Limits
    ) -> Iterator[tuple[Rows, bool]]:
        """Micro-batches without columns that none of their rows uses."""
        chosen = carrier if rows is None else carrier.select(rows)
        buckets = self.buckets(chosen, limits)
        for number, bucket in enumerate(buckets, start=1):
            yield chosen.select(bucket), number == len(buckets)

    @torch.no_grad()
    def scored(self, tokens: TokenRows, logprobs_of: LogprobsOf, limits: Limits) -> TokenLogprobs:
        """Log-probabilities written to where their rows are."""
        shape, device = tokens.completion_ids.shape, tokens.completion_ids.device
        found = TokenLogprobs(*torch.zeros(2, *shape, device=device).unbind())
        for rows in self.buckets(tokens, limits):
            part = logprobs_of(tokens.select(rows))
            used = part.logprobs.shape[1]
            found.logprobs[rows, :used] = part.logprobs.to(found.logprobs.dtype)
            found.entropy[rows, :used] = part.entropy.to(found.entropy.dtype)
        return found


def mini_batches(num_rows: int, group_size: int, num_steps: int) -> list[Tensor]:
    """The rows of each optimizer step: whole groups in order, the same in every inner epoch.

    Args:
        num_rows: N.
        group_size: G.
        num_steps: optimizer steps of one pass over the rollout.

    Returns:
        Lists of row numbers, together every row once.
    """
    groups = torch.arange(num_rows).view(-1, group_size)
    return [part.flatten() for part in groups.tensor_split(num_steps) if part.numel()]


def rows_with_gradient(experience: TrainingBatch) -> Tensor:
    """Rows whose tokens have both weight and advantage.

    Without a KL or entropy term the gradient of the others is 0; their tokens stay in the
    denominators of the weights. One row is always kept, so that every process takes part in every
    optimizer step.

    Args:
        experience: M rows.

    Returns:
        [m] row numbers, at least one.
    """
    teaches = ((experience.advantages != 0) & (experience.weights != 0)).any(1)
    teaches[0] |= ~teaches.any()
    return teaches.nonzero().squeeze(1)


def check_centered(advantages: Tensor, objective: Objective, tolerance: float = 1e-4) -> None:
    """Make sure that the advantages of a group compared with itself sum to zero.

    Args:
        advantages: [B, G] of each completion.
        objective: what they were computed by; one without a group baseline, with a discount or
            with a filter need not be centered.
        tolerance: largest mean of a group, in units of its largest advantage or 1.

    Raises:
        RuntimeError: a group's advantages do not sum to zero.
    """
    kind = objective.advantages
    by_group = isinstance(kind, Normalized | DecoupledNormalized)
    if not (by_group and kind.compares and objective.gamma == 1):
        return
    off = advantages.mean(1).abs() / advantages.abs().amax(1).clamp(min=1)
    if bool((off > tolerance).any()):
        worst = int(off.argmax())
        raise RuntimeError(
            f"The advantages of prompt {worst} of this batch average {float(off[worst]):.3g} "
            f"instead of 0: {advantages[worst].tolist()}. Rewards and completions are misaligned."
        )
