"""Rename columns, extract answers, and split rows into training and validation sets."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from litgrpo.arguments import one_of, require
from litgrpo.data.sources import (
    EPISODE_NUMBER,
    Rows,
    SetsLike,
    Source,
    SourceRow,
    check_pattern,
    read_rows,
)
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn
from litgrpo.text.answers import list_answers
from litgrpo.types import TASK

if TYPE_CHECKING:
    from litgrpo.data.rendering import LengthLimit

TrainValOverlap = Literal["drop", "error", "keep"]
# Arguments that every reward function may ask for; a column cannot have such a name.
REWARD_ARGUMENTS = {
    *("prompts", "completions", "completion_ids", "completion_lengths", "truncated"),
    *("conversation", "prompt_texts"),
}
MISSING = object()  # None is a value
KNOWN_COLUMNS = ("prompt", "completion", "messages", "answer", "id")


@dataclass(frozen=True)
class RowReader:
    r"""Reads the rows of a training, validation, test or prediction set."""

    # {name in litgrpo: name in the source, or `column.field` of one whose values are objects}; a
    # row without the source's name that already has litgrpo's is used as it is. All fields also
    # keep their own names.
    columns: dict[str, str]
    # {name: regular expression}; the column becomes the expression's only group
    extract: dict[str, str]
    val_fraction: float  # share of the training rows to hold out, chosen by a hash of their prompts
    # what to do with training rows whose prompt is also in the validation set
    train_val_overlap: TrainValOverlap
    split_by: str = "prompt"  # the column to hash; rows that agree in it stay together
    # {column: the columns that a row with this one does not need}
    substitutes: Mapping[str, set[str]] = field(default_factory=dict)
    # {name: source} of named training sets, whose `columns` and `extract` other sets of the same
    # name inherit
    tasks: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("train_val_overlap", self.train_val_overlap, get_args(TrainValOverlap))
        allowed = 0 <= self.val_fraction < 1
        require(allowed, f"val_fraction is {self.val_fraction}; it must be in [0, 1).")
        for name, pattern in self.extract.items():
            check_pattern(f"data.extract.{name}", pattern)

    @property
    def required(self) -> set[str]:
        """Columns that a row to train on needs, in addition to those of the templates."""
        return {*self.columns, *self.extract}

    @property
    def compared(self) -> set[str]:
        """Columns that rewards probably compare completions with."""
        return {"answer", *self.columns, *self.extract} - {"prompt", "completion", "messages"}

    def read(self, source: SetsLike, required: Iterable[str] | None = None) -> Rows:
        """Check all rows of a source, and return them with their columns renamed.

        The rows of large files are read here for the checks, and again on each access.
        `required` are the columns that every row needs; None means all of `columns` and `extract`.
        """
        return self._check_rows(source, required).rows

    def _check_rows(self, source: SetsLike, required: Iterable[str] | None) -> _CheckedRows:
        needed = self.required if required is None else set(required)
        rows = replace(read_rows(source), convert=partial(self.convert, required=needed))
        prompts, groups, identified, ids = (array("q") for _ in range(4))
        empty = EmptyColumns(self.compared if needed >= self.required else ())
        for number, row in enumerate(rows):
            prompts.append(digest(identity(row)))
            groups.append(self._group(row) if self.val_fraction else 0)
            if isinstance(row.values.get("id"), str | int):
                identified.append(number)
                ids.append(hash((row.set_name, row.values["id"])))
            empty.add(row)
        repeats, earlier = find_repeats(ids)
        if len(repeats):
            row, first = rows[identified[repeats[0]]], rows[identified[earlier[0]]]
            raise ValueError(
                f"{row.place}: field 'id' is {row.values['id']!r}, as in {first.place}; remove one "
                "of them, or set `columns: {number: id}` if it does not identify rows"
            )
        empty.warn(len(rows))
        return _CheckedRows(rows, np.array(prompts), np.array(groups))

    def _group(self, row: SourceRow) -> int:
        """Return a number that is the same in rows that are held out together."""
        has_column = self.split_by == "prompt" or self.split_by in row.values
        require(has_column, f"{row.place}: no field {self.split_by!r}, which split_by names")
        return digest(identity(row, self.split_by))

    def convert(self, row: SourceRow, required: set[str]) -> SourceRow:
        """Return a row with columns renamed and extracted."""
        sources = [*filter(None, (self.tasks.get(row.set_name), row.origin))]
        of_source = {name: column for source in sources for name, column in source.columns.items()}
        patterns = {name: pattern for source in sources for name, pattern in source.extract.items()}
        columns, extract = self.columns | of_source, self.extract | patterns
        renamed = {name: find_value(row.values, column) for name, column in columns.items()}
        # A column also keeps its own name, unless that name means something else in litgrpo.
        replaced = {columns[name] for name, value in renamed.items() if value is not MISSING}
        replaced &= {*REWARD_ARGUMENTS, *KNOWN_COLUMNS}
        values = {name: value for name, value in row.values.items() if name not in replaced}
        values |= {name: value for name, value in renamed.items() if value is not MISSING}
        not_needed = {
            name
            for column, unneeded in self.substitutes.items()
            if column in values
            for name in unneeded
        }
        required = required | of_source.keys() | patterns.keys()
        missing = sorted(required - values.keys() - not_needed)
        if missing:
            name = missing[0]
            column = columns.get(name, name)
            owner, has = _fields_beside(row.values, column)
            hint = f"{owner} has: {has}; `columns: {{{name}: ...}}` names another"
            if "messages" in values:
                hint += "; `messages` need `chat: true`"
            raise ValueError(f"{row.place}: no field {column!r} ({hint})")
        for name in extract.keys() & values.keys():
            if not list_answers(values[name]):
                continue  # no answer: counted when all rows are read
            values[name] = extract_group(
                extract[name], values[name], f"{row.place}, field {name!r}"
            )
        return replace(row, values=values)

    def read_train_and_val(
        self, train: SetsLike, val: SetsLike | None, required: Iterable[str] | None = None
    ) -> tuple[Rows, Rows | None]:
        """Read the rows to train on and those to validate on (None without `val` or a fraction)."""
        # With `val_fraction` the side of a prompt depends on the prompt alone: not on other rows,
        # their order, the seed or the template. A larger fraction only adds to the held-out rows.
        rows = self._check_rows(train, required)
        if val is not None:
            held_out = self._check_rows(val, required)
            training = self._without_overlap(rows, held_out)
        elif self.val_fraction:
            is_held_out = rows.groups.astype(np.uint64) < self.val_fraction * 2.0**64
            held_out, training = rows.select(is_held_out), rows.select(~is_held_out)
            require(
                len(held_out.rows) > 0,
                f"val_fraction {self.val_fraction} of {len(rows.rows)} rows holds out none",
            )
        else:
            return rows.rows, None
        require(
            len(training.rows) > 0,
            "no training row is left: all of them are held out for validation",
        )
        return training.rows, held_out.rows

    def _without_overlap(self, train: _CheckedRows, val: _CheckedRows) -> _CheckedRows:
        shared = np.flatnonzero(np.isin(train.prompts, val.prompts))
        if not len(shared):
            return train
        same = int(np.flatnonzero(val.prompts == train.prompts[shared[0]])[0])
        overlap = (
            f"{len(shared)} of {len(train.prompts)} training prompts are in the validation set "
            f"({train.rows[int(shared[0])].place} = {val.rows[same].place})"
        )
        if self.train_val_overlap == "error":
            raise ValueError(f"{overlap}; `train_val_overlap: drop` removes them from training")
        if self.train_val_overlap == "keep":
            rank_zero_warn(f"{overlap}: kept, so validation is optimistic")
            return train
        rank_zero_warn(f"{overlap}: removed from training")
        return train.select(~np.isin(train.prompts, val.prompts))


@dataclass(frozen=True)
class _CheckedRows:
    """Rows that were checked, with digests by which they are compared and held out."""

    rows: Rows
    prompts: np.ndarray  # [rows] digests of their prompts
    groups: np.ndarray  # [rows] digests by which `val_fraction` holds rows out

    def select(self, mask: np.ndarray) -> _CheckedRows:
        """Return the rows that a mask chooses."""
        return _CheckedRows(self.rows.select(mask), self.prompts[mask], self.groups[mask])


def find_value(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field within one by a dot; MISSING if there is none.

    Example:
        >>> find_value({"reward_model": {"ground_truth": "7"}}, "reward_model.ground_truth")
        '7'
        >>> find_value({"a.b": 1, "a": {"b": 2}}, "a.b")
        1
    """
    if name in values:
        return values[name]
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def _fields_beside(values: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return what lacks a field, "it" or the column before a dot, and the fields that it has."""
    column, _, _ = name.rpartition(".")
    owner = find_value(values, column) if column else values
    if owner is MISSING:
        return _fields_beside(values, column)
    if not isinstance(owner, Mapping):
        return repr(column), f"no fields, but {owner!r:.40}"
    return repr(column) if column else "it", ", ".join(map(str, owner)) or "none"


def extract_group(pattern: str, value: Any, place: str) -> str:
    r"""Return the text of a pattern's only group in a value; errors begin with `place`."""
    match = re.search(pattern, value) if isinstance(value, str) else None
    if match is None or match[1] is None:
        raise ValueError(f"{place}: {pattern!r} not found in {str(value)[-80:]!r}")
    return match[1].strip()


def identity(row: SourceRow, name: str = "prompt") -> str:
    """Return the text that makes two rows the same problem: the prompt, whitespace normalized.

    The prompt is taken before any template. Rows of `EpisodePrompts`, whose prompts are the same,
    have their number added.
    """
    values = row.values
    asked = {"prompt": values["messages"][:-1]} if values.get("messages") else {}
    prompt = (asked | values).get(name, values)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    words = text.split()
    if EPISODE_NUMBER in values:
        words.append(f"#{values[EPISODE_NUMBER]}")
    return " ".join(words)


def digest(text: str) -> int:
    """Return 8 bytes of a text's SHA-256, the same ones in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def find_repeats(keys: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the keys that occurred before, and of the first key equal to each.

    Example:
        >>> find_repeats([5, 7, 5])
        (array([2]), array([0]))
    """
    _, first, inverse = np.unique(np.array(keys, np.int64), return_index=True, return_inverse=True)
    repeats = np.flatnonzero(first[inverse] != np.arange(len(keys)))
    return repeats, first[inverse[repeats]]


class EmptyColumns:
    """Finds rows whose answers are empty; see `list_answers`."""

    # Sources and tasks of which no row has a value do not use the column. Empty prompts and
    # completions are errors where they are rendered.

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)
        self.used: set[Hashable] = set()
        # {(column, task, whether it is None): [number of rows, place of the first one]}
        self.empty: dict[tuple[str, Hashable, bool], list[Any]] = {}

    def add(self, row: SourceRow) -> None:
        """Count a row."""
        task = row.set_name, str(row.values.get(TASK))
        for name in self.names:
            value = row.values.get(name)
            if list_answers(value):
                self.used.add((name, task))
            else:
                first = [0, row.place, row.index]
                counted = self.empty.setdefault((name, task, value is None), first)
                counted[0] += 1

    def warn(self, total: int) -> None:
        """Warn once for each column of which some rows are empty."""
        for name in self.names:
            counts = [
                counted
                for (column, task, is_none), counted in self.empty.items()
                if column == name and (not is_none or (name, task) in self.used)
            ]
            if counts:
                _, place, _ = min(counts, key=lambda item: item[2])
                rank_zero_warn(
                    f"{sum(count for count, *_ in counts)} of {total} rows have an empty {name!r} "
                    f"(the first: {place}): rewards that compare with it do not score these rows; "
                    "fill it in, or leave them out"
                )


