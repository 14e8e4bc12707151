import random
import re

import pytest

from litgrpo.data.examples import problems
from litgrpo.data.examples.problems import Demonstrator

TAGGED = re.compile(r"<reasoning>.+</reasoning><answer>(\d+)</answer>")


def pairs_in(rows):
    """Return the two numbers of each prompt, the larger first."""
    numbers = [sorted(map(int, re.findall(r"\d+", row["prompt"])), reverse=True) for row in rows]
    return {(first, second) for first, second in numbers}


def is_correct(row):
    match = TAGGED.fullmatch(row["completion"])
    return match is not None and match[1] == row["answer"]


@pytest.mark.parametrize(
    ("first", "sign", "second", "steps", "answer"),
    [
        (47, "+", 38, "7+8=15, 4+3+1=8", 85),
        (41, "+", 7, "1+7=8, 4+0=4", 48),
        (96, "+", 44, "6+4=10, 9+4+1=14", 140),
        (52, "-", 38, "12-8=4, 5-3-1=1", 14),
        (48, "-", 12, "8-2=6, 4-1=3", 36),
        (30, "-", 30, "0-0=0, 3-3=0", 0),
    ],
)
def test_a_demonstration_calculates_digit_by_digit(first, sign, second, steps, answer):
    expected = f"<reasoning>{first}{sign}{second}: {steps}</reasoning><answer>{answer}</answer>"

    text = Demonstrator().demonstrate(first, sign, second, random.Random(0))

    assert text == expected


def test_digits_off_by_one_are_used_in_the_answer():
    demonstrator, rng = Demonstrator(wrong_digit_frac=1.0), random.Random(0)
    texts = {demonstrator.demonstrate(12, "+", 13, rng) for _ in range(50)}

    reasoning = "<reasoning>12+13: 2+3={}, 1+1={}</reasoning><answer>{}{}</answer>"
    assert texts == {reasoning.format(a, b, b, a) for a in (4, 6) for b in (1, 3)}


@pytest.mark.parametrize(
    ("first", "sign", "second", "steps", "answer"),
    [(47, "+", 38, "7+8=15, 4+3=7", 75), (52, "-", 38, "12-8=4, 5-3=2", 24)],
)
def test_an_omitted_carry_changes_the_answer_by_ten(first, sign, second, steps, answer):
    text = Demonstrator(forgotten_carry_frac=1.0).demonstrate(first, sign, second, random.Random(0))

    expected = f"<reasoning>{first}{sign}{second}: {steps}</reasoning><answer>{answer}</answer>"
    assert text == expected


def test_without_tags_the_steps_are_the_same():
    text = Demonstrator(no_tags_frac=1.0).demonstrate(12, "+", 13, random.Random(0))

    assert text == "12+13: 2+3=5, 1+1=2, 25"


def test_the_three_sets_share_no_pair_of_numbers():
    demonstrated, train, held_out = (
        pairs_in(rows)
        for rows in (problems.demonstrations(), problems.train(size=20_000), problems.held_out())
    )

    assert len(held_out) == 500
    assert len(demonstrated) == 2000
    assert not demonstrated & train
    assert not demonstrated & held_out
    assert not train & held_out


def test_reference_answers_are_correct():
    for row in problems.train(size=500) + problems.demonstrations(size=500) + problems.held_out():
        first, second = map(int, re.findall(r"\d+", row["prompt"]))
        assert int(row["answer"]) in (first + second, first - second)


def test_held_out_demonstrations_are_correct():
    assert all(map(is_correct, problems.held_out()))


def test_noisy_demonstrations_are_correct_as_often_as_their_mistake_rates_imply():
    rows = problems.demonstrations(size=4000)

    # Both digits correct, tags present, and no omitted carry (half of the problems have one):
    # 0.95 * 0.95 * 0.6 * (1 - 0.4 / 2)
    assert sum(map(is_correct, rows)) / len(rows) == pytest.approx(0.433, abs=0.03)


def test_rows_depend_on_the_seed_only():
    assert problems.demonstrations(size=20, seed=1) == problems.demonstrations(size=20, seed=1)
    assert problems.demonstrations(size=20, seed=1) != problems.demonstrations(size=20, seed=2)
    assert problems.train(size=20, seed=1) == problems.train(size=20, seed=1)
    assert problems.held_out() == problems.held_out()
