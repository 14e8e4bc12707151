"""Reward functions are other people's code: a bad one may cost its own samples, never the run.

A guard runs the calls of one iteration and hands back one float per row, with the rows that failed
and why. This file holds what every guard shares (reading results, counting, stopping) and the one
that runs the functions in this process; it cannot interrupt a function that hangs.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite, nan
from numbers import Real
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

DOUBLE_EPS = torch.finfo(torch.float64).eps
ATOMS = {str, int, float, bool, bytes, type(None)}


class RewardFailure(RuntimeError):
    """So many rewards of one function failed that going on would train on noise."""


@dataclass(frozen=True, eq=False)
class Call:
    """One reward function and what it is to judge.

    Args:
        name: name of the part.
        function: the reward function.
        rows: {parameter: list of length N}, what differs from row to row.
        settings: {parameter: value}, what is the same for all rows.
        num_rows: N.
    """

    name: str
    function: Callable[..., Any]
    rows: dict[str, list[Any]]
    settings: dict[str, Any]
    num_rows: int

    def arguments(self, row: int | None = None) -> dict[str, Any]:
        """Copies of the arguments for all rows, or for one; changing them harms nobody."""
        chosen = slice(None) if row is None else slice(row, row + 1)
        rows = {name: _copied(values[chosen]) for name, values in self.rows.items()}
        settings = {  # a judge or a trainer state is handed over as it is
            name: _copied(value) if isinstance(value, list | dict) else value
            for name, value in self.settings.items()
        }
        return rows | settings


@dataclass
class Scores:
    """What a function said of N rows.

    Args:
        values: N numbers; NaN where the function abstained or failed.
        failures: {row: reason} of the rows that failed.
        precision: machine epsilon of the coarsest arithmetic that the numbers came in.
        error: the first exception, if the function raised any.
    """

    values: list[float]
    failures: dict[int, str] = field(default_factory=dict)
    precision: float = DOUBLE_EPS
    error: Exception | None = None


class MalformedResult(ValueError):
    """A function returned something that is not one reward per completion."""


def whole_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that compares completions: it is never retried row by row."""
    function.whole_batch = True  # type: ignore[attr-defined]
    return function


class Guard(ABC):
    """Runs reward functions, counts what fails, stops the run when too much does.

    Args:
        deadline_s: seconds that one function may take per iteration, retries included.
        max_failed_frac: share of one function's rows in one iteration that may fail; more stops the
            run.
    """

    def __init__(self, deadline_s: float = 60.0, max_failed_frac: float = 0.5) -> None:
        """See the class."""
        if not (deadline_s > 0 and 0 <= max_failed_frac <= 1):
            raise ValueError(
                f"a guard needs deadline_s > 0 and max_failed_frac in [0, 1], got {deadline_s} and"
                f" {max_failed_frac}"
            )
        self.deadline_s = deadline_s
        self.max_failed_frac = max_failed_frac
        self.failures: dict[str, Counter[str]] = {}
        self.proven: set[str] = set()

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Scores]:
        """Run every call and read its result; raises for nothing that a reward function does."""

    def __call__(self, calls: Sequence[Call]) -> list[Scores]:
        """The scores of every call, after counting and showing failures.

        Raises:
            ValueError: a function that never worked before returned no list of N rewards: a mistake
                in its code.
            RewardFailure: more than `max_failed_frac` of a function's rows failed.
        """
        results = self.run(calls)
        for call, scores in zip(calls, results, strict=True):
            if isinstance(scores.error, MalformedResult) and call.name not in self.proven:
                raise ValueError(f"reward '{call.name}' {scores.error}")
            if scores.failures:
                self._count(call, scores)
            if len(scores.failures) < call.num_rows:
                self.proven.add(call.name)
        return results

    def _count(self, call: Call, scores: Scores) -> None:
        counts = self.failures.setdefault(call.name, Counter())
        before, first = counts.total(), min(scores.failures)
        counts.update(scores.failures.values())
        reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
        summary = (
            f"reward '{call.name}': {len(scores.failures)} of {call.num_rows} completions failed"
        )
        if not before:
            given = (f"{name} {values[first]!r:.200}" for name, values in call.rows.items())
            log.warning(
                "%s and are left out (%s); the first is row %d, which got %s",
                *(summary, reasons, first, ", ".join(given)),
                exc_info=scores.error,
            )
        elif counts.total().bit_length() > before.bit_length():  # each time that the total doubles
            log.warning("%s; so far %d (%s)", summary, counts.total(), reasons)
        if len(scores.failures) > self.max_failed_frac * call.num_rows:
            raise RewardFailure(
                f"{summary}, more than max_failed_frac = {self.max_failed_frac} allows."
                f" Reasons so far: {reasons}."
            ) from scores.error


