"""A call of a reward function and how its answer is read; also used inside worker processes.

Nothing here imports torch or numpy, so that a worker starts in a tenth of a second: where a
function returns a tensor or an array, its library is loaded already.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from numbers import Real
from typing import Any

DOUBLE_EPS = sys.float_info.epsilon
IDS = "completion_ids"
ATOMS = {str, int, float, bool, bytes, type(None)}
ARRAYS = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"))
MARKS = ("whole_batch", "pure", "isolated", "in_process")
MAX_PRINTED = 5_000_000  # characters that one call may print
MAX_SHOWN = 20_000  # of which so many are shown

Function = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One reward function and the rows that it scores.

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

    def arguments(self, rows: slice = slice(None)) -> dict[str, Any]:
        """Copies of the arguments, since a function may change what it is given."""
        chosen = {
            name: copied_ids(values[rows]) if name == IDS else copied(values[rows])
            for name, values in self.rows.items()
        }
        return chosen | self.context | own_settings(self.settings)

    def select(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """The arguments of some rows, not copied."""
        return {name: [values[row] for row in rows] for name, values in self.rows.items()}


@dataclass
class Scores:
    """The rewards that a function gave to N rows.

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

    def put(self, rows: Sequence[int], other: Scores) -> None:
        """Enter the scores of some rows, in the order of `rows`."""
        for row, value in zip(rows, other.values, strict=True):
            self.values[row] = value
        self.failures |= {rows[place]: reason for place, reason in other.failures.items()}
        self.precision = max(self.precision, other.precision)
        self.error = self.error or other.error


class MalformedResult(ValueError):
    """A function returned something that is not one reward per completion."""


class WorkerError(Exception):
    """An exception of a reward function in a worker; its text is the traceback there."""


def whole_batch(function: Function) -> Function:
    """Mark a function that compares completions: it always gets all of them at once."""
    function.whole_batch = True  # type: ignore[attr-defined]
    return function


def pure(function: Function) -> Function:
    """Mark a function whose reward of a row depends on that row only, and is always the same.

    It is then called row by row, in several processes, and never twice for the same row.
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
    entries, precision = _as_python(result)
    if not isinstance(entries, list | tuple):
        kind = type(result).__name__
        raise MalformedResult(f"returned {kind} instead of a list of {num_rows} rewards")
    if len(entries) != num_rows:
        raise MalformedResult(f"returned {len(entries)} rewards for {num_rows} completions")
    scores = Scores([nan] * num_rows, precision=precision)
    for row, entry in enumerate(entries):
        if type(entry) is float and isfinite(entry):  # nearly always, and quick
            scores.values[row] = entry
        elif entry is not None:
            _read_entry(scores, row, entry)
    return scores


def _read_entry(scores: Scores, row: int, entry: Any) -> None:
    """Enter one number of any type, or why it is none."""
    plain, precision = _as_python(entry)
    scores.precision = max(scores.precision, precision)
    if not isinstance(plain, Real):
        scores.failures[row] = f"returned {type(plain).__name__}"
        return
    try:
        value = float(plain)
    except OverflowError:  # a whole number that no float can hold
        value = float("inf")
    if isfinite(value):
        scores.values[row] = value
    else:
        scores.failures[row] = f"returned {value}"


def _as_python(value: Any) -> tuple[Any, float]:
    """A tensor, array or number as plain Python, and the machine epsilon that it came in."""
    loaded = [(sys.modules[library], kind) for library, kind in ARRAYS if library in sys.modules]
    found = next((lib for lib, kind in loaded if isinstance(value, getattr(lib, kind))), None)
    if found is None:
        return value, DOUBLE_EPS
    try:
        precision = float(found.finfo(value.dtype).eps)
    except (TypeError, ValueError):  # whole numbers and truth values are exact
        precision = DOUBLE_EPS
    return value.tolist(), precision


def reason_of(error: BaseException) -> str:
    """The name under which a failure is counted."""
    return "wrong length" if isinstance(error, MalformedResult) else type(error).__name__


def failed(num_rows: int, reason: str, error: Exception | None = None) -> Scores:
    """The scores of a function that failed for all of N rows."""
    return Scores([nan] * num_rows, dict.fromkeys(range(num_rows), reason), error=error)


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


def gathered(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of coroutines that wait together.

    They run in a thread of their own, because a notebook has an event loop in this one.
    """

    async def together() -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, together()).result()
