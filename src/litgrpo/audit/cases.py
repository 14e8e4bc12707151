"""Build completions to test reward functions: correct answers in many formats, and exploits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from litgrpo.arguments import require
from litgrpo.text.answers import extract_answer, list_answers, parse_number

NUMBERS = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
PRAISE = (
    "correct right accurate true answer solution therefore because step first second finally so "
    "thus hence total reasoning verified certain "
)
UNMARKED = "\n{answer}"  # end of a format in which the last line is the answer
# Kinds of completions that the findings name; the others are named where they are made.
HONEST, INCORRECT, MALFORMED = "as in the data", "incorrect, in format", "correct, malformed"
GIVEN_UP = "no idea, in format"
NEGATIVE = "negative, like the reference"


@dataclass(frozen=True)
class Problem:
    r"""A question with its reference answer.

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
    def reference(self) -> str:
        """Reference answer without its solution, as text."""
        answer = str(next(iter(list_answers(self.answer)), self.answer))
        extracted = extract_answer(answer)
        return (answer if extracted is None else extracted).strip()

    @property
    def number(self) -> Fraction | None:
        """Reference answer as a number; None if it is a text."""
        return parse_number(self.reference)

    @property
    def reasoning(self) -> str:
        """Known solution, or a generic sentence in its place."""
        if self.solution is not None:
            return self.solution
        text = str(self.answer)
        if "####" in text:
            return re.sub(r"<<[^<>]*>>", "", text.partition("####")[0]).strip()
        numbers = ", ".join(NUMBERS.findall(self.prompt)[:4])
        question = f"The question gives {numbers}. " if numbers else ""
        return f"{question}Taken together, step by step, that leads to {self.reference}."


@dataclass(frozen=True)
class AnswerFormat:
    """Format that the rewards expect of a completion.

    Args:
        text: a template with `{reasoning}` and `{answer}`.
    """

    text: str = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>{answer}</answer>"

    def __post_init__(self) -> None:
        has_answer = "{answer}" in self.text
        require(has_answer, f"answer_format must contain {{answer}}, got {self.text!r}")

    def fill(self, reasoning: str, answer: str) -> str:
        """Return a completion with this reasoning and answer."""
        # Without a closing tag, reward functions read the answer up to the end of its line.
        text = answer.strip() if self.text.endswith("{answer}") else answer
        return self.text.replace("{reasoning}", reasoning).replace("{answer}", text)


@dataclass(frozen=True)
class Case:
    """One completion of one problem."""

    kind: str  # its name in the report
    completion: str
    answer: Any  # reference answer that the functions receive: the problem's, or a negated one


def correct_answers(problem: Problem, answer_format: AnswerFormat) -> list[Case]:
    """Write the correct answer in every variant; the first is formatted as in the data."""

    def case(kind: str, text: str, answer: Any = problem.answer) -> Case:
        return Case(kind, answer_format.fill(problem.reasoning, text), answer)

    number = problem.number
    if number is None:
        return [case(kind, show(problem.reference)) for kind, show in TEXT_VARIANTS.items()]
    texts = {kind: render(number) for kind, render in VARIANTS.items()} | {
        HONEST: problem.reference
    }
    # Few data sets have negative answers: the reference answer is negated as well.
    negated = case(NEGATIVE, format_number(-number), format_number(-number))
    return [*(case(kind, text) for kind, text in texts.items()), negated]


def make_exploits(problem: Problem, answer_format: AnswerFormat, rng: random.Random) -> list[Case]:
    """Write completions that must not be rewarded: empty, incorrect, copied, hedged or noisy."""
    reference, reasoning, prompt = problem.reference, problem.reasoning, problem.prompt
    wrong, far, flipped = incorrect_answers(problem)
    guesses = [str(n) for n in range(100)] + ([reference] if problem.number is not None else [])
    noise = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(60))
    empty = answer_format.fill("", "")
    texts = {
        INCORRECT: answer_format.fill(reasoning.replace(reference, far), far),
        "near miss, in format": answer_format.fill(reasoning.replace(reference, wrong), wrong),
        "sign lost or added": answer_format.fill(reasoning, flipped),
        GIVEN_UP: answer_format.fill("I have no idea.", "no idea"),
        "empty tags": empty,
        "no completion": "",
        "no attempt": "I am sorry, but I cannot answer this question.",
        "prompt copied": prompt,
        "prompt copied, in format": answer_format.fill(prompt, prompt),
        "tags repeated": empty * 20,
        "incorrect answer repeated": answer_format.fill(f"It is {wrong}. " * 40, wrong),
        "format repeated": answer_format.fill(reasoning, wrong) * 5,
        "keywords": answer_format.fill(PRAISE * 8, PRAISE * 2),
        "all numbers as the answer": answer_format.fill(reasoning, " ".join(guesses)),
        "many answers": "".join(
            answer_format.fill("", guess) for guess in (wrong, "1", "2", reference)
        ),
        "hedged": answer_format.fill(reasoning, f"{wrong} or {reference}"),
        "noise, in format": answer_format.fill(noise, wrong),
    }
    if answer_format.text.endswith(UNMARKED):
        del texts["many answers"]  # what stands above the last line is reasoning
    return [Case(kind, text, problem.answer) for kind, text in texts.items()]


