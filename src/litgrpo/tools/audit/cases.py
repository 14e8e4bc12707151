"""Completions to test reward functions with: correct answers in many variants, ways to cheat."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import extract_answer, parse_number

NUMBERS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
PRAISE = (
    "correct right accurate true answer solution therefore because step first second finally so "
    "thus hence total reasoning verified certain "
)
# Kinds of completions that the findings name; the others are named where they are made.
HONEST, WRONG, MALFORMED = "as in the data", "wrong, in format", "right, malformed"
GIVEN_UP = "no idea, in format"
NEGATIVE = "minus (gold negated)"


@dataclass(frozen=True)
class Problem:
    """A question with its reference answer.

    Args:
        prompt: the prompt.
        answer: the reference answer as the reward functions get it: a number, a text, or a worked
            solution that ends in `#### 72`.
        columns: {name: value} of the other columns.
        solution: reasoning that leads to the answer, if it is known.
    """

    prompt: str
    answer: Any
    columns: Mapping[str, Any] = field(default_factory=dict)
    solution: str | None = None

    @property
    def gold(self) -> str:
        """The answer alone, as text."""
        found = extract_answer(str(self.answer))
        return (str(self.answer) if found is None else found).strip()

    @property
    def number(self) -> Fraction | None:
        """The answer as a number, if it is one."""
        return parse_number(self.gold)

    @property
    def reasoning(self) -> str:
        """The known solution, or a sentence that pretends to one."""
        if self.solution is not None:
            return self.solution
        text = str(self.answer)
        if "####" in text:
            return re.sub(r"<<[^<>]*>>", "", text.partition("####")[0]).strip()
        given = ", ".join(NUMBERS.findall(self.prompt)[:4])
        named = f"The question gives {given}. " if given else ""
        return f"{named}Taken together, step by step, that leads to {self.gold}."


@dataclass(frozen=True)
class AnswerFormat:
    """How the rewards want a completion to look.

    Args:
        text: a text with `{reasoning}` and `{answer}`.
    """

    text: str = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>{answer}</answer>"

    def __post_init__(self) -> None:
        """Check that the answer has a place."""
        found = "{answer}" in self.text
        require(found, f"the form of a completion must contain {{answer}}, got {self.text!r}")

    def fill(self, reasoning: str, answer: str) -> str:
        """A completion; an answer at its end, without a closing tag, stays on its line."""
        shown = answer.strip() if self.text.endswith("{answer}") else answer
        return self.text.replace("{reasoning}", reasoning).replace("{answer}", shown)


@dataclass(frozen=True)
class Case:
    """One completion of one problem."""

    kind: str  # its name in the report
    completion: str
    answer: Any  # the reference answer that the functions are told: the problem's, or a negated one


def correct_answers(problem: Problem, form: AnswerFormat) -> list[Case]:
    """A correct answer in every variant; the first is what the data set itself calls the answer.

    Args:
        problem: with its reference answer.
        form: where the answer stands.
    """

    def case(kind: str, shown: str, gold: Any = problem.answer) -> Case:
        return Case(kind, form.fill(problem.reasoning, shown), gold)

    number = problem.number
    if number is None:
        return [case(kind, show(problem.gold)) for kind, show in TEXT_VARIANTS.items()]
    shown = {kind: render(number) for kind, render in VARIANTS.items()} | {HONEST: problem.gold}
    # Few data sets have negative answers: the reference answer is negated as well.
    negated = case(NEGATIVE, plain(-number), plain(-number))
    return [*(case(kind, text) for kind, text in shown.items()), negated]


def make_exploits(problem: Problem, form: AnswerFormat, rng: random.Random) -> list[Case]:
    """Completions that answer nothing, or wrongly, or everything at once.

    Args:
        problem: with its reference answer.
        form: where the answer stands.
        rng: for the noise.
    """
    gold, reasoning, prompt = problem.gold, problem.reasoning, problem.prompt
    wrong, far, flipped = incorrect_answers(problem)
    guesses = [str(n) for n in range(100)] + ([gold] if problem.number is not None else [])
    noise = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(60))
    empty = form.fill("", "")
    texts = {
        WRONG: form.fill(reasoning.replace(gold, far), far),
        "near miss, in format": form.fill(reasoning.replace(gold, wrong), wrong),
        "sign lost or added": form.fill(reasoning, flipped),
        GIVEN_UP: form.fill("I have no idea.", "no idea"),
        "empty tags": empty,
        "no completion": "",
        "refusal": "I am sorry, but I cannot answer this question.",
        "prompt copied": prompt,
        "prompt copied, in format": form.fill(prompt, prompt),
        "tags repeated": empty * 20,
        "incorrect answer repeated": form.fill(f"It is {wrong}. " * 40, wrong),
        "form repeated": form.fill(reasoning, wrong) * 5,
        "keywords": form.fill(PRAISE * 8, PRAISE * 2),
        "all numbers as the answer": form.fill(reasoning, " ".join(guesses)),
        "many answers": "".join(form.fill("", guess) for guess in (wrong, "1", "2", gold)),
        "hedged": form.fill(reasoning, f"{wrong} or {gold}"),
        "noise, in format": form.fill(noise, wrong),
    }
    return [Case(kind, text, problem.answer) for kind, text in texts.items()]


def malformed_answer(problem: Problem) -> Case:
    """A correct answer that ignores the form: not an exploit, but it shows what form is worth."""
    text = f"{problem.reasoning}\nThe answer is {problem.gold}."
    return Case(MALFORMED, text, problem.answer)


def incorrect_answers(problem: Problem) -> tuple[str, str, str]:
    """Three incorrect answers: a number near the right one, one far from it, the other sign.

    For 0 there is no other sign, for texts there are no numbers: other incorrect answers instead.
    """
    number, other_text = problem.number, f"not {problem.gold}"
    if number is None:
        return other_text, "something else", other_text
    near = plain(number + 1)
    return near, plain(3 * abs(number) + 7), plain(-number) if number else near


def plain(number: Fraction) -> str:
    """Digits, with as few decimals as it needs, or a fraction where they never end.

    Example:
        >>> plain(Fraction(5, 4)), plain(Fraction(1, 3)), plain(Fraction(-7))
        ('1.25', '1/3', '-7')
    """
    for digits in range(10):
        if (number * 10**digits).denominator == 1:
            return f"{float(number):.{digits}f}" if digits else str(number.numerator)
    return str(number)


def grouped(number: Fraction, mark: str) -> str:
    """Digits in groups of three.

    Example:
        >>> grouped(Fraction(12345), ",")
        '12,345'
    """
    text = plain(number)
    return text if "/" in text else f"{Decimal(text):,f}".replace(",", mark)


def signed(number: Fraction, text: str) -> str:
    """The text with a minus in front where the number is negative."""
    return f"-{text}" if number < 0 else text


# How a correct answer may look. Each must be accepted.
VARIANTS: dict[str, Callable[[Fraction], str]] = {
    HONEST: plain,
    "dollar sign": lambda n: signed(n, f"${plain(abs(n))}"),
    "thousands commas": lambda n: signed(n, grouped(abs(n), ",")),
    "commas and dollar sign": lambda n: signed(n, f"${grouped(abs(n), ',')}"),
    "trailing zeros": lambda n: plain(n) + ("0" if "." in plain(n) else ".00"),
    "Unicode minus": lambda n: plain(n).replace("-", "\u2212"),
    "fraction": lambda n: f"{2 * n.numerator}/{2 * n.denominator}",
    "LaTeX box": lambda n: rf"$\boxed{{{plain(n)}}}$",
    "LaTeX fraction": lambda n: signed(
        n, rf"\frac{{{3 * abs(n.numerator)}}}{{{3 * n.denominator}}}"
    ),
    "spaces": lambda n: f"\n   {plain(n)} \n",
    "thin spaces": lambda n: signed(n, grouped(abs(n), "\u202f")),
    "unit": lambda n: f"{plain(n)} units",
    "sentence": lambda n: f"The answer is {plain(n)}.",
    "bold": lambda n: f"**{plain(n)}**",
}
TEXT_VARIANTS: dict[str, Callable[[str], str]] = {
    HONEST: str,
    "spaces": lambda text: f"\n   {text} \n",
    "full stop": lambda text: f"{text}.",
    "bold": lambda text: f"**{text}**",
    "LaTeX box": lambda text: rf"\boxed{{{text}}}",
}
RIGHT = {*VARIANTS, *TEXT_VARIANTS, NEGATIVE}  # kinds of correct answers; all others are wrong

# Of each, a long text is made on which careless regular expressions never end.
NASTY_PIECES = {
    "one letter": "a",
    "letters and an end": "ab",
    "digits": "1",
    "spaces": " ",
    "line breaks": "\n",
    "numbers and commas": "1,",
    "decimals": "1.",
    "sums": "1+1",
    "equations": "12 + 3 = 15 ",
    "open tags": "<answer>",
    "open reasoning": "<reasoning> a",
    "closed tags": "</answer>",
    "braces": "{",
    "LaTeX": r"\frac{1}{",
    "words": "so it is ",
}
HAVE_TAGS = {"open tags", "open reasoning", "closed tags"}


def nasty_texts(size: int) -> dict[str, str]:
    """Long texts of one kind each, and those without tags once more inside tags.

    Args:
        size: characters, about.
    """
    texts = {kind: piece * (size // len(piece)) + "!" for kind, piece in NASTY_PIECES.items()}
    inside = {
        f"{kind}, in tags": f"<reasoning>{text}</reasoning><answer>{text}</answer>"
        for kind, text in texts.items()
        if kind not in HAVE_TAGS
    }
    return texts | inside
