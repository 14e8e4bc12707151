"""A rubric: one reward from the marks that a judge gives for several criteria."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any

import torch

from litgrpo.arguments import require
from litgrpo.rewards.reward_model import Judge
from litgrpo.rewards.runner.event_loop import gathered

Mark = float | None


@dataclass(frozen=True)
class Criterion:
    """One line of a rubric.

    Args:
        text: what the judge is told to look at; default: the criterion's name.
        weight: how much it counts, relative to the others.
    """

    text: str | None = None
    weight: float = 1.0


class Rubric(Judge):
    """The weighted mean of a judge's marks for several criteria.

    The judge is asked once for each criterion. A mark of None says that a criterion does not apply;
    the others then share its weight. A mark that is not a number, or outside of 0 to `highest`,
    masks its completion.

    Args:
        criteria: {name: what to look at and how much it counts}.
        judge: `f(prompts, completions, criterion, **columns) -> list[float | None]`: a function, a
            coroutine function (all criteria are then asked together), or an object with such a
            `__call__`. It gets the columns that its signature names.
        highest: the best mark; the reward is the mean divided by it.
    """

    def __init__(
        self, criteria: Mapping[str, Criterion], judge: Callable[..., Any], highest: float = 1.0
    ) -> None:
        weights = {name: criterion.weight for name, criterion in criteria.items()}
        require(
            bool(weights) and all(0 < weight < inf for weight in weights.values()),
            f"rubric: needs at least one criterion, each with a weight above 0, got {weights}",
        )
        require(0 < highest < inf, f"rubric: highest is {highest}; it must be above 0")
        parameters = inspect.signature(judge).parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.named = set(parameters)
        require(
            "criterion" in self.named or self.takes_all,
            "rubric: the judge has no parameter `criterion`, so it could not tell them apart;"
            " it is called as judge(prompts, completions, criterion=text)",
        )
        self.criteria = dict(criteria)
        self.judge = judge
        self.highest = highest

    @property
    def in_process(self) -> bool:  # type: ignore[override]
        """Whether the judge itself is too heavy to copy."""
        return isinstance(self.judge, Judge)

    @property
    def isolated(self) -> bool:
        """Whether the judge is foreign code that may hang."""
        return not self.in_process

    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """Load the judge, if it is one that holds weights."""
        if isinstance(self.judge, Judge):
            self.judge.load(device, policy)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Ask for every criterion.

        Args:
            prompts: N prompts.
            completions: N completions.
            columns: what else is known of them.

        Returns:
            N rewards from 0 to 1; None where no criterion applies.
        """
        rows = {**columns, "prompts": prompts, "completions": completions}
        known = {name: rows[name] for name in rows if self.takes_all or name in self.named}
        asked = [
            self.judge(**known | {"criterion": criterion.text or name})
            for name, criterion in self.criteria.items()
        ]
        if inspect.isawaitable(asked[0]):
            asked = gathered(asked)
        dtypes = [marks.dtype for marks in asked if isinstance(marks, torch.Tensor)]
        listed = [
            self._checked(name, marks, len(completions))
            for name, marks in zip(self.criteria, asked, strict=True)
        ]
        means = [self._mean(marks) for marks in zip(*listed, strict=True)]
        if not dtypes:
            return means
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)  # equal up to rounding
        return [mean if mean is None else torch.tensor(mean, dtype=coarsest) for mean in means]

    def _checked(self, name: str, marks: Any, num_rows: int) -> list[Mark]:
        listed = marks.tolist() if isinstance(marks, torch.Tensor) else marks
        require(
            isinstance(listed, list | tuple) and len(listed) == num_rows,
            f"rubric: for {num_rows} completions the judge gave {marks!r:.60} as marks of"
            f" criterion '{name}'; it must be a list of one number (or None) for each",
        )
        return [mark if mark is None else float(mark) for mark in listed]

    def _mean(self, marks: Sequence[Mark]) -> Mark:
        pairs = zip(marks, self.criteria.values(), strict=True)
        given = [(mark, criterion.weight) for mark, criterion in pairs if mark is not None]
        if not given:
            return None
        if not all(isfinite(mark) and 0 <= mark <= self.highest for mark, _ in given):
            return nan
        return sum(m * w for m, w in given) / sum(w for _, w in given) / self.highest
