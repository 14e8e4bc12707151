"""Tools that are ready to be named in a recipe: a calculator, and a search in a text file."""

from __future__ import annotations

import ast
import math
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from litgrpo.arguments import at_least, require

MOST_CHARS = 200  # of an expression
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Compute a value from whole numbers, + - * / and parentheses.

    Args:
        expression: what to compute, such as (347 + 5) * 82

    Returns:
        The value: a whole number, or a decimal with ten digits.
    """
    require(len(expression) <= MOST_CHARS, f"an expression has at most {MOST_CHARS} characters")
    wrong = "not an expression of whole numbers, + - * / and parentheses"
    require(re.fullmatch(r"[\d+\-*/() ]*", expression, re.ASCII) is not None, wrong)
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
        case ast.Constant(value=int(number)):
            return Fraction(number)
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
    """Finds lines in a text file: a class for `make`, whose one tool is `search`.

    Args:
        path: the text file, UTF-8, one entry a line.
        most: lines that an answer has at most.
    """

    path: str
    most: int = 3

    def __post_init__(self) -> None:
        """Check that the file is there."""
        at_least("most", self.most, 1)
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
        best = sorted(scores, key=lambda place: (-scores[place], place))[: self.most]
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
