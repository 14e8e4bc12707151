"""From rows as they were read to rows under our names, in sets that do not share a prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from litgrpo.data.sources import Row, SourceLike, read

Overlap = Literal["drop", "error", "keep"]
NAMES_OF_REWARDS = {
    *("prompts", "completions", "completion_ids", "completion_lengths", "truncated"),
    "conversation",
}


@dataclass(frozen=True)
class Table:
    """How a source becomes the rows of a training, validation, test or prediction set.

    Args:
        columns: {our name: name in the source}; a row that lacks the source's name but already has
            ours is taken as it is. Other fields keep their names.
        extract: {our name: regular expression}; the column becomes the expression's only group.
        val_fraction: share of the training rows to hold out, chosen by a hash of their prompts.
        overlap: what to do with training rows whose prompt is also in the validation set.
        split_by: the column whose hash is taken; rows that agree in it stay together.
    """

    columns: dict[str, str]
    extract: dict[str, str]
    val_fraction: float
    overlap: Overlap
    split_by: str = "prompt"

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        require("overlap", self.overlap, ("drop", "error", "keep"))
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction is {self.val_fraction}, it must be in [0, 1)")
        for name, pattern in self.extract.items():
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"extract.{name}: {pattern!r} is no pattern: {error}") from error
            if groups != 1:
                raise ValueError(f"extract.{name}: {pattern!r} has {groups} groups, expected one")

    def read(self, source: SourceLike, required: Iterable[str] | None = None) -> list[Row]:
        """All rows of a source, under our names.

        Args:
            source: where they come from.
            required: the fields that every row needs; None means all of `columns` and `extract`.
        """
        everything = {*self.columns, *self.extract} if required is None else set(required)
        rows = [self._named(row, everything) for row in read(source)]
        refuse_equal_ids(rows)
        return rows

    def _named(self, row: Row, required: set[str]) -> Row:
        renamed = {ours: theirs for ours, theirs in self.columns.items() if theirs in row.values}
        taken = set(renamed.values())
        values = {name: value for name, value in row.values.items() if name not in taken}
        values |= {ours: row.values[theirs] for ours, theirs in renamed.items()}
        for name in sorted(required - values.keys()):
            wanted = self.columns.get(name, name)
            has = ", ".join(map(str, row.values)) or "none"
            hint = f"it has: {has}; `columns: {{{name}: ...}}` names another"
            raise ValueError(f"{row.place}: no field {wanted!r} ({hint})")
        for name in self.extract.keys() & values.keys():
            values[name] = self._extracted(name, values[name], row.place)
        return replace(row, values=values)

    def _extracted(self, name: str, value: Any, place: str) -> str:
        found = re.search(self.extract[name], value) if isinstance(value, str) else None
        if found is None or found[1] is None:
            pattern = self.extract[name]
            raise ValueError(
                f"{place}, field {name!r}: {pattern!r} not found in {str(value)[-80:]!r}"
            )
        return found[1].strip()

    def train_and_val(
        self, train: SourceLike, val: SourceLike | None, required: Iterable[str] | None = None
    ) -> tuple[list[Row], list[Row]]:
        """The rows to train on, and those held out (none when neither is asked for).

        With `val_fraction` a prompt stays on its side whatever happens to the others, to their
        order, to the seed or to the template; a larger fraction only adds to the held-out rows.
        """
        rows = self.read(train, required)
        if val is None:
            held_out = [is_held_out(row, self.val_fraction, self.split_by) for row in rows]
            kept = [row for row, out in zip(rows, held_out, strict=True) if not out]
            held = [row for row, out in zip(rows, held_out, strict=True) if out]
        else:
            held = self.read(val, required)
            kept = self._without_overlap(rows, held)
        if not kept:
            raise ValueError("no training row is left: all of them are held out for validation")
        if self.val_fraction and not held:
            raise ValueError(f"val_fraction {self.val_fraction} of {len(rows)} rows holds out none")
        report_duplicates("train", kept)
        report_duplicates("val", held)
        return kept, held

    def _without_overlap(self, train: list[Row], val: list[Row]) -> list[Row]:
        places = {identity(row): row.place for row in val}
        shared = [row for row in train if identity(row) in places]
        if not shared:
            return train
        first = f"{shared[0].place} = {places[identity(shared[0])]}"
        said = f"{len(shared)} of {len(train)} training prompts are in the validation set ({first})"
        if self.overlap == "error":
            raise ValueError(f"{said}; `overlap: drop` removes them from training")
        done = {"drop": "removed from training", "keep": "kept, so validation is optimistic"}
        rank_zero_warn(f"{said}: {done[self.overlap]}")
        return [row for row in train if identity(row) not in places or self.overlap == "keep"]


def identity(row: Row, name: str = "prompt") -> str:
    """What makes two rows the same problem: the prompt before any template, less white space."""
    prompt = row.values.get(name, row.values)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return " ".join(text.split())


def is_held_out(row: Row, fraction: float, split_by: str = "prompt") -> bool:
    """Whether a row belongs to the held-out share; depends on its `split_by` alone."""
    if split_by != "prompt" and split_by not in row.values:
        raise ValueError(f"{row.place}: no field {split_by!r}, which split_by names")
    digest = hashlib.sha256(identity(row, split_by).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def fingerprint(rows: list[Row]) -> str:
    """A name for these prompts in this order."""
    return hashlib.sha256("\n".join(map(identity, rows)).encode()).hexdigest()[:16]


def refuse_equal_ids(rows: list[Row]) -> None:
    """Stop where two rows claim to be the same example: one of them is not what it says.

    Raises:
        ValueError: both places.
    """
    seen: dict[Any, str] = {}
    for row in rows:
        value = row.values.get("id")
        if isinstance(value, str | int):
            first = seen.setdefault(value, row.place)
            if first != row.place:
                raise ValueError(
                    f"{row.place}: field 'id' is {value!r}, as in {first}; remove one of them, or "
                    "say `columns: {number: id}` if it is no identifier"
                )


def report_duplicates(name: str, rows: list[Row]) -> None:
    """Say how many rows repeat the prompt of an earlier one, and name the first pair."""
    seen: dict[str, str] = {}
    repeats = []
    for row in rows:
        first = seen.setdefault(identity(row), row.place)
        if first != row.place:
            repeats.append(f"{row.place} = {first}")
    if repeats:
        rank_zero_info(f"{name}: {len(repeats)} of {len(rows)} prompts are repeats ({repeats[0]})")


def columns_of(rows: list[Row]) -> dict[str, list[Any]]:
    """Every field but `prompt`, as a list with one value per row (None where a row has none)."""
    names = dict.fromkeys(name for row in rows for name in row.values if name != "prompt")
    for name in NAMES_OF_REWARDS & names.keys():
        hint = f"`columns: {{gold_{name}: {name}}}` renames it"
        raise ValueError(f"{rows[0].place}: field {name!r} is what rewards are given; {hint}")
    return {name: [row.values.get(name) for row in rows] for name in names}


def require(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuse a setting that is none of the allowed."""
    if value not in (choices := tuple(allowed)):
        raise ValueError(f"{name} is {value!r}, allowed: {', '.join(map(repr, choices))}")


def require_positive(**settings: int | None) -> None:
    """Refuse counts below one; None is allowed."""
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")
