"""Rename columns, extract answers, and split rows into training and validation sets."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from litgrpo.arguments import one_of, require
from litgrpo.data.sources import (
    EPISODE_NUMBER,
    SetsLike,
    Source,
    SourceRow,
    check_pattern,
    read_rows,
)
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn
from litgrpo.text.answers import list_answers
from litgrpo.types import TASK

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
    r"""Reads the rows of a training, validation, test or prediction set.

    Args:
        columns: {name in litgrpo: name in the source, or `column.field` of one whose values are
            objects}; a row without the source's name that already has litgrpo's is used as it is.
            All fields also keep their own names.
        extract: {name: regular expression}; the column becomes the expression's only group.
        val_fraction: share of the training rows to hold out, chosen by a hash of their prompts.
        train_val_overlap: what to do with training rows whose prompt is also in the validation set.
        split_by: the column to hash; rows that agree in it stay together.
        substitutes: {column: the columns that a row with this one does not need}.
        tasks: {name: source} of named training sets, whose `columns` and `extract` other sets of
            the same name inherit.

    Example:
        >>> reader = RowReader({"prompt": "q"}, {"answer": r"####\s*(.+)"}, 0.0, "drop")
        >>> reader.read([{"q": "1+1?", "answer": "one more #### 2"}])[0].values
        {'q': '1+1?', 'answer': '2', 'prompt': '1+1?'}
    """

    columns: dict[str, str]
    extract: dict[str, str]
    val_fraction: float
    train_val_overlap: TrainValOverlap
    split_by: str = "prompt"
    substitutes: Mapping[str, set[str]] = field(default_factory=dict)
    tasks: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options."""
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

    def read(self, source: SetsLike, required: Iterable[str] | None = None) -> list[SourceRow]:
        """Read all rows of a source and rename their columns.

        Args:
            source: where they come from.
            required: the columns that every row needs; None means all of `columns` and `extract`.

        Raises:
            ValueError: a column is missing, or two rows have the same id.
        """
        needed = self.required if required is None else set(required)
        rows = [self.rename(row, needed) for row in read_rows(source)]
        reject_repeated_ids(rows)
        if needed >= self.required:  # prompts to answer need no reference
            warn_of_missing_answers(rows, self.compared)
        return rows

    def rename(self, row: SourceRow, required: set[str]) -> SourceRow:
        """Return a row with columns renamed and extracted.

        Raises:
            ValueError: a required column is missing, or `extract` does not match.
        """
        own = [each for each in (self.tasks.get(row.set_name), row.origin) if each is not None]
        of_source = {name: theirs for each in own for name, theirs in each.columns.items()}
        patterns = {name: pattern for each in own for name, pattern in each.extract.items()}
        columns, extract = self.columns | of_source, self.extract | patterns
        found = {name: find_value(row.values, theirs) for name, theirs in columns.items()}
        # A column also keeps its own name, unless that name means something else in litgrpo.
        replaced = {columns[name] for name, value in found.items() if value is not MISSING}
        replaced &= {*REWARD_ARGUMENTS, *KNOWN_COLUMNS}
        values = {name: value for name, value in row.values.items() if name not in replaced}
        values |= {name: value for name, value in found.items() if value is not MISSING}
        not_needed = {
            name
            for column, others in self.substitutes.items()
            if column in values
            for name in others
        }
        required = required | of_source.keys() | patterns.keys()
        missing = sorted(required - values.keys() - not_needed)
        if missing:
            name = missing[0]
            theirs = columns.get(name, name)
            owner, has = _fields_beside(row.values, theirs)
            hint = f"{owner} has: {has}; `columns: {{{name}: ...}}` names another"
            if "messages" in values:
                hint += "; `messages` need `chat: true`"
            raise ValueError(f"{row.place}: no field {theirs!r} ({hint})")
        for name in extract.keys() & values.keys():
            if not list_answers(values[name]):
                continue  # no answer: counted when all rows are read
            values[name] = extract_group(
                extract[name], values[name], f"{row.place}, field {name!r}"
            )
        return replace(row, values=values)

    def read_train_and_val(
        self, train: SetsLike, val: SetsLike | None, required: Iterable[str] | None = None
    ) -> tuple[list[SourceRow], list[SourceRow]]:
        """Read the rows to train on and those to validate on (none without `val` or a fraction).

        With `val_fraction` the side of a prompt depends on the prompt alone: not on other rows,
        their order, the seed or the template. A larger fraction only adds to the held-out rows.

        Raises:
            ValueError: a side is empty, or `train_val_overlap: error` and the sides overlap.
        """
        rows = self.read(train, required)
        if val is None:
            kept, held_out = self._split(rows)
        else:
            held_out = self.read(val, required)
            kept = self._without_overlap(rows, held_out)
        require(bool(kept), "no training row is left: all of them are held out for validation")
        require(
            bool(held_out) or not self.val_fraction,
            f"val_fraction {self.val_fraction} of {len(rows)} rows holds out none",
        )
        return kept, held_out

    def _split(self, rows: list[SourceRow]) -> tuple[list[SourceRow], list[SourceRow]]:
        sides: dict[bool, list[SourceRow]] = {False: [], True: []}
        for row in rows:
            sides[is_held_out(row, self.val_fraction, self.split_by)].append(row)
        return sides[False], sides[True]

    def _without_overlap(self, train: list[SourceRow], val: list[SourceRow]) -> list[SourceRow]:
        places = {identity(row): row.place for row in val}
        shared = [row for row in train if identity(row) in places]
        if not shared:
            return train
        first = f"{shared[0].place} = {places[identity(shared[0])]}"
        overlap = (
            f"{len(shared)} of {len(train)} training prompts are in the validation set ({first})"
        )
        if self.train_val_overlap == "error":
            raise ValueError(f"{overlap}; `train_val_overlap: drop` removes them from training")
        if self.train_val_overlap == "keep":
            rank_zero_warn(f"{overlap}: kept, so validation is optimistic")
            return train
        rank_zero_warn(f"{overlap}: removed from training")
        return [row for row in train if identity(row) not in places]


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
    r"""Return the text of a pattern's only group in a value.

    Raises:
        ValueError: the value is no text, or the pattern is not in it; the message begins with
            `place`.

    Example:
        >>> extract_group(r"####\s*(.+)", "one more #### 2", "a.jsonl, line 1, field 'answer'")
        '2'
    """
    found = re.search(pattern, value) if isinstance(value, str) else None
    if found is None or found[1] is None:
        raise ValueError(f"{place}: {pattern!r} not found in {str(value)[-80:]!r}")
    return found[1].strip()


