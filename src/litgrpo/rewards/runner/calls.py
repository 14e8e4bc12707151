"""What a guard asks a reward function, and how it reads the answer; also inside a worker process.

Nothing here imports torch or numpy, so that a worker starts in a tenth of a second: where a
function returns a tensor or an array, its library is loaded already.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from numbers import Real
from typing import Any

DOUBLE_EPS = sys.float_info.epsilon
IDS = "completion_ids"
ATOMS = {str, int, float, bool, bytes, type(None)}
MARKS = ("whole_batch", "pure", "isolated", "in_process")
MAX_PRINTED = 5_000_000  # characters that one call may print
MAX_SHOWN = 20_000  # of which so many are shown

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One reward function and what it is to judge.

    Args:
        name: name of the part.
        function: the reward function.
        rows: {parameter: list of length N}, what differs from row to row.
        settings: {parameter: value}, the function's kwargs: the same for all rows and iterations.
        num_rows: N.
        context: {parameter: value}, the same for all rows of this iteration.
    """

    name: str
    function: Function
    rows: dict[str, list[Any]]
    settings: dict[str, Any]
    num_rows: int
    context: dict[str, Any] = field(default_factory=dict)

    def arguments(self, row: int | None = None) -> dict[str, Any]:
        """Copies of the arguments for all rows, or for one; changing them harms nobody."""
        chosen = slice(None) if row is None else slice(row, row + 1)
        rows = {
            name: copied_ids(values[chosen]) if name == IDS else copied(values[chosen])
            for name, values in self.rows.items()
        }
        return rows | self.context | own_settings(self.settings)

    def select(self, chosen: Sequence[int]) -> dict[str, list[Any]]:
        """The arguments of some rows, not copied."""
        if len(chosen) == self.num_rows:
            return self.rows
        return {name: [values[row] for row in chosen] for name, values in self.rows.items()}


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


def whole_batch(function: Function) -> Function:
    """Mark a function that compares completions: it always gets all of them at once."""
    function.whole_batch = True  # type: ignore[attr-defined]
    return function


def pure(function: Function) -> Function:
    """Mark a function whose reward of a row depends on that row only, and is always the same.

    It is then asked row by row, in several processes, and never twice for the same row.
    """
    function.pure = True  # type: ignore[attr-defined]
    return function


def isolated(function: Function) -> Function:
    """Mark a function of this package that may hang: it runs in a worker like a user's."""
    function.isolated = True  # type: ignore[attr-defined]
    return function


def is_marked(function: Any, mark: str) -> bool:
    """Whether a function, or what a partial of it holds, has a mark."""
    assert mark in MARKS
    while isinstance(function, partial):
        function = function.func
    return mark in dir(function) and bool(getattr(function, mark))


def is_coroutine(function: Function) -> bool:
    """Whether calling the function gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


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
    if _is_array(result):
        scores.precision = _eps(result)
    entries = _entries(result, num_rows)
    for row, entry in enumerate(entries):
        if type(entry) is float and isfinite(entry):  # the common case first
            scores.values[row] = entry
            continue
        plain = entry.tolist() if _is_array(entry) else entry
        if plain is not entry:
            scores.precision = max(scores.precision, _eps(entry))
        reason = _fault(plain)
        if reason:
            scores.failures[row] = reason
        elif plain is not None:
            scores.values[row] = float(plain)
    return scores


def _entries(result: Any, num_rows: int) -> Sequence[Any]:
    entries = result.tolist() if _is_array(result) else result
    if not isinstance(entries, list | tuple):
        kind = type(result).__name__
        raise MalformedResult(f"returned {kind} instead of a list of {num_rows} rewards")
    if len(entries) != num_rows:
        raise MalformedResult(f"returned {len(entries)} rewards for {num_rows} completions")
    return entries


def _fault(entry: object) -> str | None:
    """Why an entry is no reward, or None if it is one or abstains."""
    if entry is None:
        return None
    if not isinstance(entry, Real):
        return f"returned {type(entry).__name__}"
    try:
        return None if isfinite(entry) else f"returned {float(entry)}"
    except OverflowError:
        return "returned inf"


def _is_array(value: object) -> bool:
    """Whether it is a tensor, an array or a numpy number."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)
    )


def _eps(numbers: Any) -> float:
    """Machine epsilon of floating-point numbers; whole numbers are exact."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(numbers, torch.Tensor):
        return torch.finfo(numbers.dtype).eps if numbers.is_floating_point() else DOUBLE_EPS
    assert numpy is not None
    return float(numpy.finfo(numbers.dtype).eps) if numbers.dtype.kind == "f" else DOUBLE_EPS


def reason_of(error: BaseException) -> str:
    """The name under which a failure is counted."""
    return "wrong length" if isinstance(error, MalformedResult) else type(error).__name__


def failed(num_rows: int, reason: str, error: Exception | None = None) -> Scores:
    """The scores of a function that failed for all of N rows."""
    return Scores([nan] * num_rows, dict.fromkeys(range(num_rows), reason), error=error)


def joined(rows: Iterable[Scores], error: Exception | None) -> Scores:
    """One result from those of single rows."""
    rows = list(rows)
    return Scores(
        values=[row.values[0] for row in rows],
        failures={n: row.failures[0] for n, row in enumerate(rows) if row.failures},
        precision=max((row.precision for row in rows), default=DOUBLE_EPS),
        error=error,
    )


def own_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose lists and dicts are copies; a judge or a model is handed over as it is."""
    return {
        name: copied(value) if isinstance(value, list | dict) else value
        for name, value in settings.items()
    }


def copied_ids(rows: list[Any]) -> list[Any]:
    """Copies of lists of token ids; a look at each id would cost more than all else."""
    return [row[:] if type(row) is list else copied(row) for row in rows]


def copied(value: Any) -> Any:
    """A deep copy, quick for the lists of plain values that columns are made of."""
    if type(value) in ATOMS:
        return value
    if type(value) is list:
        return value[:] if ATOMS.issuperset(map(type, value)) else [copied(item) for item in value]
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return copy.deepcopy(value)
