"""Short arithmetic problems of the quickstart, with noisy demonstrations.

Every problem adds or subtracts two numbers, as a story ("Tom has 47 apples and gets 38 more. ...")
or as a formula ("What is 47+38?"). A demonstration calculates digit by digit between `<reasoning>`
tags. Random mistakes are inserted: carries that are left out, digits off by one, missing tags. A
model that is fine-tuned on them answers correctly if decoded greedily, but also samples the
mistakes. GRPO can remove them.

Every pair of numbers belongs to exactly one of the three sets, in either order and for both
operations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

Row = dict[str, str]

NUMBERS = range(2, 100)
NUM_HELD_OUT = 500
NUM_SUPERVISED = 2000
SPLIT_SEED = 0  # fixed, so that no seed of a run moves a pair from one set to another

SIGNS = {"+": 1, "-": -1}

NAMES = [
    *("Ada", "Ben", "Eva", "Ida", "Jim", "Kim", "Leo", "Max"),
    *("Mia", "Nina", "Omar", "Rosa", "Sam", "Tom", "Uma", "Zoe"),
]
ITEMS = [
    *("apples", "balls", "books", "cards", "coins", "cups", "eggs", "keys"),
    *("nuts", "pears", "pens", "plums", "rings", "shells", "stamps", "stones"),
]
WORDINGS = {
    "+": (
        "What is {a}+{b}?",
        "{name} has {a} {items} and gets {b} more. How many {items} does {name} have?",
        "{name} has {a} {items} and {other} has {b}. How many {items} do they have?",
        "There are {a} {items} in a box and {b} on a table. How many {items} are there?",
    ),
    "-": (
        "What is {a}-{b}?",
        "{name} has {a} {items} and loses {b}. How many {items} does {name} have?",
        "{name} has {a} {items} and gives {other} {b}. How many {items} does {name} have?",
        "There are {a} {items} in a box and {name} takes {b}. How many {items} are left?",
    ),
}


@dataclass(frozen=True)
class Demonstrator:
    """Writes demonstrations, with mistakes at these rates."""

    wrong_digit_frac: float = 0.0  # fraction of digits that are off by one
    forgotten_carry_frac: float = 0.0  # fraction of carries (or borrows) that are left out
    no_tags_frac: float = 0.0  # fraction of demonstrations without tags

    def demonstrate(self, first: int, sign: str, second: int, rng: random.Random) -> str:
        """Write the completion for a sum or difference of numbers below 100, at least 0.

        Example:
            >>> Demonstrator().demonstrate(47, "+", 38, random.Random(0))
            '<reasoning>47+38: 7+8=15, 4+3+1=8</reasoning><answer>85</answer>'
            >>> Demonstrator().demonstrate(52, "-", 38, random.Random(0))
            '<reasoning>52-38: 12-8=4, 5-3-1=1</reasoning><answer>14</answer>'
        """
        (tens_1, ones_1), (tens_2, ones_2) = divmod(first, 10), divmod(second, 10)
        if sign == "+":
            # An incorrect sum of the ones determines its own carry: 7+8=16 carries 1, as 15 would.
            ones = self._digit(ones_1 + ones_2, 18, rng)
            carry = ones // 10
        else:
            carry = int(ones_1 < ones_2)
            ones_1 += 10 * carry
            ones = self._digit(ones_1 - ones_2, 9, rng)
        if rng.random() < self.forgotten_carry_frac:
            carry = 0
        tens = self._digit(tens_1 + SIGNS[sign] * (tens_2 + carry), 19, rng)
        carried = f"{sign}1" if carry else ""
        steps = f"{ones_1}{sign}{ones_2}={ones}, {tens_1}{sign}{tens_2}{carried}={tens}"
        reasoning, answer = f"{first}{sign}{second}: {steps}", 10 * tens + ones % 10
        if rng.random() < self.no_tags_frac:
            return f"{reasoning}, {answer}"
        return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"

    def _digit(self, correct: int, largest: int, rng: random.Random) -> int:
        if rng.random() >= self.wrong_digit_frac:
            return correct
        return rng.choice([digit for digit in (correct - 1, correct + 1) if 0 <= digit <= largest])


NOISY = Demonstrator(wrong_digit_frac=0.05, forgotten_carry_frac=0.4, no_tags_frac=0.4)


def demonstrations(size: int = 40_000, seed: int = 0) -> list[Row]:
    """Generate problems with noisy demonstrations, for supervised fine-tuning.

    Args:
        size: number of rows.
        seed: random seed of wordings, numbers and mistakes.

    Returns:
        Rows with `prompt`, `answer` (always correct) and `completion`.
    """
    # The texts that seed the generators are part of the data: another text gives other rows, and
    # the embedded model and the stated accuracies were made with these.
    rng = random.Random(f"supervised {seed}")
    pairs = _pairs()[NUM_HELD_OUT : NUM_HELD_OUT + NUM_SUPERVISED]
    problems = (_problem(rng.choice(pairs), rng) for _ in range(size))
    return [_row(*problem, NOISY, rng) for problem in problems]


def train(size: int = 4_000, seed: int = 0) -> list[Row]:
    """Generate training prompts without demonstrations.

    Args:
        size: number of rows.
        seed: random seed of wordings and numbers.

    Returns:
        Rows with `prompt` and `answer`.
    """
    rng = random.Random(f"train {seed}")
    pairs = _pairs()[NUM_HELD_OUT + NUM_SUPERVISED :]
    rows = [_row(*_problem(rng.choice(pairs), rng), Demonstrator(), rng) for _ in range(size)]
    return [{name: row[name] for name in ("prompt", "answer")} for row in rows]


def held_out() -> list[Row]:
    """Return the 500 problems that are in no training set, with correct demonstrations.

    Returns:
        Rows with `prompt`, `answer` and `completion`.
    """
    rng = random.Random("held out")
    problems = (_problem(pair, rng) for pair in _pairs()[:NUM_HELD_OUT])
    return [_row(*problem, Demonstrator(), rng) for problem in problems]


def _pairs() -> list[tuple[int, int]]:
    """Return all pairs (larger, smaller), always in the same random order."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a >= b]
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs


def _problem(pair: tuple[int, int], rng: random.Random) -> tuple[str, int, str, int]:
    """Word a pair as a problem: the prompt, first number, sign, second number."""
    sign = rng.choice("+-")
    # The larger number is first, so no difference is negative; sums are worded in both orders.
    first, second = pair
    if sign == "+" and rng.random() < 1 / 2:
        first, second = second, first
    name, other = rng.sample(NAMES, 2)
    wording = rng.choice(WORDINGS[sign])
    prompt = wording.format(a=first, b=second, name=name, other=other, items=rng.choice(ITEMS))
    return prompt, first, sign, second


def _row(
    prompt: str, first: int, sign: str, second: int, teacher: Demonstrator, rng: random.Random
) -> Row:
    answer = first + SIGNS[sign] * second
    completion = teacher.demonstrate(first, sign, second, rng)
    return {"prompt": prompt, "answer": str(answer), "completion": completion}
