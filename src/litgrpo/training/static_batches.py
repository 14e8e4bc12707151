"""Micro-batches of one shape, for devices that compile a program for each set of shapes.

The rollout lies on the host. Every micro-batch has the same number of rows, each with a prompt of
its own, and all columns; rows that are missing are filled up with one that counts nothing. What
micro-batches report stays on the device until the optimizer step needs it, by one wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from litgrpo.algorithms.losses import Normalizers
from litgrpo.distributed.device import Backend, to_host
from litgrpo.training.micro_batches import Limits, LogprobsOf, MicroBatching, Rows, StepSums
from litgrpo.types import (
    PROMPT_FIELDS,
    LossOutput,
    Stats,
    TokenLogprobs,
    TokenRows,
    TrainingBatch,
    row_fields,
)


class StaticSums(StepSums):
    """Reports of micro-batches, kept on the device until all of them are read at once.

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
        """Everything that was counted, on the host; see `StepSums.read`."""
        self.device.flush()
        *reports, norm = to_host([*self.reports, grad_norm])
        for report in reports:
            self.totals.add(dict(zip(self.names, report, strict=False)))
        loss = torch.stack([report[-1, 0] for report in reports]).sum()
        return self.totals.sums, loss, norm


@dataclass(frozen=True)
class Static(MicroBatching):
    """Micro-batches of one shape.

    Args:
        device: computes them.
    """

    device: Backend

    def step_rows(self, experience: TrainingBatch, rows: Tensor) -> TrainingBatch:
        """The rows with all of their columns."""
        return whole_rows(experience, rows)

    def rows_at_once(self, carrier: TokenRows | TrainingBatch, limits: Limits) -> int:
        """Rows of every micro-batch: padding counts, the prompt in each row; chips share evenly."""
        width = carrier.prompt_ids.shape[1] + carrier.completion_ids.shape[1]
        most = [len(carrier)]
        if limits.max_rows is not None:
            most.append(limits.max_rows)
        if limits.max_tokens is not None:
            most.append(limits.max_tokens // width)
        return -(-max(1, min(most)) // self.device.num_chips) * self.device.num_chips

    def buckets(self, carrier: Rows, limits: Limits) -> list[Tensor]:
        """Rows in their order."""
        return list(torch.arange(len(carrier)).split(self.rows_at_once(carrier, limits)))

    def split(
        self, carrier: Rows, rows: Tensor | None, limits: Limits
    ) -> Iterator[tuple[Rows, bool]]:
        """Micro-batches on the device, the last one filled up."""
        chosen = torch.arange(len(carrier)) if rows is None else rows
        at_once = self.rows_at_once(carrier, limits)
        buckets = chosen.split(at_once)
        for number, bucket in enumerate(buckets, start=1):
            yield self.filled(carrier, bucket, at_once), number == len(buckets)

    def filled(self, carrier: Rows, rows: Tensor, at_once: int) -> Rows:
        """A micro-batch on the device, filled up to the one shape.

        Args:
            carrier: M rows on the host.
            rows: [m] row numbers, at most `at_once`.
            at_once: rows of the micro-batch.
        """
        missing = at_once - len(rows)
        chosen = whole_rows(carrier, torch.cat([rows, rows[:1].expand(missing)]))
        filling = (torch.arange(at_once) >= len(rows))[:, None]
        values = row_fields(chosen)
        # A row that only fills up has no tokens, so it has no weight either.
        for name in {"completion_mask", "loss_mask", "weights"} & values.keys():
            values[name] = values[name].masked_fill(filling, 0)
        values |= {name: getattr(chosen, name) for name in (*PROMPT_FIELDS, "prompt_of")}
        self.device.note_shapes("micro-batch", **values)
        return replace(
            chosen, **{name: self.device.rows_to(value) for name, value in values.items()}
        )

    def scored(self, tokens: TokenRows, logprobs_of: LogprobsOf, limits: Limits) -> TokenLogprobs:
        """Log-probabilities and entropies on the host, by one wait at the end."""
        parts: list[Tensor] = []
        with torch.no_grad():
            for micro, _ in self.split(tokens, None, limits):
                found = logprobs_of(micro)
                parts += [found.logprobs, found.entropy]
                self.device.flush()
        parts = to_host(parts)
        number = len(tokens)
        return TokenLogprobs(*(torch.cat(parts[kind::2])[:number] for kind in (0, 1)))

    def sums(self) -> StepSums:
        """Sums that are read at the end of a step."""
        return StaticSums(self.device)

    def on_device(self, normalizers: Normalizers) -> Normalizers:
        """As inputs of the program, so that other numbers do not need another one."""
        threshold = normalizers.entropy_threshold
        return Normalizers(
            self.device.number_to(normalizers.num_tokens),
            None if threshold is None else self.device.number_to(threshold),
        )


def whole_rows(carrier: Rows, rows: Tensor) -> Rows:
    """The given rows, each with a prompt of its own, and no column cut off.

    Args:
        carrier: M rows.
        rows: [m] row numbers; a row may come twice.
    """
    chosen = {name: value[rows] for name, value in row_fields(carrier).items()}
    for name in PROMPT_FIELDS:
        chosen[name] = getattr(carrier, name)[carrier.prompt_of[rows]]
    return replace(carrier, prompt_of=torch.arange(len(rows)), **chosen)
