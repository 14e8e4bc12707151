"""Example environments for recipes: calculator, search in a text file, number guessing game."""

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

__all__ = ["NumberGame", "Search", "calculate"]

MAX_EXPRESSION_CHARS = 200  # exact fractions can grow with the length
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
    require(
        len(expression) <= MAX_EXPRESSION_CHARS,
        f"an expression has at most {MAX_EXPRESSION_CHARS} characters",
    )
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
    """Return the exact value of an expression; KeyError for any other kind of syntax."""
    match node:
        case ast.Constant(value=int(number) | float(number)):
            return Fraction(str(number))  # the decimal as written: Fraction(0.1) is not 1/10
        case ast.BinOp(left, op, right):
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op, operand):
            return SIGNS[type(op)](_value(operand))
    raise KeyError(type(node).__name__)


def _decimal(value: Fraction) -> str:
    return f"{value.numerator / value.denominator:.10g}"


@dataclass(frozen=True)
class Lines:
    """Non-empty lines of a text file, and an index of their words."""

    texts: list[str]
    places: dict[str, list[int]]  # {word: indices of the lines that contain it}


@dataclass
class Search:
    """Searches a text file: a class for `factory` with the tool `search`.

    Args:
        path: UTF-8 text file with one entry per line.
        max_results: maximal number of lines in a result.

    Example::

        Search("facts.txt").search("highest mountain")  # "Everest is the highest mountain."
    """

    path: str
    max_results: int = 3

    def __post_init__(self) -> None:
        at_least("max_results", self.max_results, 1)
        require(os.path.isfile(self.path), f"Search: path {self.path} does not exist.")

    def reset(self, **columns: Any) -> None:
        """Begin an episode; the search has no state."""

    def search(self, words: str) -> str:
        """Find the lines that have the most in common with some words.

        Args:
            words: what to look for
        """
        file = os.path.abspath(self.path)
        lines = _lines(file, os.stat(file).st_mtime_ns)
        # Inverse document frequency: a word that n of N lines contain scores log(1 + N / n), once
        # per line.
        scores: dict[int, float] = {}
        for word in sorted(set(_words(words))):
            numbers = lines.places.get(word, [])
            for number in numbers:
                more = math.log1p(len(lines.texts) / len(numbers))
                scores[number] = scores.get(number, 0.0) + more
        best = sorted(scores, key=lambda number: (-scores[number], number))[: self.max_results]
        return "\n".join(lines.texts[number] for number in best) or "nothing found"


@lru_cache(maxsize=4)
def _lines(file: str, changed: int) -> Lines:
    """Read and index a file; `changed` is part of the cache key, so changes are read again."""
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
    """Guess a number that the seed selects: an environment without data, for tests and first runs.

    The last integer of a turn is the guess. A correct guess has reward 1, any other turn 0. The
    state is (least possible number, greatest possible number, remaining guesses). Logs
    `contradicted`: 1 if earlier observations exclude the guess.

    Args:
        minimum: least number.
        maximum: greatest number.
        max_guesses: turns of a game, including those without a number.
        opening: text at the end of the prompt; {minimum}, {maximum} and {max_guesses} are replaced.
        low: observation after a guess that is too low.
        high: observation after a guess that is too high.
        invalid: observation after a turn without a number in the range; counts as a failed call.

    Example:
        >>> game = NumberGame(minimum=3, maximum=3)
        >>> game.reset({}, seed=0)
        ''
        >>> game.step("2").observation, game.step("3").reward
        ('<invalid>', 1.0)
    """

    minimum: int = 1
    maximum: int = 15
    max_guesses: int = 4
    opening: str = ""
    low: str = "<low>"
    high: str = "<high>"
    invalid: str = "<invalid>"

    def __post_init__(self) -> None:
        at_least("max_guesses", self.max_guesses, 1)
        at_least("maximum", self.maximum, self.minimum)

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Select the number; see `Environment.reset`."""
        self._number = random.Random(seed).randint(self.minimum, self.maximum)
        self._possible, self._left = (self.minimum, self.maximum), self.max_guesses
        text = self.opening
        for name in ("minimum", "maximum", "max_guesses"):
            text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        return text

    def step(self, action: str) -> StepResult:
        """Answer a guess; see `Environment.step`."""
        self._left -= 1
        least, greatest = self._possible
        numbers = re.findall(r"-?\d{1,18}", after_thoughts(action), re.ASCII)
        guess = int(numbers[-1]) if numbers else None
        if guess is None or not self.minimum <= guess <= self.maximum:
            return self._result(self.invalid, failed=True)
        contradicted = not least <= guess <= greatest
        if guess < self._number:
            self._possible = (max(least, guess + 1), greatest)
        if guess > self._number:
            self._possible = (least, min(greatest, guess - 1))
        if guess == self._number:
            self._possible, self._left = (guess, guess), 0
        answer = self.low if guess < self._number else self.high
        return self._result(answer, won=guess == self._number, contradicted=contradicted)

    def _result(
        self,
        observation: str,
        *,
        won: bool = False,
        failed: bool = False,
        contradicted: bool = False,
    ) -> StepResult:
        """Return a step result with the current state."""
        return StepResult(
            observation="" if won else observation,
            reward=float(won),
            done=won or self._left == 0,
            state=(*self._possible, self._left),
            log={"contradicted": float(contradicted)},
            calls={"guess": (1, int(failed))},
        )