def identity(row: SourceRow, name: str = "prompt") -> str:
    """Return the text that makes two rows the same problem: the prompt, whitespace normalized.

    The prompt is taken before any template. Rows of `EpisodePrompts`, whose prompts are the same,
    have their number added.

    Example:
        >>> identity(SourceRow({"prompt": " What is  3+4? "}, "a.txt, line 1", 0))
        'What is 3+4?'
    """
    values = row.values
    asked = {"prompt": values["messages"][:-1]} if values.get("messages") else {}
    prompt = (asked | values).get(name, values)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    words = text.split()
    if EPISODE_NUMBER in values:
        words.append(f"#{values[EPISODE_NUMBER]}")
    return " ".join(words)


def is_held_out(row: SourceRow, fraction: float, split_by: str = "prompt") -> bool:
    """True if a row belongs to the held-out share; depends on its `split_by` alone.

    Raises:
        ValueError: the row has no such column.
    """
    known = split_by == "prompt" or split_by in row.values
    require(known, f"{row.place}: no field {split_by!r}, which split_by names")
    digest = hashlib.sha256(identity(row, split_by).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def fingerprint(rows: list[SourceRow]) -> str:
    """Hash prompts in their order.

    Example:
        >>> fingerprint([])
        'e3b0c44298fc1c14'
    """
    return hashlib.sha256("\n".join(map(identity, rows)).encode()).hexdigest()[:16]


def token_fingerprint(rows: Iterable[Sequence[int]]) -> str:
    """Hash token ids of prompts in their order: all that a model reads.

    Example:
        >>> token_fingerprint([[1, 2], [3]]) == token_fingerprint([[1], [2, 3]])
        False
    """
    digest = hashlib.sha256()
    for ids in rows:
        digest.update(array("q", [len(ids), *ids]).tobytes())
    return digest.hexdigest()[:16]


def _repeats(rows: list[SourceRow], keys: Iterable[Hashable]) -> Iterator[tuple[SourceRow, str]]:
    """Yield each row whose key an earlier row has, with the place of the first such row."""
    seen: dict[Hashable, str] = {}
    for row, key in zip(rows, keys, strict=True):
        first = seen.setdefault(key, row.place)
        if first != row.place:
            yield row, first


def reject_repeated_ids(rows: list[SourceRow]) -> None:
    """Check that no two rows of a source have the same `id`.

    Raises:
        ValueError: two rows do; the message has both places.
    """
    identified = [row for row in rows if isinstance(row.values.get("id"), str | int)]
    repeats = _repeats(identified, [(r.set_name, r.source, r.values["id"]) for r in identified])
    repeat = next(repeats, None)
    if repeat is not None:
        row, first = repeat
        raise ValueError(
            f"{row.place}: field 'id' is {row.values['id']!r}, as in {first}; remove one of them, "
            "or set `columns: {number: id}` if it does not identify rows"
        )


def warn_of_missing_answers(rows: list[SourceRow], names: Iterable[str]) -> None:
    """Warn once for each column of which some rows are empty; see `list_answers`.

    Sources and tasks of which no row has a value do not use the column. Empty prompts and
    completions are errors where they are rendered.
    """
    for name in sorted(names):
        values = [(row.values.get(name), row) for row in rows]
        used = {_task_of(row) for value, row in values if list_answers(value)}
        empty = [
            row
            for value, row in values
            if not list_answers(value) and (value is not None or _task_of(row) in used)
        ]
        if empty:
            rank_zero_warn(
                f"{len(empty)} of {len(rows)} rows have an empty {name!r} (the first: "
                f"{empty[0].place}): rewards that compare with it do not score these rows; fill it "
                "in, or leave them out"
            )


def _task_of(row: SourceRow) -> tuple[str, int, str]:
    return row.set_name, row.source, str(row.values.get(TASK))


def report_duplicates(role: str, rows: list[SourceRow], texts: Iterable[Hashable]) -> None:
    """Log how many prompts repeat an earlier one, as the model reads them, with the first pair.

    Warn if the rows differ and their texts do not: the template leaves out what they differ in.

    Args:
        role: name of the set.
        rows: the rows.
        texts: the prompt of each row, as the model reads it.
    """
    keys = [(text, row.values.get(EPISODE_NUMBER)) for text, row in zip(texts, rows, strict=True)]
    found = [f"{row.place} repeats {first}" for row, first in _repeats(rows, keys)]
    if not found:
        return
    line = f"{role}: {len(found)} of {len(rows)} prompts are duplicates ({found[0]})"
    added = len(found) - sum(1 for _ in _repeats(rows, map(identity, rows)))
    if added > 0:
        rank_zero_warn(f"{line}; {added} of them differ in the data: the template makes them equal")
    else:
        rank_zero_info(line)


def columns_of(rows: list[SourceRow]) -> dict[str, list[Any]]:
    """Return {column: one value per row} of all columns but `prompt`; None for missing values.

    Raises:
        ValueError: a column has the name of an argument that rewards get anyway.

    Example:
        >>> columns_of([SourceRow({"prompt": "1+1?", "answer": "2"}, "a.jsonl, line 1", 0)])
        {'answer': ['2']}
    """
    names = dict.fromkeys(name for row in rows for name in row.values if name != "prompt")
    reserved = sorted(REWARD_ARGUMENTS & names.keys())
    if reserved:
        name = reserved[0]
        raise ValueError(
            f"{rows[0].place}: field {name!r} has the name of an argument of reward functions; "
            f"rename it with `columns: {{reference_{name}: {name}}}`"
        )
    return {name: [row.values.get(name) for row in rows] for name in names}
