"""Tests of the completions that an audit scores."""

import random
from fractions import Fraction

from litgrpo.audit.cases import (
    CORRECT_KINDS,
    NASTY_PIECES,
    NEGATIVE,
    VARIANTS,
    AnswerFormat,
    Problem,
    correct_answers,
    format_number,
    group_digits,
    incorrect_answers,
    make_exploits,
    nasty_texts,
    write_malformed_answer,
)
from litgrpo.rewards.builtin.math import correctness
from litgrpo.text.answers import parse_number
from tests.support.cases import PROBLEMS
from tests.support.raises import raises_for


def test_every_variant_is_the_same_number() -> None:
    for number in map(Fraction, ("72", "1080", "-7", "0", "1234567", "5/4", "-12345/100")):
        for kind, render in VARIANTS.items():
            assert parse_number(render(number)) == number, kind


def test_variants_are_formatted_as_named() -> None:
    number = Fraction(-1080)
    shown = {kind: render(number) for kind, render in VARIANTS.items()}
    assert shown["commas and dollar sign"] == "-$1,080"
    assert shown["trailing zeros"] == "-1080.00"
    assert shown["Unicode minus"] == "\u22121080"
    assert shown["fraction"] == "-2160/2"
    assert shown["LaTeX fraction"] == r"-\frac{3240}{3}"
    assert group_digits(Fraction("1234.5"), ",") == "1,234.5"
    assert VARIANTS["trailing zeros"](Fraction("0.5")) == "0.50"


def test_correctness_accepts_variants_and_rejects_exploits() -> None:
    answer_format, rng = AnswerFormat(), random.Random(0)
    for problem in [*PROBLEMS, Problem("Where?", "Paris"), Problem("Nothing?", 0)]:
        for case in correct_answers(problem, answer_format):
            assert correctness(["?"], [case.completion], [case.answer]) == [1.0], case
        for case in make_exploits(problem, answer_format, rng):
            assert correctness(["?"], [case.completion], [case.answer]) == [0.0], case
        assert problem.reference not in incorrect_answers(problem)


def test_a_negated_problem_has_a_negated_reference_answer() -> None:
    cases = {case.kind: case for case in correct_answers(PROBLEMS[0], AnswerFormat())}
    assert cases[NEGATIVE].answer == "-12"
    assert "<answer>-12</answer>" in cases[NEGATIVE].completion
    cases = {case.kind: case for case in correct_answers(PROBLEMS[-1], AnswerFormat())}
    assert cases[NEGATIVE].answer == "7"


def test_the_reasoning_is_the_worked_solution_without_marks() -> None:
    assert PROBLEMS[0].reasoning == "She has 3*4=12 nuts."
    assert Problem("What is 3+4?", "7", solution="3+4=7").reasoning == "3+4=7"
    assert "3, 4" in Problem("What is 3+4?", "7").reasoning
    assert format_number(Fraction(1, 3)) == "1/3"


def test_numbers_are_written_with_as_few_digits_as_they_need() -> None:
    assert [format_number(Fraction(text)) for text in ("5/4", "-7", "0", "1/8")] == [
        *("1.25", "-7", "0", "0.125"),
    ]
    assert group_digits(Fraction(1, 3), ",") == "1/3"
    assert group_digits(Fraction(10**20), ",") == "100,000,000,000,000,000,000"
    assert group_digits(Fraction("0.00000001"), ",") == "0.00000001"


def test_kinds_are_unique_and_correct_kinds_hold_correct_answers() -> None:
    for problem in [PROBLEMS[0], Problem("Where?", "Paris")]:
        correct = [case.kind for case in correct_answers(problem, AnswerFormat())]
        incorrect = [case.kind for case in make_exploits(problem, AnswerFormat(), random.Random(0))]
        incorrect.append(write_malformed_answer(problem).kind)
        assert len({*correct, *incorrect}) == len(correct) + len(incorrect)
        assert CORRECT_KINDS.issuperset(correct)
        assert CORRECT_KINDS.isdisjoint(incorrect)


def test_nasty_texts_have_the_requested_length_and_are_tagged_once() -> None:
    texts = nasty_texts(1000)
    assert all(900 < len(texts[kind]) <= 1001 for kind in NASTY_PIECES)
    assert "digits, in tags" in texts
    assert "open tags, in tags" not in texts


def test_a_format_without_the_answer_raises() -> None:
    with raises_for("answer_format"):
        AnswerFormat("{reasoning}")
    assert AnswerFormat("{reasoning} #### {answer}").fill("so", " 7 ") == "so #### 7"
