"""From rows as they were read to rows under our names, in sets that do not share a prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from litgrpo.arguments import one_of, require
from litgrpo.data.sources import Row, SetsLike, SourceLike, read
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn

TrainValOverlap = Literal["drop", "error", "keep"]
NAMES_OF_REWARDS = {
    *("prompts", "completions", "completion_ids", "completion_lengths", "truncated"),
    "conversation",
}

NUMBER = "episode_number"  # of rows that are nothing but the beginning of an episode
OUR_NAMES = ("prompt", "completion", "messages", "answer", "id")


@dataclass(frozen=True)
class Table:
    """How a source becomes the rows of a training, validation, test or prediction set.

    Args:
        columns: {our name: name in the source}; a row that lacks the source's name but already has
            ours is taken as it is. All fields keep their own names, too.
        extract: {our name: regular expression}; the column becomes the expression's only group.
        val_fraction: share of the training rows to hold out, chosen by a hash of their prompts.
        train_val_overlap: what to do with training rows whose prompt is also in the validation set.
        split_by: the column whose hash is taken; rows that agree in it stay together.
        instead: {name: the fields that a row with this one need not have}.
    """

    columns: dict[str, str]
    extract: dict[str, str]
    val_fraction: float
    train_val_overlap: TrainValOverlap
    split_by: str = "prompt"
    instead: Mapping[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        one_of("train_val_overlap", self.train_val_overlap, get_args(TrainValOverlap))
        allowed = 0 <= self.val_fraction < 1
        require(allowed, f"val_fraction is {self.val_fraction}; it must be in [0, 1).")
        for name, pattern in self.extract.items():
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"extract.{name}: {pattern!r} is no pattern: {error}") from error
            said = f"extract.{name}: {pattern!r} has {groups} groups, expected one"
            require(groups == 1, said)

    @property
    def fields(self) -> set[str]:
        """What a row that is learned from must have, besides what the templates need."""
        return {*self.columns, *self.extract}

    def read(self, source: SetsLike, required: Iterable[str] | None = None) -> list[Row]:
        """All rows of a source, under our names.

        Args:
            source: where they come from.
            required: the fields that every row needs; None means all of `columns` and `extract`.
        """
        needed = self.fields if required is None else set(required)
        rows = [self.named(row, needed) for row in read(source)]
        refuse_equal_ids(rows)
        return rows

    def named(self, row: Row, required: set[str]) -> Row:
        """The row under our names, if it has the fields that it needs."""
        renamed = {ours: theirs for ours, theirs in self.columns.items() if theirs in row.values}
        # A column keeps its own name, too, unless that name means something else here.
        taken = set(renamed.values()) & {*NAMES_OF_REWARDS, *OUR_NAMES}
        values = {name: value for name, value in row.values.items() if name not in taken}
        values |= {ours: row.values[theirs] for ours, theirs in renamed.items()}
        spared = {name for own, others in self.instead.items() if own in values for name in others}
        for name in sorted(required - values.keys() - spared):
            wanted = self.columns.get(name, name)
            has = ", ".join(map(str, row.values)) or "none"
            hint = f"it has: {has}; `columns: {{{name}: ...}}` names another"
            hint += "; `messages` need `chat: true`" * ("messages" in values)
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
        self, train: SourceLike, val: SetsLike | None, required: Iterable[str] | None = None
    ) -> tuple[list[Row], list[Row]]:
        """The rows to train on, and those held out (none when neither is asked for).

        With `val_fraction` a prompt stays on its side whatever happens to the others, to their
        order, to the seed or to the template; a larger fraction only adds to the held-out rows.
        """
        named = isinstance(train, dict)
        require(not named, "train is one set; several sources for it are a list: `[a, b]`")
        rows = self.read(train, required)
        if val is None:
            kept, held = self._split(rows)
        else:
            held = self.read(val, required)
            kept = self._without_overlap(rows, held)
        require(bool(kept), "no training row is left: all of them are held out for validation")
        none_held = f"val_fraction {self.val_fraction} of {len(rows)} rows holds out none"
        require(bool(held) or not self.val_fraction, none_held)
        report_duplicates("train", kept)
        report_duplicates("val", held)
        return kept, held

    def _split(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        sides: dict[bool, list[Row]] = {False: [], True: []}
        for row in rows:
            sides[is_held_out(row, self.val_fraction, self.split_by)].append(row)
        return sides[False], sides[True]

    def _without_overlap(self, train: list[Row], val: list[Row]) -> list[Row]:
        places = {identity(row): row.place for row in val}
        shared = [row for row in train if identity(row) in places]
        if not shared:
            return train
        first = f"{shared[0].place} = {places[identity(shared[0])]}"
        said = f"{len(shared)} of {len(train)} training prompts are in the validation set ({first})"
        require(
            self.train_val_overlap != "error",
            f"{said}; `train_val_overlap: drop` removes them from training",
        )
        done, left = {
            "drop": ("removed from training", [r for r in train if identity(r) not in places]),
            "keep": ("kept, so validation is optimistic", train),
        }[self.train_val_overlap]
        rank_zero_warn(f"{said}: {done}")
        return left


def identity(row: Row, name: str = "prompt") -> str:
    """What makes two rows the same problem: the prompt before any template, less white space.

    Rows of `litgrpo.data.EpisodePrompts` have their number in it, for their prompts are the same.
    """
    values = row.values
    asked = {"prompt": values["messages"][:-1]} if values.get("messages") else {}
    prompt = (asked | values).get(name, values)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    numbers = [f"#{values[NUMBER]}"] if NUMBER in values else []
    return " ".join([*text.split(), *numbers])


def is_held_out(row: Row, fraction: float, split_by: str = "prompt") -> bool:
    """Whether a row belongs to the held-out share; depends on its `split_by` alone."""
    known = split_by == "prompt" or split_by in row.values
    require(known, f"{row.place}: no field {split_by!r}, which split_by names")
    digest = hashlib.sha256(identity(row, split_by).encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def fingerprint(rows: list[Row]) -> str:
    """A name for these prompts in this order."""
    return hashlib.sha256("\n".join(map(identity, rows)).encode()).hexdigest()[:16]


def repeats(rows: list[Row], key: Callable[[Row], Hashable]) -> Iterator[tuple[Row, str]]:
    """Each row whose key an earlier row has, with the place of the first such row."""
    seen: dict[Hashable, str] = {}
    for row in rows:
        first = seen.setdefault(key(row), row.place)
        if first != row.place:
            yield row, first


def refuse_equal_ids(rows: list[Row]) -> None:
    """Stop where two rows claim to be the same example: one of them is not what it says.

    Raises:
        ValueError: both places.
    """
    identified = [row for row in rows if isinstance(row.values.get("id"), str | int)]
    for row, first in repeats(identified, lambda r: (r.set_name, r.source, r.values["id"])):
        raise ValueError(
            f"{row.place}: field 'id' is {row.values['id']!r}, as in {first}; remove one of them, "
            "or say `columns: {number: id}` if it is no identifier"
        )


def report_duplicates(name: str, rows: list[Row]) -> None:
    """Say how many rows repeat the prompt of an earlier one, and name the first pair."""
    found = [f"{row.place} = {first}" for row, first in repeats(rows, identity)]
    if found:
        rank_zero_info(f"{name}: {len(found)} of {len(rows)} prompts are repeats ({found[0]})")


def columns_of(rows: list[Row]) -> dict[str, list[Any]]:
    """Every field but `prompt`, as a list with one value per row (None where a row has none)."""
    names = dict.fromkeys(name for row in rows for name in row.values if name != "prompt")
    for name in NAMES_OF_REWARDS & names.keys():
        hint = f"`columns: {{gold_{name}: {name}}}` renames it"
        raise ValueError(f"{rows[0].place}: field {name!r} is what rewards are given; {hint}")
    return {name: [row.values.get(name) for row in rows] for name in names}