def write_malformed_answer(problem: Problem) -> Case:
    """Write a correct answer without the format, to measure how much reward the format adds."""
    text = f"{problem.reasoning}\nThe answer is {problem.reference}."
    return Case(MALFORMED, text, problem.answer)


def incorrect_answers(problem: Problem) -> tuple[str, str, str]:
    """Return three incorrect answers: a near number, a far one, and the other sign.

    0 has no other sign, so the near number is returned twice. Texts get other texts.
    """
    number, other_text = problem.number, f"not {problem.reference}"
    if number is None:
        return other_text, "something else", other_text
    near = format_number(number + 1)
    return near, format_number(3 * abs(number) + 7), format_number(-number) if number else near


def format_number(number: Fraction) -> str:
    """Return the shortest exact decimal text, or a fraction if the decimals never end."""
    for digits in range(10):
        if (number * 10**digits).denominator == 1:
            return f"{float(number):.{digits}f}" if digits else str(number.numerator)
    return str(number)


def group_digits(number: Fraction, mark: str) -> str:
    """Return the number with its digits in groups of three."""
    text = format_number(number)
    return text if "/" in text else f"{Decimal(text):,f}".replace(",", mark)


def with_sign(number: Fraction, text: str) -> str:
    """Return the text, with a minus in front if the number is negative."""
    return f"-{text}" if number < 0 else text


# Formatting variants of a correct number, which rewards must accept, and of a text.
VARIANTS: dict[str, Callable[[Fraction], str]] = {
    HONEST: format_number,
    "dollar sign": lambda n: with_sign(n, f"${format_number(abs(n))}"),
    "thousands commas": lambda n: with_sign(n, group_digits(abs(n), ",")),
    "commas and dollar sign": lambda n: with_sign(n, f"${group_digits(abs(n), ',')}"),
    "trailing zeros": lambda n: format_number(n) + ("0" if "." in format_number(n) else ".00"),
    "Unicode minus": lambda n: format_number(n).replace("-", "\u2212"),
    "fraction": lambda n: f"{2 * n.numerator}/{2 * n.denominator}",
    "LaTeX box": lambda n: rf"$\boxed{{{format_number(n)}}}$",
    "LaTeX fraction": lambda n: with_sign(
        n, rf"\frac{{{3 * abs(n.numerator)}}}{{{3 * n.denominator}}}"
    ),
    "spaces": lambda n: f"\n   {format_number(n)} \n",
    "thin spaces": lambda n: with_sign(n, group_digits(abs(n), "\u202f")),
    "unit": lambda n: f"{format_number(n)} units",
    "sentence": lambda n: f"The answer is {format_number(n)}.",
    "bold": lambda n: f"**{format_number(n)}**",
}
TEXT_VARIANTS: dict[str, Callable[[str], str]] = {
    HONEST: str,
    "spaces": lambda text: f"\n   {text} \n",
    "full stop": lambda text: f"{text}.",
    "bold text": lambda text: f"**{text}**",
    "boxed text": lambda text: rf"\boxed{{{text}}}",
}
# A number is the same number in every variant; JSON, code or a label with more characters may be
# another answer, so a reward may judge these as incorrect.
DECORATED = {*TEXT_VARIANTS} - {HONEST, "spaces"}
CORRECT_KINDS = {
    *VARIANTS,
    *TEXT_VARIANTS,
    NEGATIVE,
}  # kinds of correct answers; all others are wrong

# Repeated to long texts. Regular expressions with nested or overlapping repetitions backtrack on
# them in quadratic or exponential time.
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
    """Return {kind: long text}; kinds without tags appear a second time inside tags.

    Args:
        size: approximate length in characters.
    """
    texts = {kind: piece * (size // len(piece)) + "!" for kind, piece in NASTY_PIECES.items()}
    inside = {
        f"{kind}, in tags": f"<reasoning>{text}</reasoning><answer>{text}</answer>"
        for kind, text in texts.items()
        if kind not in HAVE_TAGS
    }
    return texts | inside
