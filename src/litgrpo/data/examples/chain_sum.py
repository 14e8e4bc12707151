"""Demonstrations of the task chain_sum of reasoning-gym, by a careless teacher.

The teacher reads a problem's terms from its text ("... problem: 42 - 25 + 7 =") and works from left
to right, each sum or difference digit by digit, but often forgets to carry, is off by one, or
forgets a minus or the tags. A model that imitates it knows the method, so that its most likely
answer is right more often than its samples; reinforcement learning can remove the mistakes.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from litgrpo.arguments import require
from litgrpo.data.sources import ReasoningGym

Row = dict[str, Any]

TASK = "chain_sum"
EXPRESSION = re.compile(r": (-?\d+(?: [+-] -?\d+)*) =$")
TERM = re.compile(r"([+-]?) ?(-?\d+)")


@dataclass(frozen=True)
class ChainTeacher:
    """Writes demonstrations, and makes mistakes.

    Args:
        wrong_digit_frac: how often the sum or difference of two digits is off by one.
        forgotten_carry_frac: how often a carry (or borrow) is forgotten.
        forgotten_sign_frac: how often the minus of a result below zero is forgotten.
        no_tags_frac: how often the tags are forgotten.
    """

    wrong_digit_frac: float = 0.0
    forgotten_carry_frac: float = 0.0
    forgotten_sign_frac: float = 0.0
    no_tags_frac: float = 0.0

    def demonstrate(self, terms: list[int], rng: random.Random) -> str:
        """The completion for the sum of at least one term, with their signs.

        Example:
            >>> ChainTeacher().demonstrate([47, 38], random.Random(0))
            '<reasoning>47+38: 7+8=15, 4+3+1=8, 85</reasoning><answer>85</answer>'
            >>> ChainTeacher().demonstrate([12, -38], random.Random(0))
            '<reasoning>-(38-12): 8-2=6, 3-1=2, -26</reasoning><answer>-26</answer>'
        """
        total, steps = terms[0], []
        for term in terms[1:]:
            total, step = self._step(total, term, rng)
            steps.append(step)
        reasoning = "; ".join(steps)
        if rng.random() < self.no_tags_frac:
            return f"{reasoning}; {total}"
        return f"<reasoning>{reasoning}</reasoning><answer>{total}</answer>"

    def _step(self, first: int, second: int, rng: random.Random) -> tuple[int, str]:
        """The sum of two terms, and how it was found: what is subtracted is the smaller size."""
        one, other, sign = abs(first), abs(second), "+"
        if (first < 0) != (second < 0):
            one, other, sign = max(one, other), min(one, other), "-"
        size, columns = self._columns(one, sign, other, rng)
        task, total = f"{one}{sign}{other}", size
        if first + second < 0:
            task = f"-({task})"
            total = size if rng.random() < self.forgotten_sign_frac else -size
        return total, f"{task}: {columns}, {total}"

    def _columns(self, one: int, sign: str, other: int, rng: random.Random) -> tuple[int, str]:
        """`one` + `other`, or `one` - `other` of at most `one`, digit by digit from the right."""
        length = max(len(str(one)), len(str(other)))
        pairs = zip(reversed(f"{one:0{length}}"), reversed(f"{other:0{length}}"), strict=True)
        carry, found, columns = 0, 0, []
        for place, (upper, lower) in enumerate(pairs):
            last = place == length - 1
            top, bottom = int(upper), int(lower)
            carried = f"{sign}1" * carry
            if sign == "+":
                # A wrong sum carries what it shows: 7+8=16 carries 1, as 15 would.
                digit = self._digit(top + bottom + carry, 19, rng)
                carry = digit // 10
            else:
                borrow = int(top < bottom + carry)
                top += 10 * borrow
                digit = self._digit(top - bottom - carry, 9, rng)
                carry = borrow
            columns.append(f"{top}{sign}{bottom}{carried}={digit}")
            found += (digit if last else digit % 10) * 10**place
            if carry and rng.random() < self.forgotten_carry_frac:
                carry = 0
        return found, ", ".join(columns)

    def _digit(self, right: int, largest: int, rng: random.Random) -> int:
        if rng.random() >= self.wrong_digit_frac:
            return right
        return rng.choice([digit for digit in (right - 1, right + 1) if 0 <= digit <= largest])


CARELESS = ChainTeacher(
    wrong_digit_frac=0.05,
    forgotten_carry_frac=0.4,
    forgotten_sign_frac=0.3,
    no_tags_frac=0.4,
)


def terms_of(prompt: str) -> list[int]:
    """The terms of a problem's text, with their signs.

    Raises:
        ValueError: it holds no sum.

    Example:
        >>> terms_of("State the final answer to the following arithmetic problem: 42 - 25 + 7 =")
        [42, -25, 7]
    """
    found = EXPRESSION.search(prompt)
    require(found is not None, f"{prompt!r} is no problem of {TASK}, which ends in `: 42 - 25 =`")
    assert found is not None
    return [-int(number) if sign == "-" else int(number) for sign, number in TERM.findall(found[1])]


def supervised(
    size: int = 500,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    apart_from: dict[str, int] | None = None,
) -> list[Row]:
    """Problems of reasoning-gym with demonstrations of the careless teacher.

    Args:
        size: number of problems that are made; those of `apart_from` are then left out.
        seed: of the problems and the mistakes.
        settings: of the task, such as `{min_terms: 2, max_terms: 2}`.
        apart_from: `size` and `seed` of the problems that reinforcement learning reads.

    Returns:
        Rows of `ReasoningGym` with a `completion`.
    """
    others = apart_from or {}
    hint = "; give `{size: 4000, seed: 7}`, as the other recipe has them"
    require(others.keys() in (set(), {"size", "seed"}), f"apart_from is {others}{hint}")
    theirs = {row["prompt"] for row in _problems(settings=settings, **others)} if others else set()
    rng = random.Random(f"supervised {seed}")
    rows = [row for row in _problems(size, seed, settings) if row["prompt"] not in theirs]
    require(bool(rows), "all problems are among those of apart_from; give more, or another seed")
    told = [CARELESS.demonstrate(terms_of(row["prompt"]), rng) for row in rows]
    return [row | {"completion": text} for row, text in zip(rows, told, strict=True)]


def _problems(size: int, seed: int, settings: dict[str, Any] | None) -> list[Row]:
    return ReasoningGym({TASK: 1}, size=size, seed=seed, configs={TASK: settings or {}}).rows()
