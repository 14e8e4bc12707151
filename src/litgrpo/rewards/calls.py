"""Calls of reward functions: what they are given, what they return, and their marks."""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan
from numbers import Real
from typing import Any, TypeVar

from litgrpo.arguments import above, require
from litgrpo.event_loops import wait_for
from litgrpo.workers.failures import WorkerError, cause_of

LOOP = "rewards"  # name of the event loop of coroutines
MARKS = (
    *("whole_batch", "pure", "isolated", "in_process"),
    *("row_timeout_s", "row_memory_bytes", "prepare"),
)

Function = Callable[..., Any]
Checked = TypeVar("Checked", bound=Function)


def whole_batch(function: Function) -> Function:
    """Mark a function that compares completions: it always gets all of them at once."""
    function.whole_batch = True  # type: ignore[attr-defined]
    return function


def pure(function: Function) -> Function:
    """Mark a function whose reward of a row depends on that row only: rows go to all processes."""
    function.pure = True  # type: ignore[attr-defined]
    return function


def isolated(function: Function) -> Function:
    """Mark a function of this package that may hang: it runs in a worker like a user's."""
    function.isolated = True  # type: ignore[attr-defined]
    return function


def limit_rows(
    timeout_s: float, memory_bytes: int, prepare: Callable[[], object]
) -> Callable[[Checked], Checked]:
    """Give each row of a function of this package its own limits; a row beyond them gets 0."""
    # `prepare` imports what the function needs, once and before any row.

    def attach(function: Checked) -> Checked:
        function.row_timeout_s = timeout_s  # type: ignore[attr-defined]
        function.row_memory_bytes = memory_bytes  # type: ignore[attr-defined]
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return attach


def find_mark(function: Any, mark: str) -> Any:
    """Return an attribute of a function, or of the function inside a partial; None without it."""
    assert mark in MARKS
    # The function is foreign: most functions have none of these attributes.
    return getattr(_innermost(function), mark, None)


def is_marked(function: Any, mark: str) -> bool:
    """Return True if a function, or the function inside a partial, has a mark."""
    return bool(find_mark(function, mark))


def add_check(check: Function) -> Callable[[Checked], Checked]:
    """Attach a check of the data, which runs before training.

    The check gets the columns and kwargs that its signature names, as the function would, and
    raises `UnusableReward`.
    """

    def attach(function: Checked) -> Checked:
        function.check = check  # type: ignore[attr-defined]
        return function

    return attach


def find_check(function: Any) -> Function | None:
    """Return the check that `add_check` attached to a function, if any."""
    check: Function | None = getattr(_innermost(function), "check", None)
    return check if inspect.isfunction(_innermost(function)) else None


