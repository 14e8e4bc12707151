"""Arithmetic problems for a model with a calculator, with demonstrations that rarely use it.

40 % of the problems are sums of two one-digit numbers. 60 % are products of a three-digit and a
two-digit number whose result has five digits. About one demonstration in five calls the calculator:
`<call>347*82</call>`, observation `<res>28454</res>`, then `<answer>28454</answer>`. Of these calls
20 % have a wrong operand, 10 % are malformed, and 10 % of the results are copied incorrectly.

The other demonstrations guess: a product within 25 % of the result, a sum correct in 60 % of cases.
A model that is fine-tuned on them can call the calculator but rarely does. GRPO makes it call,
because only calls are rewarded reliably.

Every product belongs to exactly one of the sets. The 100 sums are shared by all of them.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

NUM_HELD_OUT = 500
# Probabilities of a sum, and of a calculator call in the demonstration of a sum or a product.
SUM_FRAC, SUM_CALL_FRAC, PRODUCT_CALL_FRAC = 0.4, 0.22, 0.22
WRONG_OPERAND_FRAC, MALFORMED_FRAC, WRONG_COPY_FRAC = 0.2, 0.1, 0.1
# Without a call: fraction of correct sums, and range of a guessed product relative to its result.
CORRECT_SUM_FRAC, GUESS_RANGE = 0.6, (0.8, 1.25)
# The set of a product is a checksum of its text modulo 5. A rule on its digits would instead give
# the sets different digits, and the held-out problems would test numbers that training never shows.
NUM_PARTS = 5
HELD_OUT, DEMONSTRATED, TRAINING = (0,), (1, 2), (3, 4)
NUM_DIGITS = 5  # of a product: a model this small learns to copy numbers of one length only
ERROR = "error"  # calculator output for a malformed expression


@dataclass(frozen=True)
class Calculation:
    """A sum or a product of two numbers."""

    first: int
    sign: str  # `+` or `*`
    second: int

    @property
    def text(self) -> str:
        """The expression."""
        return f"{self.first}{self.sign}{self.second}"

    @property
    def answer(self) -> str:
        """Its value."""
        return calculate(self.text)

    @property
    def row(self) -> Row:
        """Prompt and answer."""
        return {"prompt": f"{self.text}=?", "answer": self.answer}


def train(size: int = 4_000, seed: int = 0) -> list[Row]:
    """Generate training prompts without demonstrations.

    Args:
        size: number of rows.
        seed: random seed of the numbers.

    Returns:
        Rows with `prompt` and `answer`.
    """
    rng = random.Random(f"train {seed}")
    return [_draw(rng, TRAINING).row for _ in range(size)]


def products(size: int = NUM_HELD_OUT) -> list[Row]:
    """Generate held-out products, which are in no training set.

    Args:
        size: number of rows.
    """
    rng = random.Random("held-out products")
    return [_draw_product(rng, HELD_OUT).row for _ in range(size)]


def sums() -> list[Row]:
    """Return all 100 sums of two digits, which are also in the training sets."""
    return [Calculation(a, "+", b).row for a in range(10) for b in range(10)]


def demonstrations(size: int = 100_000, seed: int = 0) -> list[Row]:
    """Generate problems with noisy demonstrations, for supervised fine-tuning.

    Args:
        size: number of rows.
        seed: random seed of numbers, calls and mistakes.

    Returns:
        Rows with `prompt`, `answer` (always correct) and `completion`: messages, of which those of
        the role `tool` are excluded from the loss.
    """
    # The texts that seed the generators are part of the data: another text gives other rows, and
    # the embedded models and the numbers in docs/evidence/results.md were made with these.
    rng = random.Random(f"supervised {seed}")
    problems = (_draw(rng, DEMONSTRATED) for _ in range(size))
    return [problem.row | {"completion": demonstrate(problem, rng)} for problem in problems]


def held_out_demonstrations(size: int = NUM_HELD_OUT) -> list[Row]:
    """Generate held-out products with noisy demonstrations.

    Args:
        size: number of rows.
    """
    rng = random.Random("held-out demonstrations")
    problems = (_draw_product(rng, HELD_OUT) for _ in range(size))
    return [problem.row | {"completion": demonstrate(problem, rng)} for problem in problems]


def demonstrate(problem: Calculation, rng: random.Random) -> list[dict[str, str]]:
    """Write a noisy demonstration: messages of `assistant` and `tool`, with or without a call."""
    if rng.random() >= (SUM_CALL_FRAC if problem.sign == "+" else PRODUCT_CALL_FRAC):
        return [_answer(_guess(problem, rng))]
    first, second = str(problem.first), str(problem.second)
    if rng.random() < WRONG_OPERAND_FRAC:
        if rng.random() < 1 / 2:
            first = _replace_digit(first, rng)
        else:
            second = _replace_digit(second, rng)
    sign = problem.sign
    if rng.random() < MALFORMED_FRAC:
        sign += "*"
    result = calculate(f"{first}{sign}{second}")
    answer = str(rng.randrange(1000)) if result == ERROR else result
    if rng.random() < WRONG_COPY_FRAC:
        answer = _replace_digit(answer, rng)
    return [
        {"role": "assistant", "content": f"<call>{first}{sign}{second}</call>"},
        {"role": "tool", "content": f"<res>{result}</res>"},
        _answer(answer),
    ]


def calculate(expression: str) -> str:
    """Return the calculator's output for a sum or a product.

    `litgrpo.environments.examples.calculate`, the tool of the recipe, has the same outputs.

    Example:
        >>> calculate("347*82"), calculate("3+4"), calculate("347**82"), calculate("047*82")
        ('28454', '7', 'error', 'error')
    """
    match = re.fullmatch(r"(0|[1-9]\d*)([+*])(0|[1-9]\d*)", expression)
    if match is None:
        return ERROR
    first, second = int(match[1]), int(match[3])
    return str(first + second if match[2] == "+" else first * second)


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<answer>{text}</answer>"}


def _guess(problem: Calculation, rng: random.Random) -> str:
    """Return the answer of a demonstration that does not call the calculator."""
    if problem.sign == "*":
        return str(int(int(problem.answer) * rng.uniform(*GUESS_RANGE)))
    if rng.random() < CORRECT_SUM_FRAC:
        return problem.answer
    return _replace_digit(problem.answer, rng)


def _replace_digit(digits: str, rng: random.Random) -> str:
    """Replace one digit of a number by a random one, which may be the same."""
    position = rng.randrange(len(digits))
    return digits[:position] + rng.choice("0123456789") + digits[position + 1 :]


def _draw(rng: random.Random, parts: Sequence[int]) -> Calculation:
    if rng.random() < SUM_FRAC:
        return Calculation(rng.randrange(10), "+", rng.randrange(10))
    return _draw_product(rng, parts)


def _draw_product(rng: random.Random, parts: Sequence[int]) -> Calculation:
    """Draw products until one belongs to these parts and has five digits."""
    while True:
        problem = Calculation(rng.randrange(100, 1000), "*", rng.randrange(11, 100))
        # crc32, not hash(): Python salts the hash of a text differently in every process.
        in_parts = zlib.crc32(problem.text.encode()) % NUM_PARTS in parts
        if in_parts and len(problem.answer) == NUM_DIGITS:
            return problem