class InProcessGuard(Guard):
    """Runs the functions here, one after the other; coroutine functions together.

    A call that raises is repeated row by row until the deadline, so that only the bad rows are
    lost.
    """

    def run(self, calls: Sequence[Call]) -> list[Scores]:
        """See Guard."""
        waiting = {n: call for n, call in enumerate(calls) if _is_coroutine(call.function)}
        finished = _finish([self._score_async(call) for call in waiting.values()])
        results = dict(zip(waiting, finished, strict=True))
        return [results[n] if n in results else self._score(call) for n, call in enumerate(calls)]

    def _score(self, call: Call) -> Scores:
        deadline = time.monotonic() + self.deadline_s
        try:
            return read_result(call.function(**call.arguments()), call.num_rows)
        except Exception as error:
            if _is_whole_batch(call.function):
                return _all_failed(call, error)
            first = error
        rows = []
        for row in range(call.num_rows):
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError
                rows.append(read_result(call.function(**call.arguments(row)), 1))
            except Exception as error:
                rows.append(Scores([nan], {0: _reason(error)}))
        return _joined(rows, first)

    async def _score_async(self, call: Call) -> Scores:
        async def attempt(row: int | None, num_rows: int) -> Scores:
            # Can be interrupted: half of the deadline for the whole, half for the rows.
            answer = call.function(**call.arguments(row))
            return read_result(await asyncio.wait_for(answer, self.deadline_s / 2), num_rows)

        try:
            return await attempt(None, call.num_rows)
        except Exception as error:
            if _is_whole_batch(call.function):
                return _all_failed(call, error)
            first = error
        attempts = (attempt(row, 1) for row in range(call.num_rows))
        rows = await asyncio.gather(*attempts, return_exceptions=True)
        return _joined([_scored(row) for row in rows], first)


def read_result(result: object, num_rows: int) -> Scores:
    """What a function returned, as numbers.

    None abstains. NaN, infinities and anything that is not a real number fail their row.

    Args:
        result: list, tuple, array or tensor of length N.
        num_rows: N.

    Raises:
        MalformedResult: not N entries, or no sequence at all.
    """
    scores = Scores([nan] * num_rows)
    if isinstance(result, torch.Tensor | np.ndarray):
        scores.precision, result = _eps(result), result.tolist()
    if not isinstance(result, list | tuple):
        kind = type(result).__name__
        raise MalformedResult(f"returned {kind} instead of a list of {num_rows} rewards")
    if len(result) != num_rows:
        raise MalformedResult(f"returned {len(result)} rewards for {num_rows} completions")
    for row, entry in enumerate(result):
        if isinstance(entry, torch.Tensor | np.generic):
            scores.precision = max(scores.precision, _eps(entry))
            entry = entry.tolist()  # noqa: PLW2901
        if entry is None:
            continue
        reason = _fault(entry)
        if reason:
            scores.failures[row] = reason
        else:
            scores.values[row] = float(entry)
    return scores


def _fault(entry: object) -> str | None:
    """Why an entry is no reward, or None if it is one."""
    if not isinstance(entry, Real):
        return f"returned {type(entry).__name__}"
    try:
        return None if isfinite(entry) else f"returned {float(entry)}"
    except OverflowError:
        return "returned inf"


def _eps(numbers: torch.Tensor | np.ndarray[Any, Any] | np.generic) -> float:
    """Machine epsilon of floating-point numbers; whole numbers are exact."""
    if isinstance(numbers, torch.Tensor):
        return torch.finfo(numbers.dtype).eps if numbers.is_floating_point() else DOUBLE_EPS
    return float(np.finfo(numbers.dtype).eps) if numbers.dtype.kind == "f" else DOUBLE_EPS


def _reason(error: BaseException) -> str:
    return "wrong length" if isinstance(error, MalformedResult) else type(error).__name__


def _all_failed(call: Call, error: Exception) -> Scores:
    reasons = dict.fromkeys(range(call.num_rows), _reason(error))
    return Scores([nan] * call.num_rows, reasons, error=error)


def _scored(row: Scores | BaseException) -> Scores:
    return row if isinstance(row, Scores) else Scores([nan], {0: _reason(row)})


def _joined(rows: Sequence[Scores], error: Exception) -> Scores:
    """One result from those of single rows."""
    return Scores(
        values=[row.values[0] for row in rows],
        failures={n: row.failures[0] for n, row in enumerate(rows) if row.failures},
        precision=max((row.precision for row in rows), default=DOUBLE_EPS),
        error=error,
    )


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def _is_whole_batch(function: Any) -> bool:
    return "whole_batch" in dir(function) and bool(function.whole_batch)


def _finish(coroutines: Sequence[Coroutine[Any, Any, Scores]]) -> list[Scores]:
    """Run coroutines together, in a thread of their own: a notebook has a loop in this one."""

    async def together() -> list[Scores]:
        return list(await asyncio.gather(*coroutines))

    if not coroutines:
        return []
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, together()).result()


def _copied(value: Any) -> Any:
    """A deep copy, quick for the lists of plain values that columns are made of."""
    if type(value) in ATOMS:
        return value
    if type(value) is list:
        return value[:] if ATOMS.issuperset(map(type, value)) else [_copied(item) for item in value]
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)
