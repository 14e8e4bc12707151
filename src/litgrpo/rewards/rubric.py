"""The weighted mean of a judge's marks for several criteria."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any

import torch

from litgrpo.argument_types import check_argument_types, check_field_types
from litgrpo.arguments import require
from litgrpo.rewards.calls import run_coroutines
from litgrpo.rewards.reward_model import Judge

Mark = float | None


@check_field_types
@dataclass(frozen=True)
class Criterion:
    """One line of a rubric.

    Args:
        text: the instruction for the judge; default: the criterion's name.
        weight: how much it counts, relative to the others.

    Example:
        >>> Criterion("Is every step of the reasoning correct?", weight=2.0).weight
        2.0
    """

    text: str | None = None
    weight: float = 1.0


def check_criteria(criteria: Mapping[str, Criterion], max_score: float) -> None:
    """Raise ValueError if there is no criterion, or a number is not above 0."""
    weights = {name: criterion.weight for name, criterion in criteria.items()}
    require(
        bool(weights) and all(0 < weight < inf for weight in weights.values()),
        f"rubric: needs at least one criterion, each with a weight above 0, got {weights}",
    )
    require(0 < max_score < inf, f"rubric: max_score is {max_score}; it must be above 0")


class Rubric(Judge):
    """The weighted mean of a judge's marks for several criteria.

    The judge is asked once for each criterion. A mark of None says that a criterion does not apply;
    the others then share its weight. A mark that is not a number, or outside of 0 to `max_score`,
    masks its completion.

    Args:
        criteria: {name: what to look at and how much it counts}.
        judge: `f(prompts, completions, criterion, **columns) -> list[float | None]`: a function, a
            coroutine function (all criteria are then asked together), or an object with such a
            `__call__`. It gets the columns that its signature names.
        max_score: the best mark; the reward is the mean divided by it.

    Example:
        >>> def count_words(prompts, completions, criterion):
        ...     return [float(len(text.split())) for text in completions]
        >>> rubric = Rubric({"detail": Criterion()}, judge=count_words, max_score=10.0)
        >>> rubric(["Why?"], ["Because it rained all night."])
        [0.5]
    """

    @check_argument_types()
    def __init__(
        self, criteria: Mapping[str, Criterion], judge: Callable[..., Any], max_score: float = 1.0
    ) -> None:
        check_criteria(criteria, max_score)
        parameters = inspect.signature(judge).parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.named = set(parameters)
        require(
            "criterion" in self.named or self.takes_all,
            "rubric: the judge has no parameter `criterion`, so it could not distinguish criteria;"
            " it is called as judge(prompts, completions, criterion=text)",
        )
        self.criteria = dict(criteria)
        self.judge = judge
        self.max_score = max_score

    @property
    def in_process(self) -> bool:  # type: ignore[override]
        """True if the judge holds weights, which are too large to copy."""
        return isinstance(self.judge, Judge)

    @property
    def isolated(self) -> bool:
        """True if the judge is foreign code that may hang."""
        return not self.in_process

    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """Load the judge, if it is one that holds weights."""
        if isinstance(self.judge, Judge):
            self.judge.load(device, policy)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Return N rewards from 0 to 1; None where no criterion applies."""
        rows = {**columns, "prompts": prompts, "completions": completions}
        arguments = {name: rows[name] for name in rows if self.takes_all or name in self.named}
        asked = [
            self.judge(**arguments | {"criterion": criterion.text or name})
            for name, criterion in self.criteria.items()
        ]
        if inspect.isawaitable(asked[0]):
            asked = run_coroutines(asked)
        listed = [
            self._check_marks(name, marks, len(completions))
            for name, marks in zip(self.criteria, asked, strict=True)
        ]
        return [self._mean(marks) for marks in zip(*listed, strict=True)]

    def _check_marks(self, name: str, marks: Any, num_rows: int) -> list[Mark]:
        listed = marks.tolist() if isinstance(marks, torch.Tensor) else marks
        require(
            isinstance(listed, list | tuple) and len(listed) == num_rows,
            f"rubric: for {num_rows} completions the judge gave {marks!r:.60} as marks of"
            f" criterion '{name}'; it must be a list of one number (or None) for each",
        )
        return [mark if mark is None else float(mark) for mark in listed]

    def _mean(self, marks: Sequence[Mark]) -> Mark:
        pairs = zip(marks, self.criteria.values(), strict=True)
        weighted = [(mark, criterion.weight) for mark, criterion in pairs if mark is not None]
        if not weighted:
            return None
        if not all(isfinite(mark) and 0 <= mark <= self.max_score for mark, _ in weighted):
            return nan
        return sum(m * w for m, w in weighted) / sum(w for _, w in weighted) / self.max_score
