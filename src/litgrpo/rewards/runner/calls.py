"""A call of a reward function and how its answer is read; also used inside worker processes.

Nothing here imports torch or numpy, so that a worker starts in a tenth of a second: where a
function returns a tensor or an array, its library is loaded already.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from numbers import Real
from typing import Any

from litgrpo.arguments import require
from litgrpo.rewards.runner.event_loop import gathered
from litgrpo.rewards.runner.marks import Function
from litgrpo.workers.failures import WorkerError, cause_of

DOUBLE_EPS = sys.float_info.epsilon
LARGEST = 1e15  # of a reward: squares of float32 must not overflow in a group's variance
ATOMS = {str, int, float, bool, bytes, type(None)}
ARRAYS = (("torch", "Tensor"), ("numpy", "ndarray"), ("numpy", "generic"))


class MalformedResult(ValueError):
    """A function returned something that is not one reward per completion."""


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
        notes: which methods of `Notes` the function names.
        places: N texts that say where each row comes from, for messages.
    """

    name: str
    function: Function
    rows: dict[str, list[Any]]
    settings: dict[str, Any]
    num_rows: int
    context: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    places: Sequence[str] = ()

    @property
    def is_coroutine(self) -> bool:
        """Whether calling the function gives something to await."""
        kinds = (self.function, type(self.function).__call__)
        return any(map(inspect.iscoroutinefunction, kinds))

    def arguments(self, rows: slice = slice(None)) -> dict[str, Any]:
        """Copies of the arguments, since a function may change what it is given."""
        chosen = {name: _copied_column(name, values[rows]) for name, values in self.rows.items()}
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
        metrics: {name: the numbers that the function logged}.
        extras: {column: {row: what the function logged for it}}.
    """

    values: list[float]
    failures: dict[int, str] = field(default_factory=dict)
    precision: float = DOUBLE_EPS
    error: Exception | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)

    def put(self, rows: Sequence[int], other: Scores) -> None:
        """Enter the scores of some rows, in the order of `rows`."""
        for row, value in zip(rows, other.values, strict=True):
            self.values[row] = value
        self.failures |= {rows[place]: reason for place, reason in other.failures.items()}
        self.precision = max(self.precision, other.precision)
        self.error = self.error or other.error
        for name, numbers in other.metrics.items():
            self.metrics.setdefault(name, []).extend(numbers)
        for column, noted in other.extras.items():
            places = {rows[place]: value for place, value in noted.items()}
            self.extras.setdefault(column, {}).update(places)


class Notes:
    """What a function logs besides its rewards, as TRL's functions do.

    Args:
        num_rows: completions that the function was called for.
    """

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
        """{name: method}, what a function is given that asks for these."""
        known: dict[str, Function] = {"log_metric": self.log_metric, "log_extra": self.log_extra}
        return {name: known[name] for name in names}

    def read(self, result: object) -> Scores:
        """What a function returned, with what it logged."""
        scores = read_result(result, self.num_rows)
        return replace(scores, metrics=self.metrics, extras=self.extras)


def read_result(result: object, num_rows: int) -> Scores:
    """What a function returned, as numbers.

    None abstains. NaN, infinities, numbers beyond 1e15 and anything that is not a real number fail
    their row.

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
        if type(entry) is float and -LARGEST <= entry <= LARGEST:  # nearly always, and quick
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
    if abs(value) <= LARGEST:
        scores.values[row] = value
    else:
        beyond = f", beyond {LARGEST:g}" * isfinite(value)
        scores.failures[row] = f"returned {value}{beyond}"


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


def answer(
    function: Function,
    given: dict[str, Any],
    num_rows: int,
    notes: Iterable[str] = (),
    caught: tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> Scores:
    """What a function gives for N rows, or why it fails.

    Args:
        function: the reward function.
        given: its arguments, copies.
        num_rows: N.
        notes: which methods of `Notes` it names.
        caught: what it may raise; Ctrl-C is for the run.
    """
    noted = Notes(num_rows)
    try:
        result = function(**given, **noted.methods(notes))
        if inspect.isawaitable(result):
            (result,) = gathered([result])
        return noted.read(result)
    except caught as error:
        return failed(num_rows, error)


def failed(num_rows: int, error: BaseException, reason: str | None = None) -> Scores:
    """The scores of a function that failed for all of N rows, and under which name that counts."""
    name = "wrong length" if isinstance(error, MalformedResult) else type(error).__name__
    told = error if isinstance(error, Exception) else WorkerError(cause_of(error))
    return Scores([nan] * num_rows, dict.fromkeys(range(num_rows), reason or name), error=told)


def own_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose lists and dicts are copies; a judge or a model is handed over as it is."""
    return {
        name: copied(value) if isinstance(value, list | dict) else value
        for name, value in settings.items()
    }


def _copied_column(name: str, rows: list[Any]) -> list[Any]:
    """A copy; a look at each token id would cost more than all else."""
    if name != "completion_ids":
        return copied(rows)  # type: ignore[no-any-return]
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