class RowScan:
    """What tokenizing a set counts of its rows: lengths, repeated prompts, their identity."""

    def __init__(self, rows: Rows, role: str) -> None:
        self.rows, self.role = rows, role
        self.num_systems = 0  # rows whose system message replaces `chat.system`
        self.lengths = array("q")
        # Hashes of the prompts as the model reads them, and digests of those as the data have them.
        self.texts, self.prompts = array("q"), array("q")

    def add(self, row: SourceRow, text: Hashable, length: int) -> None:
        """Count a row, with its prompt as the model reads it and its number of tokens."""
        self.lengths.append(length)
        self.texts.append(hash(text))
        self.prompts.append(digest(identity(row)))

    def select(self, limit: LengthLimit) -> list[int]:
        """Log what was counted, and return the numbers of the rows to use."""
        if self.num_systems:
            how = "have a system message, which replaces data.chat.system"
            rank_zero_info(f"{self.role}: {self.num_systems} of {len(self.rows)} rows {how}")
        self._report_duplicates()
        return limit.select(self.lengths, self.rows, self.role)

    def _report_duplicates(self) -> None:
        """Log how many prompts repeat an earlier one, with the first pair."""
        repeats, earlier = find_repeats(self.texts)
        if not len(repeats):
            return
        first = f"{self.rows[int(repeats[0])].place} repeats {self.rows[int(earlier[0])].place}"
        line = f"{self.role}: {len(repeats)} of {len(self.rows)} prompts are duplicates ({first})"
        # If only the texts agree, the template leaves out what the rows differ in.
        added = len(repeats) - len(find_repeats(self.prompts)[0])
        if added > 0:
            rank_zero_warn(
                f"{line}; {added} of them differ in the data: the template makes them equal"
            )
        else:
            rank_zero_info(line)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts of the data in their order."""
        return hashlib.sha256(self.prompts.tobytes()).hexdigest()[:16]


def columns_of(
    rows: Iterable[SourceRow], names: Iterable[str] | None = None
) -> dict[str, list[Any]]:
    """Return {column: one value per row} of all columns but `prompt`; None for missing values."""
    rows = [*rows]
    if names is None:
        names = dict.fromkeys(name for row in rows for name in row.values)
    columns = {name: [row.values.get(name) for row in rows] for name in names if name != "prompt"}
    reserved = sorted(REWARD_ARGUMENTS & columns.keys())
    if reserved:
        name = reserved[0]
        place = next(row.place for row in rows if name in row.values)
        raise ValueError(
            f"{place}: field {name!r} has the name of an argument of reward functions; "
            f"rename it with `columns: {{reference_{name}: {name}}}`"
        )
    return columns
