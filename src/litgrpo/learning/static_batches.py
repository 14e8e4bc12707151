"""Micro-batches of one static shape, for XLA devices, which compile a program for each shape.

The rollout stays in the host's memory. Every micro-batch has the same number of rows and all
columns, and each row has its own copy of the prompt. Filler rows have zero loss weight. Statistics
stay on the device until the optimizer step needs them, which costs a single wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from litgrpo.algorithms.aggregation import MicroBatchTokenMean
from litgrpo.algorithms.objective import Objective
from litgrpo.distributed.device import Backend, to_host
from litgrpo.learning.micro_batches import BatchLimits, FieldsOf, MicroBatch, MicroBatching
from litgrpo.metrics import StepSums
from litgrpo.models.loading.load import Precision
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.sources.base import RolloutSource
from litgrpo.types import LossOutput, Stats, TokenRows, TrainingBatch


class StaticSums(StepSums):
    """Sums of a step, kept on the device until all of them are read at once.

    Args:
        device: computes the micro-batches.
    """

    def __init__(self, device: Backend) -> None:
        super().__init__()
        self.device = device
        self.names: list[str] = []
        self.reports: list[Tensor] = []

    def add(self, output: LossOutput) -> None:
        """Keep sums, counts and loss of a micro-batch as one [K + 1, 2] tensor."""
        self.names = list(output.stats)
        loss = output.loss.detach().float()
        self.reports.append(torch.stack([*output.stats.values(), torch.stack([loss, loss])]))
        self.device.flush()

    def read(self, grad_norm: Tensor) -> tuple[Stats, Tensor, Tensor]:
        """Copy all sums to the host, with a single wait for the device."""
        self.device.flush()
        *reports, norm = to_host([*self.reports, grad_norm])
        for report in reports:
            self.totals.add(dict(zip(self.names, report, strict=False)))
        loss = torch.stack([report[-1, 0] for report in reports]).sum()
        return self.totals.sums, loss, norm


@dataclass(frozen=True)
class StaticBatches(MicroBatching):
    """Micro-batches of one shape.

    Args:
        device: the XLA device.

    Example:
        >>> from litgrpo.distributed.device import backend
        >>> StaticBatches(backend(torch.device("cpu"))).device.num_chips
        1
    """

    device: Backend

    def select_mini_batch(self, batch: TrainingBatch, rows: Tensor) -> TrainingBatch:
        """Select rows with all of their columns, each with its own copy of the prompt."""
        fields = {name: value[rows] for name, value in batch.row_fields().items()}
        return replace(batch, tokens=select_whole_rows(batch.tokens, rows), **fields)

    def rows_at_once(self, tokens: TokenRows, limits: BatchLimits) -> int:
        """Return the rows of every micro-batch, a multiple of the chips; padded tokens count."""
        width = tokens.prompt_ids.shape[1] + tokens.completion_ids.shape[1]
        rows = len(tokens)
        if limits.max_rows is not None:
            rows = min(rows, limits.max_rows)
        if limits.max_tokens is not None:
            rows = min(rows, limits.max_tokens // width)
        # The rows of a micro-batch are sharded over the chips: round up to a multiple of them.
        return math.ceil(max(1, rows) / self.device.num_chips) * self.device.num_chips

    def buckets(self, tokens: TokenRows, limits: BatchLimits) -> list[Tensor]:
        """Split rows in order."""
        return list(torch.arange(len(tokens)).split(self.rows_at_once(tokens, limits)))

    def split(
        self, batch: TrainingBatch, rows: Tensor | None, limits: BatchLimits
    ) -> Iterator[MicroBatch]:
        """Yield micro-batches on the device, the last one filled to the same shape."""
        numbers = torch.arange(len(batch)) if rows is None else rows
        num_rows = self.rows_at_once(batch.tokens, limits)
        buckets = numbers.split(num_rows)
        for number, bucket in enumerate(buckets, start=1):
            filled = self.fill(batch, bucket, num_rows)
            yield MicroBatch(filled, is_last=number == len(buckets))

    def fill(self, batch: TrainingBatch, rows: Tensor, num_rows: int) -> TrainingBatch:
        """Build a micro-batch of the static shape on the device.

        Args:
            batch: M rows on the host.
            rows: [m] row numbers, at most `num_rows` of them.
            num_rows: rows of the micro-batch.
        """
        tokens = self.fill_tokens(batch.tokens, rows, num_rows)
        # A filler row has no tokens and no loss weight, so its gradient is exactly 0.
        unused = {"loss_mask", "loss_weights", "term_weights"}
        fields = _fill_rows(batch.row_fields(), rows, num_rows, unused)
        return replace(batch, tokens=tokens, **self._to_device(fields))

    def fill_tokens(self, tokens: TokenRows, rows: Tensor, num_rows: int) -> TokenRows:
        """Build the input of a model of the static shape on the device; see `fill`."""
        filled = select_whole_rows(tokens, _with_fillers(rows, num_rows))
        fields = _fill_rows(tokens.row_fields(), rows, num_rows, {"completion_mask", "predicted"})
        fields["prompt_ids"] = filled.prompt_ids
        fields["prompt_mask"] = filled.prompt_mask
        fields["prompt_of"] = filled.prompt_of
        return replace(filled, **self._to_device(fields))

    def _to_device(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        self.device.note_shapes("micro-batch", **fields)
        return {name: self.device.rows_to(value) for name, value in fields.items()}

    def compute_fields(
        self, tokens: TokenRows, fields_of: FieldsOf, limits: BatchLimits
    ) -> dict[str, Tensor]:
        """Compute micro-batches, and copy the results to the host with one wait."""
        parts: list[Tensor] = []
        names: list[str] = []
        with torch.no_grad():
            num_rows = self.rows_at_once(tokens, limits)
            for rows in self.buckets(tokens, limits):
                fields = fields_of(self.fill_tokens(tokens, rows, num_rows))
                names = list(fields)
                parts += fields.values()
                self.device.flush()
        parts = to_host(parts)
        num_rows = len(tokens)  # without the filler rows at the end
        columns = (torch.cat(parts[n :: len(names)])[:num_rows] for n in range(len(names)))
        return dict(zip(names, columns, strict=True))

    def sums(self) -> StepSums:
        """Return sums that are read at the end of a step."""
        return StaticSums(self.device)


def select_whole_rows(tokens: TokenRows, rows: Tensor) -> TokenRows:
    """Select rows [m], each with its own copy of the prompt, without cutting columns."""
    prompts = tokens.prompt_of[rows]
    return replace(
        tokens,
        prompt_ids=tokens.prompt_ids[prompts],
        prompt_mask=tokens.prompt_mask[prompts],
        prompt_of=torch.arange(len(rows)),
        **{name: value[rows] for name, value in tokens.row_fields().items()},
    )


def _with_fillers(rows: Tensor, num_rows: int) -> Tensor:
    """Return row numbers [m] and, as often as `num_rows` needs, the first one again."""
    return torch.cat([rows, rows[:1].expand(num_rows - len(rows))])


def _fill_rows(
    fields: dict[str, Tensor], rows: Tensor, num_rows: int, unused: set[str]
) -> dict[str, Tensor]:
    """Select rows [m] of fields [M, C, ...] and fillers, in which the `unused` fields are 0."""
    filled = {name: value[_with_fillers(rows, num_rows)] for name, value in fields.items()}
    for name in unused & filled.keys():
        filled[name][len(rows) :] = 0
    return filled


def check_static_shapes(
    engine: RolloutEngine,
    objective: Objective,
    precision: Precision,
    source: RolloutSource,
) -> None:
    """Check that a device that compiles a program per shape can compute a run.

    Raises:
        ValueError: shapes follow the completions, or the gradient depends on the rows of a
            micro-batch, or dropout would differ when activations are recomputed.
    """
    if "static shapes" not in engine.allows:
        raise ValueError(
            f"engine is {type(engine).__name__}, whose shapes follow the completions, but this "
            "device compiles a program for each shape. Set engine: {class_path: StaticEngine}, as "
            "the config overrides for such devices in configs/hardware do."
        )
    if not source.fixed_shapes:
        raise ValueError(
            f"model.source is {type(source).__name__}, but shapes of its completions differ, and "
            "this device compiles a program for each shape. Train on a CPU or a GPU, or leave it "
            "out."
        )
    if isinstance(objective.resolved_aggregation, MicroBatchTokenMean):
        raise ValueError(
            "model.objective.loss_aggregation divides by the tokens of a micro-batch, which has a "
            "fixed shape with filler rows on this device. Use token_mean."
        )
    if precision.gradient_checkpointing and not precision.disable_dropout:
        raise ValueError(
            "model.precision.disable_dropout is false and model.precision.gradient_checkpointing "
            "is on, but this device cannot draw the same dropout again. Change one of them."
        )