def _innermost(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


LARGEST = 1e15  # of a reward: squares of float32 must not overflow in a group's variance
ATOMS = {str, int, float, bool, bytes, type(None)}
ARRAYS = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"))


class MalformedResult(ValueError):
    """A function returned something that is not one reward per completion."""


class UnusableReward(ValueError):
    """A function cannot score any completion of a row: this stops the run.

    For mistakes in the data or in the installation, which must not become rewards.
    """


@dataclass(frozen=True, eq=False)
class Call:
    """One reward function and the rows that it scores."""

    name: str
    function: Function
    rows: dict[str, list[Any]]  # {parameter: list of length N}, differs from row to row
    # {parameter: value}, the function's kwargs: the same for all rows and iterations
    settings: dict[str, Any]
    num_rows: int  # N
    # {parameter: value}, the same for all rows of this iteration
    context: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # methods of `Notes` that the function names
    places: Sequence[str] = ()  # N texts that say where each row comes from, for messages

    @property
    def is_coroutine(self) -> bool:
        """True if calling the function returns an awaitable."""
        kinds = (self.function, type(self.function).__call__)
        return any(map(inspect.iscoroutinefunction, kinds))

    @property
    def row_timeout_s(self) -> float | None:
        """Time limit for one row that the function declares by an attribute of this name.

        None for a function that compares rows.
        """
        if is_marked(self.function, "whole_batch"):
            return None
        limit_s: float | None = find_mark(self.function, "row_timeout_s")
        above(f"row_timeout_s of reward '{self.name}'", limit_s, 0)
        return limit_s

    def arguments(self) -> dict[str, Any]:
        """Copies of the arguments, since a function may change what it is given."""
        columns = {name: _copy_column(name, values) for name, values in self.rows.items()}
        return columns | self.context | _copy_settings(self.settings)

    def only(self, rows: Sequence[int]) -> Call:
        """The same call for some of the rows."""
        columns = {name: [values[row] for row in rows] for name, values in self.rows.items()}
        places = [self.places[row] for row in rows] if self.places else ()
        return replace(self, rows=columns, num_rows=len(rows), places=places)


@dataclass
class Scores:
    """The rewards that a function gave to N rows."""

    values: list[float]  # N numbers; NaN where the function abstained or failed
    failures: dict[int, str] = field(default_factory=dict)  # {row: reason}
    error: Exception | None = None  # the first exception
    # {name: the numbers that the function logged}
    metrics: dict[str, list[float]] = field(default_factory=dict)
    # {column: {row: value that the function logged}}
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)

    def put(self, rows: Sequence[int], other: Scores) -> None:
        """Enter the scores of some rows, in the order of `rows`."""
        for row, value in zip(rows, other.values, strict=True):
            self.values[row] = value
        self.failures |= {rows[index]: reason for index, reason in other.failures.items()}
        final = isinstance(other.error, UnusableReward)
        self.error = other.error if final else self.error or other.error
        for name, numbers in other.metrics.items():
            self.metrics.setdefault(name, []).extend(numbers)
        for column, by_index in other.extras.items():
            by_row = {rows[index]: value for index, value in by_index.items()}
            self.extras.setdefault(column, {}).update(by_row)


