"""Ready to be named in a recipe: a calculator, a search in a text file, and a game of numbers."""

from __future__ import annotations

import ast
import math
import operator
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from litgrpo.arguments import at_least, require
from litgrpo.environments.base import StepResult
from litgrpo.environments.tool_calls import after_thoughts

MOST_CHARS = 200  # of an expression
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Compute a value from numbers, + - * / and parentheses.

    Args:
        expression: what to compute, such as (347 + 0.5) * 82

    Returns:
        The value: a whole number, or a decimal with ten digits.
    """
    require(len(expression) <= MOST_CHARS, f"an expression has at most {MOST_CHARS} characters")
    wrong = "not an expression of numbers, + - * / and parentheses"
    require(re.fullmatch(r"[\d+\-*/(). ]*", expression, re.ASCII) is not None, wrong)
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (SyntaxError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError(wrong) from error
    return str(value.numerator) if value.denominator == 1 else _decimal(value)


def _value(node: ast.AST) -> Fraction:
    """The value of an expression; exact.

    Raises:
        KeyError: something else is in it.
    """
    match node:
        case ast.Constant(value=int(number) | float(number)):
            return Fraction(str(number))  # a decimal as it is written, not as it is rounded
        case ast.BinOp(left, op, right):
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand):
            return SIGNS[type(op)](_value(operand))
    raise KeyError(type(node).__name__)


def _decimal(value: Fraction) -> str:
    return f"{value.numerator / value.denominator:.10g}"


@dataclass(frozen=True)
class Lines:
    """The lines of a text file, and in which of them words stand.

    Args:
        texts: the lines that are not empty.
        places: {word: numbers of its lines}.
    """

    texts: list[str]
    places: dict[str, list[int]]


@dataclass
class Search:
    """Finds lines in a text file: a class for `factory`, whose one tool is `search`.

    Args:
        path: the text file, UTF-8, one entry a line.
        max_results: lines that an answer has at most.
    """

    path: str
    max_results: int = 3

    def __post_init__(self) -> None:
        """Check that the file is there."""
        at_least("max_results", self.max_results, 1)
        require(os.path.isfile(self.path), f"Search: there is no file {self.path}.")

    def reset(self, **columns: Any) -> None:
        """Nothing is kept between calls."""

    def search(self, words: str) -> str:
        """Find the lines that have the most in common with some words.

        Args:
            words: what to look for
        """
        file = os.path.abspath(self.path)
        lines = _lines(file, os.stat(file).st_mtime_ns)
        # A word that stands in n of N lines counts log(1 + N / n), once for each line.
        scores: dict[int, float] = {}
        for word in sorted(set(_words(words))):
            found = lines.places.get(word, [])
            for place in found:
                more = math.log1p(len(lines.texts) / len(found))
                scores[place] = scores.get(place, 0.0) + more
        best = sorted(scores, key=lambda place: (-scores[place], place))[: self.max_results]
        return "\n".join(lines.texts[place] for place in best) or "nothing found"


@lru_cache(maxsize=4)
def _lines(file: str, changed: int) -> Lines:
    """The lines of a file; it is read again when it has changed."""
    with open(file, encoding="utf-8") as opened:
        texts = [line.strip() for line in opened if line.strip()]
    places: dict[str, list[int]] = {}
    for number, text in enumerate(texts):
        for word in sorted(set(_words(text))):
            places.setdefault(word, []).append(number)
    return Lines(texts, places)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


@dataclass
class NumberGame:
    """Find a number that the seed chose: an environment without data, for tests and first runs.

    A turn's last whole number is the guess. Its state is what the guesses have left: the least and
    the greatest number that are possible, and the tries. Logged: `contradicted`, 1 for a guess that
    the answers before exclude. A right guess pays 1, anything else 0.

    Args:
        minimum: the least number.
        maximum: the greatest number.
        max_guesses: turns of a game, also those without a number.
        opening: text at the end of the prompt; {minimum}, {maximum} and {max_guesses} are replaced.
        low: what is heard after a guess that is too low.
        high: after one that is too high.
        invalid: after a turn without a number from least to greatest; it counts as a failed call.
    """

    minimum: int = 1
    maximum: int = 15
    max_guesses: int = 4
    opening: str = ""
    low: str = "<low>"
    high: str = "<high>"
    invalid: str = "<invalid>"

    def __post_init__(self) -> None:
        """Check the range."""
        at_least("max_guesses", self.max_guesses, 1)
        at_least("maximum", self.maximum, self.minimum)

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Choose the number; see `Environment.reset`."""
        self._number = random.Random(seed).randint(self.minimum, self.maximum)
        self._possible, self._left = (self.minimum, self.maximum), self.max_guesses
        text = self.opening
        for name in ("minimum", "maximum", "max_guesses"):
            text = text.replace(f"{{{name}}}", str(vars(self)[name]))
        return text

    def step(self, action: str) -> StepResult:
        """Answer a guess; see `Environment.step`."""
        self._left -= 1
        least, greatest = self._possible
        numbers = re.findall(r"-?\d{1,18}", after_thoughts(action), re.ASCII)
        guess = int(numbers[-1]) if numbers else None
        if guess is None or not self.minimum <= guess <= self.maximum:
            return self._heard(self.invalid, failed=True)
        contradicted = not least <= guess <= greatest
        if guess < self._number:
            self._possible = (max(least, guess + 1), greatest)
        if guess > self._number:
            self._possible = (least, min(greatest, guess - 1))
        if guess == self._number:
            self._possible, self._left = (guess, guess), 0
        answer = self.low if guess < self._number else self.high
        return self._heard(answer, won=guess == self._number, contradicted=contradicted)

    def _heard(
        self, said: str, *, won: bool = False, failed: bool = False, contradicted: bool = False
    ) -> StepResult:
        """An answer with the state that it leaves."""
        return StepResult(
            observation="" if won else said,
            reward=float(won),
            done=won or self._left == 0,
            state=(*self._possible, self._left),
            log={"contradicted": float(contradicted)},
            calls={"guess": (1, int(failed))},
        )
