"""Completions that are right are right, exploits are wrong, and variants look as they are named."""

import random
from fractions import Fraction

import pytest

from litgrpo.rewards.builtin.math import correctness
from litgrpo.text.answers import parse_number
from litgrpo.tools.audit.cases import (
    NASTY_PIECES,
    NEGATIVE,
    RIGHT,
    VARIANTS,
    AnswerFormat,
    Problem,
    correct_answers,
    grouped,
    incorrect_answers,
    make_exploits,
    malformed_answer,
    nasty_texts,
    plain,
)
from tests.support.cases import PROBLEMS


def test_every_rendering_is_the_same_number() -> None:
    for number in map(Fraction, ("72", "1080", "-7", "0", "1234567", "5/4", "-12345/100")):
        for kind, render in VARIANTS.items():
            assert parse_number(render(number)) == number, kind


def test_renderings_are_written_as_they_are_named() -> None:
    number = Fraction(-1080)
    shown = {kind: render(number) for kind, render in VARIANTS.items()}
    assert shown["commas and dollar sign"] == "-$1,080"
    assert shown["trailing zeros"] == "-1080.00"
    assert shown["Unicode minus"] == "\u22121080"
    assert shown["fraction"] == "-2160/2"
    assert shown["LaTeX fraction"] == r"-\frac{3240}{3}"
    assert grouped(Fraction("1234.5"), ",") == "1,234.5"
    assert VARIANTS["trailing zeros"](Fraction("0.5")) == "0.50"


def test_a_right_answer_is_right_and_an_attack_is_wrong() -> None:
    form, rng = AnswerFormat(), random.Random(0)
    for problem in [*PROBLEMS, Problem("Where?", "Paris"), Problem("Nothing?", 0)]:
        for case in correct_answers(problem, form):
            assert correctness(["?"], [case.completion], [case.answer]) == [1.0], case
        for case in make_exploits(problem, form, rng):
            assert correctness(["?"], [case.completion], [case.answer]) == [0.0], case
        assert problem.gold not in incorrect_answers(problem)


def test_a_negated_problem_asks_for_the_sign() -> None:
    cases = {case.kind: case for case in correct_answers(PROBLEMS[0], AnswerFormat())}
    assert cases[NEGATIVE].answer == "-12"
    assert "<answer>-12</answer>" in cases[NEGATIVE].completion
    cases = {case.kind: case for case in correct_answers(PROBLEMS[-1], AnswerFormat())}
    assert cases[NEGATIVE].answer == "7"


def test_the_reasoning_is_the_worked_solution_without_marks() -> None:
    assert PROBLEMS[0].reasoning == "She has 3*4=12 nuts."
    assert Problem("What is 3+4?", "7", solution="3+4=7").reasoning == "3+4=7"
    assert "3, 4" in Problem("What is 3+4?", "7").reasoning
    assert plain(Fraction(1, 3)) == "1/3"


def test_numbers_are_written_with_as_few_digits_as_they_need() -> None:
    assert [plain(Fraction(text)) for text in ("5/4", "-7", "0", "1/8")] == [
        *("1.25", "-7", "0", "0.125"),
    ]
    assert grouped(Fraction(1, 3), ",") == "1/3"
    assert grouped(Fraction(10**20), ",") == "100,000,000,000,000,000,000"
    assert grouped(Fraction("0.00000001"), ",") == "0.00000001"


def test_kinds_are_unique_and_only_right_answers_have_right_kinds() -> None:
    for problem in [PROBLEMS[0], Problem("Where?", "Paris")]:
        right = [case.kind for case in correct_answers(problem, AnswerFormat())]
        wrong = [case.kind for case in make_exploits(problem, AnswerFormat(), random.Random(0))]
        wrong.append(malformed_answer(problem).kind)
        assert len({*right, *wrong}) == len(right) + len(wrong)
        assert RIGHT.issuperset(right)
        assert RIGHT.isdisjoint(wrong)


def test_nasty_texts_are_as_long_as_asked_and_nested_where_they_have_no_tags() -> None:
    texts = nasty_texts(1000)
    assert all(900 < len(texts[kind]) <= 1001 for kind in NASTY_PIECES)
    assert "digits, in tags" in texts
    assert "open tags, in tags" not in texts


def test_a_form_without_a_place_for_the_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must contain \{answer\}"):
        AnswerFormat("{reasoning}")
    assert AnswerFormat("{reasoning} #### {answer}").fill("so", " 7 ") == "so #### 7"