class Notes:
    """Collect what a function logs in addition to its rewards, as in TRL."""

    NAMES = ("log_metric", "log_extra")

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, dict[int, Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; several calls in an iteration are averaged."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Show one value for each completion beside the samples; what is not plain is a text."""
        require(
            len(values) == self.num_rows,
            f"log_extra({column!r}) got {len(values)} values for {self.num_rows} completions",
        )
        plain = [value if type(value) in ATOMS else str(value) for value in values]
        self.extras[str(column)] = dict(enumerate(plain))

    def methods(self, names: Iterable[str]) -> dict[str, Function]:
        """Return {name: method} for the log methods that a function names."""
        return {name: getattr(self, name) for name in names}

    def read(self, result: object) -> Scores:
        """Convert the returned value to scores and attach the logged values."""
        scores = read_result(result, self.num_rows)
        return replace(scores, metrics=self.metrics, extras=self.extras)


def read_result(result: object, num_rows: int) -> Scores:
    """Convert the list, array or tensor that a function returned to numbers; None abstains."""
    # NaN, infinities, numbers beyond 1e15 and anything that is not a real number fail their row.
    entries = _as_python(result)
    if not isinstance(entries, list | tuple):
        kind = type(result).__name__
        raise MalformedResult(f"returned {kind} instead of a list of {num_rows} rewards")
    if len(entries) != num_rows:
        raise MalformedResult(f"returned {len(entries)} rewards for {num_rows} completions")
    scores = Scores([nan] * num_rows)
    for row, entry in enumerate(entries):
        if type(entry) is float and -LARGEST <= entry <= LARGEST:  # nearly always, and quick
            scores.values[row] = entry
        elif entry is not None:
            _read_entry(scores, row, entry)
    return scores


def _read_entry(scores: Scores, row: int, entry: Any) -> None:
    """Enter one number of any type, or the reason why it is not one."""
    plain = _as_python(entry)
    if not isinstance(plain, Real):
        scores.failures[row] = f"returned {type(plain).__name__}"
        return
    try:
        value = float(plain)
    except OverflowError:  # a whole number that no float can hold
        value = float("inf")
    if abs(value) <= LARGEST:
        scores.values[row] = value
    else:
        beyond = f", beyond {LARGEST:g}" * isfinite(value)
        scores.failures[row] = f"returned {value}{beyond}"


def _as_python(value: Any) -> Any:
    """A tensor, array or number as plain Python."""
    loaded = [(sys.modules[library], kind) for library, kind in ARRAYS if library in sys.modules]
    is_array = any(isinstance(value, getattr(library, kind)) for library, kind in loaded)
    return value.tolist() if is_array else value


def score_call(
    call: Call, caught: tuple[type[BaseException], ...] = (Exception, SystemExit)
) -> Scores:
    """Call a function for all rows, and return its scores or its failure.

    Ctrl-C in the training process must reach the run, so it is not among `caught`.
    """
    noted = Notes(call.num_rows)
    try:
        result = call.function(**call.arguments(), **noted.methods(call.notes))
        if inspect.isawaitable(result):
            (result,) = run_coroutines([result])
        return noted.read(result)
    except caught as error:
        return make_failed_scores(call.num_rows, error)


def make_failed_scores(num_rows: int, error: BaseException, reason: str | None = None) -> Scores:
    """Return the scores of a function that failed for all of N rows, with the counted reason."""
    name = "wrong length" if isinstance(error, MalformedResult) else type(error).__name__
    told = error if isinstance(error, Exception) else WorkerError(cause_of(error))
    return Scores([nan] * num_rows, dict.fromkeys(range(num_rows), reason or name), error=told)


def _copy_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Copy lists and dicts of the settings; a judge or a model is passed without a copy."""
    return {
        name: copy_value(value) if isinstance(value, list | dict) else value
        for name, value in settings.items()
    }


def _copy_column(name: str, rows: list[Any]) -> list[Any]:
    """Copy a column. Token ids are integers: checking each one would dominate the cost."""
    if name != "completion_ids":
        return copy_value(rows)  # type: ignore[no-any-return]
    return [row[:] if type(row) is list else copy_value(row) for row in rows]


def copy_value(value: Any) -> Any:
    """Return a deep copy, with a fast path for lists of plain values (most columns)."""
    if type(value) in ATOMS:
        return value
    if type(value) is list:
        return (
            value[:] if ATOMS.issuperset(map(type, value)) else [copy_value(item) for item in value]
        )
    if type(value) is dict:
        return {key: copy_value(item) for key, item in value.items()}
    return copy.deepcopy(value)


def run_coroutines(coroutines: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return the results of coroutines that are awaited concurrently."""

    async def together() -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    return wait_for(together(), LOOP)


async def _await_call(call: Call, limit_s: float | None) -> Scores:
    """Do the same as `score_call` for a coroutine function, with a time limit in seconds."""
    noted = Notes(call.num_rows)
    try:
        coming = call.function(**call.arguments(), **noted.methods(call.notes))
        return noted.read(await asyncio.wait_for(coming, limit_s))
    except (Exception, SystemExit) as error:
        return make_failed_scores(call.num_rows, error)


async def score_coroutine(call: Call, limit_s: float | None) -> Scores:
    """Await a function for all rows; if that fails, for each row, all at the same time."""
    batch_scores = await _await_call(call, limit_s)
    if batch_scores.error is None or call.num_rows == 1 or is_marked(call.function, "whole_batch"):
        return batch_scores
    scores = Scores([nan] * call.num_rows, error=batch_scores.error)
    rows = range(call.num_rows)
    alone = await asyncio.gather(*(_await_call(call.only([row]), limit_s) for row in rows))
    for row, one in zip(rows, alone, strict=True):
        scores.put([row], one)
    return scores


def find_state_owner(function: Any) -> Any:
    """Return the object with `state_dict` and `load_state_dict` that a reward calls, or None.

    A model has weights under these names, which are not the state of a run.
    """
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    methods = (getattr(owner, name, None) for name in ("state_dict", "load_state_dict"))
    return owner if all(map(callable, methods)) and not hasattr(owner, "parameters") else None
