"""Problems for a model with a calculator, demonstrated by a teacher who hardly ever uses it.

40 % are sums of two digits, 60 % products of a three-digit and a two-digit number, those of five
digits. The teacher calls the calculator, `<call>347*82</call>`, hears `<res>28454</res>` and says
`<answer>28454</answer>`, in about one of five problems, and not always well: 20 % of the calls have
a wrong operand, 10 % are malformed, 10 % of the results are copied wrongly. Otherwise it guesses: a
product within 25 % of the truth, a sum right in 60 % of cases. A model that imitates it knows how
to call, but hardly does; reinforcement learning finds out that calling pays.

The sets are disjoint by construction: a product of two numbers belongs to one of them. There are
only 100 sums, which all sets share.
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
SUMS, EASY_CALLS, HARD_CALLS = 0.4, 0.22, 0.22
WRONG_OPERAND, MALFORMED, WRONG_COPY = 0.2, 0.1, 0.1
RIGHT_SUMS, GUESS = 0.6, (0.8, 1.25)
# A product belongs to one of five parts by a checksum of its text, which knows nothing of digits.
PARTS = 5
HELD_OUT, TEACHER, TRAINING = (0,), (1, 2), (3, 4)
DIGITS = 5  # of a product; a model this small learns to copy numbers of one length
ERROR = "error"  # what the calculator answers where it cannot


@dataclass(frozen=True)
class Problem:
    """A sum or a product.

    Args:
        first, second: the numbers.
        sign: `+` or `*`.
    """

    first: int
    sign: str
    second: int

    @property
    def text(self) -> str:
        """The expression."""
        return f"{self.first}{self.sign}{self.second}"

    @property
    def answer(self) -> str:
        """Its value."""
        return heard(self.text)

    @property
    def row(self) -> Row:
        """Prompt and answer."""
        return {"prompt": f"{self.text}=?", "answer": self.answer}


def train(size: int = 4_000, seed: int = 0) -> list[Row]:
    """Problems to practice on, without demonstrations.

    Args:
        size: number of rows.
        seed: of the numbers.

    Returns:
        Rows with `prompt` and `answer`.
    """
    rng = random.Random(f"train {seed}")
    return [_problem(rng, TRAINING).row for _ in range(size)]


def products(size: int = NUM_HELD_OUT) -> list[Row]:
    """Held-out products, which nobody trains on.

    Args:
        size: number of rows.
    """
    rng = random.Random("held-out products")
    return [_product(rng, HELD_OUT).row for _ in range(size)]


def sums() -> list[Row]:
    """All sums of two digits; the model trains on them, too."""
    return [Problem(a, "+", b).row for a in range(10) for b in range(10)]


def supervised(size: int = 100_000, seed: int = 0) -> list[Row]:
    """Demonstrations of the teacher, to warm-start from.

    Args:
        size: number of rows.
        seed: of numbers, calls and mistakes.

    Returns:
        Rows with `prompt`, `answer` (always the right one) and `completion`: messages, of which
        those of the role `tool` are read and not learned.
    """
    rng = random.Random(f"supervised {seed}")
    problems = (_problem(rng, TEACHER) for _ in range(size))
    return [problem.row | {"completion": demonstrated(problem, rng)} for problem in problems]


def demonstrations(size: int = NUM_HELD_OUT) -> list[Row]:
    """Held-out products with the teacher's demonstrations.

    Args:
        size: number of rows.
    """
    rng = random.Random("held-out demonstrations")
    problems = (_product(rng, HELD_OUT) for _ in range(size))
    return [problem.row | {"completion": demonstrated(problem, rng)} for problem in problems]


def demonstrated(problem: Problem, rng: random.Random) -> list[dict[str, str]]:
    """What the teacher says, and hears, for a problem.

    Example:
        >>> said = demonstrated(Problem(347, "*", 82), random.Random(0))
        >>> [each["role"] for each in said]
        ['assistant']
    """
    if rng.random() >= (EASY_CALLS if problem.sign == "+" else HARD_CALLS):
        return [_answer(_guess(problem, rng))]
    first, second = str(problem.first), str(problem.second)
    if rng.random() < WRONG_OPERAND:
        if rng.random() < 1 / 2:
            first = _slip(first, rng)
        else:
            second = _slip(second, rng)
    sign = problem.sign + "*" * (rng.random() < MALFORMED)
    result = heard(f"{first}{sign}{second}")
    copied = result if result != ERROR else str(rng.randrange(1000))
    copied = _slip(copied, rng) if rng.random() < WRONG_COPY else copied
    return [
        {"role": "assistant", "content": f"<call>{first}{sign}{second}</call>"},
        {"role": "tool", "content": f"<res>{result}</res>"},
        _answer(copied),
    ]


def heard(expression: str) -> str:
    """What the calculator answers to a sum or a product.

    Example:
        >>> heard("347*82"), heard("3+4"), heard("347**82"), heard("047*82")
        ('28454', '7', 'error', 'error')
    """
    found = re.fullmatch(r"(0|[1-9]\d*)([+*])(0|[1-9]\d*)", expression)
    if found is None:
        return ERROR
    first, second = int(found[1]), int(found[3])
    return str(first + second if found[2] == "+" else first * second)


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<answer>{text}</answer>"}


def _guess(problem: Problem, rng: random.Random) -> str:
    """The teacher's answer without a calculator."""
    if problem.sign == "*":
        return str(int(int(problem.answer) * rng.uniform(*GUESS)))
    return problem.answer if rng.random() < RIGHT_SUMS else _slip(problem.answer, rng)


def _slip(digits: str, rng: random.Random) -> str:
    """The number with one digit drawn anew."""
    place = rng.randrange(len(digits))
    return digits[:place] + rng.choice("0123456789") + digits[place + 1 :]


def _problem(rng: random.Random, parts: Sequence[int]) -> Problem:
    if rng.random() < SUMS:
        return Problem(rng.randrange(10), "+", rng.randrange(10))
    return _product(rng, parts)


def _product(rng: random.Random, parts: Sequence[int]) -> Problem:
    """A product that belongs to one of these parts."""
    while True:
        problem = Problem(rng.randrange(100, 1000), "*", rng.randrange(11, 100))
        asked = zlib.crc32(problem.text.encode()) % PARTS in parts
        if asked and len(problem.answer) == DIGITS:
            return problem
