"""Learning where programs are compiled for each shape: micro-batches of one shape, few reads.

The experience lies on the host. Every micro-batch has the same number of rows, each with a prompt
of its own, and all columns; rows that are missing are filled up with one that counts nothing. What
micro-batches report stays on the device until the optimizer step needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.algorithm.objective import Objective
from litgrpo.algorithm.weighting import PerTokenOfMicroBatch
from litgrpo.learner.config import UpdateConfig
from litgrpo.learner.metrics import Totals
from litgrpo.models.loading import Precision
from litgrpo.parallel.device import CHIPS, compiles_shapes, mark_step, rows_to, seen, to_host
from litgrpo.rollout.engines.interface import RolloutEngine
from litgrpo.types import ROW_FIELDS, Experience, LossOutput, TokenLogprobs


def check_repeats(precision: Precision, device: torch.device) -> None:
    """Refuse dropout that would be drawn anew where activations are computed a second time.

    Raises:
        ValueError: the device cannot repeat its random numbers in the middle of a program.
    """
    if compiles_shapes(device) and precision.gradient_checkpointing and precision.dropout:
        raise ValueError(
            "precision.dropout and precision.gradient_checkpointing are both on, but this device "
            "cannot draw the same numbers a second time. Leave one of them off."
        )


def check_fits(engine: RolloutEngine, objective: Objective, device: torch.device) -> None:
    """Refuse what cannot be computed in fixed shapes, on a device that compiles for each shape.

    Raises:
        ValueError: the engine's shapes change, or the weighting counts the rows of a micro-batch.
    """
    if engine.fixed_shapes and isinstance(objective.weighting, PerTokenOfMicroBatch):
        raise ValueError(
            "objective.weighting is PerTokenOfMicroBatch, whose gradient depends on the rows of a "
            "micro-batch, which are filled up in fixed shapes. Take PerToken."
        )
    if compiles_shapes(device) and not engine.fixed_shapes:
        raise ValueError(
            f"engine is {type(engine).__name__}, whose shapes follow the completions, but this "
            "device compiles a program for each shape. Give engine: {class_path: StaticEngine}, "
            "as the overlays for such devices in configs/hardware do."
        )


def whole_rows(experience: Experience, rows: Tensor) -> Experience:
    """The given rows, each with a prompt of its own, and no column cut off.

    Args:
        experience: M rows.
        rows: [m] row numbers; a row may come twice.
    """
    prompt_of = experience.prompt_of[rows]
    of_rows: dict[str, Any] = {}
    for name in ROW_FIELDS:
        value = getattr(experience, name)
        of_rows[name] = None if value is None else value[rows]
    return Experience(
        prompt_ids=experience.prompt_ids[prompt_of],
        prompt_mask=experience.prompt_mask[prompt_of],
        prompt_of=torch.arange(len(rows)),
        **of_rows,
    )


class Rows:
    """The rows of an optimizer step, as micro-batches of one shape.

    Args:
        experience: M rows on the host.
        config: the limits of a micro-batch; padding counts, the prompt in each row.
        device: where micro-batches go.
    """

    def __init__(self, experience: Experience, config: UpdateConfig, device: torch.device) -> None:
        """Decide on the number of rows at once; several chips share it evenly."""
        self.experience, self.device = experience, device
        width = experience.prompt_ids.shape[1] + experience.completion_ids.shape[1]
        limits = [len(experience)]
        if config.micro_batch_size is not None:
            limits.append(config.micro_batch_size)
        if config.max_tokens is not None:
            limits.append(config.max_tokens // width)
        self.at_once = -(-max(1, min(limits)) // CHIPS.number) * CHIPS.number

    def split(self, rows: Tensor) -> list[Tensor]:
        """Lists of row numbers that go through the model together, together all of the given."""
        return list(rows.split(self.at_once))

    def micro(self, rows: Tensor) -> Experience:
        """A micro-batch on the device, filled up to the one shape.

        Args:
            rows: [m] row numbers, at most `at_once`.
        """
        missing = self.at_once - len(rows)
        chosen = whole_rows(self.experience, torch.cat([rows, rows[:1].expand(missing)]))
        filling = (torch.arange(self.at_once) >= len(rows))[:, None]
        chosen = replace(
            chosen,
            completion_mask=chosen.completion_mask & ~filling,
            weights=chosen.weights.masked_fill(filling, 0.0),
        )
        tensors = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
        tensors = {name: value for name, value in tensors.items() if value is not None}
        seen("micro-batch", **tensors)
        moved = {name: rows_to(value, self.device) for name, value in tensors.items()}
        return replace(chosen, **moved)

    def scored(self, logprobs_of: Callable[[Experience], TokenLogprobs]) -> TokenLogprobs:
        """[M, C] log-probabilities and entropies of all rows, on the host.

        Args:
            logprobs_of: what to ask about a micro-batch.
        """
        parts = []
        for rows in self.split(torch.arange(len(self.experience))):
            found = logprobs_of(self.micro(rows))
            parts += [found.logprobs, found.entropy]
            mark_step(self.device)
        parts = to_host(parts)
        number = len(self.experience)
        return TokenLogprobs(*(torch.cat(parts[kind::2])[:number] for kind in (0, 1)))


class Unread:
    """What micro-batches report, kept on the device until all of it is read at once."""

    def __init__(self) -> None:
        """Nothing reported."""
        self.names: list[str] = []
        self.reports: list[Tensor] = []

    def add(self, output: LossOutput) -> None:
        """Keep sums, counts and loss of a micro-batch as one [K + 1, 2] tensor."""
        self.names = list(output.stats)
        loss = output.loss.detach().float()
        self.reports.append(torch.stack([*output.stats.values(), torch.stack([loss, loss])]))

    def read(self, totals: Totals, *others: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Count everything, by one wait for the device.

        Args:
            totals: gets the sums and counts.
            others: further tensors that are needed on the host.

        Returns:
            [] the loss of all micro-batches together, and the others.
        """
        found = to_host([*self.reports, *others])
        reports, rest = found[: len(self.reports)], found[len(self.reports) :]
        for report in reports:
            totals.add(dict(zip(self.names, report, strict=False)))
        self.reports = []
        return torch.stack([report[-1, 0] for report in reports]).sum(), rest
