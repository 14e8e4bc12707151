"""Noisy demonstrations of the reasoning-gym task chain_sum, for supervised fine-tuning.

The terms are parsed from a problem's text ("... problem: 42 - 25 + 7 ="), and added from left to
right, digit by digit. Random mistakes are inserted: carries that are left out, digits off by one,
missing minus signs or tags. A model that is fine-tuned on them learns the method and the mistakes.
Its greedy answers are correct more often than its samples, and GRPO can remove the mistakes.
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
class ChainSumDemonstrator:
    """Writes demonstrations, with mistakes at these rates."""

    wrong_digit_frac: float = 0.0  # fraction of digits that are off by one
    forgotten_carry_frac: float = 0.0  # fraction of carries (or borrows) that are left out
    forgotten_sign_frac: float = 0.0  # fraction of negative results whose minus is left out
    no_tags_frac: float = 0.0  # fraction of demonstrations without tags

    def demonstrate(self, terms: list[int], rng: random.Random) -> str:
        """Write the completion for a sum of at least one signed term.

        Example:
            >>> ChainSumDemonstrator().demonstrate([47, 38], random.Random(0))
            '<reasoning>47+38: 7+8=15, 4+3+1=8, 85</reasoning><answer>85</answer>'
            >>> ChainSumDemonstrator().demonstrate([12, -38], random.Random(0))
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
        """Return the sum of two terms, and its steps as text."""
        # With different signs: subtract the smaller absolute value, so no digit gets negative.
        upper, lower, sign = abs(first), abs(second), "+"
        if (first < 0) != (second < 0):
            upper, lower, sign = max(upper, lower), min(upper, lower), "-"
        size, columns = self._columns(upper, sign, lower, rng)
        task, total = f"{upper}{sign}{lower}", size
        if first + second < 0:
            task = f"-({task})"
            total = size if rng.random() < self.forgotten_sign_frac else -size
        return total, f"{task}: {columns}, {total}"

    def _columns(self, upper: int, sign: str, lower: int, rng: random.Random) -> tuple[int, str]:
        """Return the sum or the difference, at least 0, of two numbers, and its steps as text."""
        length = max(len(str(upper)), len(str(lower)))
        pairs = zip(reversed(f"{upper:0{length}}"), reversed(f"{lower:0{length}}"), strict=True)
        carry, total, columns = 0, 0, []
        for place, (top_digit, bottom_digit) in enumerate(pairs):
            is_last = place == length - 1
            top, bottom = int(top_digit), int(bottom_digit)
            carried = f"{sign}1" if carry else ""
            if sign == "+":
                # An incorrect digit sum determines its own carry: 7+8=16 carries 1, as 15 would.
                digit = self._digit(top + bottom + carry, 19, rng)
                carry = digit // 10
            else:
                borrow = int(top < bottom + carry)
                top += 10 * borrow
                digit = self._digit(top - bottom - carry, 9, rng)
                carry = borrow
            columns.append(f"{top}{sign}{bottom}{carried}={digit}")
            total += (digit if is_last else digit % 10) * 10**place
            if carry and rng.random() < self.forgotten_carry_frac:
                carry = 0
        return total, ", ".join(columns)

    def _digit(self, correct: int, largest: int, rng: random.Random) -> int:
        if rng.random() >= self.wrong_digit_frac:
            return correct
        return rng.choice([digit for digit in (correct - 1, correct + 1) if 0 <= digit <= largest])


NOISY = ChainSumDemonstrator(
    wrong_digit_frac=0.05,
    forgotten_carry_frac=0.4,
    forgotten_sign_frac=0.3,
    no_tags_frac=0.4,
)


def parse_terms(prompt: str) -> list[int]:
    """Parse the signed terms of a problem's text."""
    match = EXPRESSION.search(prompt)
    require(
        match is not None,
        f"not a {TASK} problem: got {prompt!r}, expected a text ending in `: 42 - 25 =`",
    )
    assert match is not None
    return [-int(number) if sign == "-" else int(number) for sign, number in TERM.findall(match[1])]


def demonstrations(
    size: int = 500,
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    exclude: dict[str, int] | None = None,
) -> list[Row]:
    """Generate reasoning-gym problems with noisy demonstrations.

    Args:
        size: number of problems to generate, before those of `exclude` are removed.
        seed: random seed of the problems and the mistakes.
        settings: settings of the task, such as `{min_terms: 2, max_terms: 2}`.
        exclude: `size` and `seed` of the problems that GRPO trains on, which are removed.

    Returns:
        Rows of `ReasoningGym` with a `completion`.
    """
    excluded: set[str] = set()
    if exclude:
        require(
            exclude.keys() == {"size", "seed"},
            f"exclude is {exclude}, expected size and seed, such as `{{size: 4000, seed: 7}}`; "
            "copy them from the recipe that trains on those problems",
        )
        excluded = {row["prompt"] for row in _generate(settings=settings, **exclude)}
    # Part of the data: another seed text would give other mistakes.
    rng = random.Random(f"supervised {seed}")
    rows = [row for row in _generate(size, seed, settings) if row["prompt"] not in excluded]
    require(
        bool(rows),
        f"exclude removes all {size} problems; raise size, or choose a seed that is further away",
    )
    completions = [NOISY.demonstrate(parse_terms(row["prompt"]), rng) for row in rows]
    return [row | {"completion": text} for row, text in zip(rows, completions, strict=True)]


def _generate(size: int, seed: int, settings: dict[str, Any] | None) -> list[Row]:
    return ReasoningGym({TASK: 1}, size=size, seed=seed, configs={TASK: settings or {}}).rows()
