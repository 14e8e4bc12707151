"""Held-out prompts over time, and those that are hardest and easiest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from litgrpo.callbacks.number_texts import digits
from litgrpo.tools.report.results import known_floats
from litgrpo.tools.report.run_files import Row, RunFiles
from litgrpo.tools.report.texts import Said, dialogue, visible

MOST = 12  # prompts that are followed
EXTREMES = 5  # hardest and easiest ones
LONGEST_PROMPT = 800
LONGEST_NAME = 160


@dataclass(frozen=True)
class Answer:
    """One completion on the page.

    Args:
        when: the iteration, in words.
        said: its messages.
        notes: right or wrong, reward, parts, tokens; in words.
        right: whether it counts as right; None where that is not known.
    """

    when: str
    said: list[Said]
    notes: list[str]
    right: bool | None


@dataclass(frozen=True)
class Followed:
    """A held-out prompt and what was answered over time."""

    why: str
    prompt: str
    place: str
    answers: list[Answer]


@dataclass(frozen=True)
class Ranked:
    """A held-out prompt with its share of right samples."""

    prompt: str
    before: str
    after: str
    reward: str


def notes_of(row: Row) -> list[str]:
    """What is known of a completion besides its text."""
    right = {True: "right", False: "wrong"}
    parts = [f"{visible(n, 60)} {_shown(x)}" for n, x in (row.get("rewards") or {}).items()]
    calls = [f"{_called(x)} {visible(n, 60)}" for n, x in (row.get("calls") or {}).items()]
    of_parts = f" ({', '.join(parts)})" if parts else ""
    known = {
        "right": right.get(row.get("right")),  # type: ignore[arg-type]
        "reward": f"reward {_shown(row['reward'])}{of_parts}" if "reward" in row else None,
        "length": f"{row['length']} tokens" if "length" in row else None,
        "cut": "cut off" if row.get("truncated") else None,
        "calls": ", ".join(calls) or None,
        "failed": f"failed: {visible(row['failed'], 200)}" if row.get("failed") else None,
    }
    return [text for text in known.values() if text]


def _called(counts: Any) -> str:
    """How often a tool was called, and how often that failed."""
    many, failed = [*known_floats(counts if isinstance(counts, list) else []), 0.0, 0.0][:2]
    return f"{many:.0f} calls" + (f", {failed:.0f} failed," if failed else "") + " of"


def _shown(value: Any) -> str:
    return digits(value) if known_floats([value]) else "unknown"


def followed(run: RunFiles) -> list[Followed]:
    """The same prompts at each evaluation that is shown, one sample each: always the first.

    Samples of one prompt are drawn with the same random numbers each time.

    Args:
        run: the run.
    """
    columns = {n: {_place(row): row for row in rows} for n, rows in run.evaluations.items()}
    if not columns:
        return []
    first, last = columns[min(columns)], columns[max(columns)]
    shared = [place for place in first if all(place in each for each in columns.values())]
    found = []
    for place, why in chosen(first, last, shared).items():
        rows = {n: columns[n][place]["samples"][0] for n in sorted(columns)}
        earlier = [None, *list(rows.values())[:-1]]
        answers = [
            Answer(_when(n), dialogue(row, old), notes_of(row), row.get("right"))
            for (n, row), old in zip(rows.items(), earlier, strict=True)
        ]
        name = f"{visible(place[0], 60)} {place[1]}".strip()
        found.append(Followed(why, visible(last[place]["prompt"], LONGEST_PROMPT), name, answers))
    return found


def _when(iteration: int) -> str:
    return f"after {iteration:,} iterations" if iteration else "before training"


def _place(row: Row) -> tuple[str, int]:
    return str(row.get("set", "")), int(row["index"])


Place = tuple[str, int]
Rows = dict[Place, Row]


def chosen(first: Rows, last: Rows, shared: Sequence[Place]) -> dict[Place, str]:
    """{prompt: why it is shown}, at most twelve, the telling ones first.

    Args:
        first: the first evaluation.
        last: the last one.
        shared: prompts of all evaluations.
    """

    def gain(place: Place) -> float:
        old, new = (known_floats([rows[place].get("reward")]) for rows in (first, last))
        return new[0] - old[0] if old and new else 0.0

    def sample(place: Place) -> Row:
        found: Row = last[place]["samples"][0]
        return found

    def reward(place: Place) -> float:
        return next(iter(known_floats([sample(place).get("reward")])), 0.0)

    wrong = [place for place in shared if sample(place).get("right") is False]
    kinds: tuple[tuple[str, int, Sequence[Place], Callable[[Place], float]], ...] = (
        ("most improved", 3, [p for p in shared if gain(p) > 0], lambda p: -gain(p)),
        ("got worse", 3, [p for p in shared if gain(p) < 0], gain),
        ("wrong, highest reward", 2, wrong, lambda p: -reward(p)),
        ("cut off", 2, [p for p in shared if sample(p).get("truncated")], reward),
    )
    found: dict[Place, str] = {}
    for why, most, among, order in kinds:
        left = [place for place in among if place not in found]
        found |= dict.fromkeys(sorted(left, key=lambda p, o=order: (o(p), p))[:most], why)  # type: ignore[misc]
    others = [place for place in shared if place not in found]
    step = max(1, len(others) // max(1, MOST - len(found)))
    return found | dict.fromkeys(others[::step][: MOST - len(found)], "one of the others")


def ranked(run: RunFiles) -> tuple[list[Ranked], list[Ranked]]:
    """The hardest and the easiest prompts of the last evaluation, by right samples and reward.

    Args:
        run: the run.
    """
    if not run.evaluations:
        return [], []
    before = {_place(row): row for row in run.evaluations[min(run.evaluations)]}
    rows = run.evaluations[max(run.evaluations)]

    def key(row: Row) -> tuple[float, float, Place]:
        right, reward = (known_floats([row.get(name)]) for name in ("right", "reward"))
        return (*right, 0.0)[0], (*reward, 0.0)[0], _place(row)

    order = sorted(rows, key=key)
    count = min(EXTREMES, len(order) // 2)
    return (
        [_ranked(row, before) for row in order[:count]],
        [_ranked(row, before) for row in reversed(order[len(order) - count :])],
    )


def _ranked(row: Row, before: Rows) -> Ranked:
    old = before.get(_place(row), {})
    return Ranked(
        visible(row["prompt"], LONGEST_NAME),
        _shown(old.get("right")),
        _shown(row.get("right")),
        _shown(row.get("reward")),
    )
