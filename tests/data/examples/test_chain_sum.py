import random
import re

import pytest

from litgrpo.data.examples.chain_sum import (
    NOISY,
    ChainSumDemonstrator,
    demonstrations,
    parse_terms,
)
from tests.support.raises import raises_for

PROMPT = "State the final answer to the following arithmetic problem: {} ="
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def numbers(count: int, rng: random.Random) -> list[int]:
    return [rng.choice((-1, 1)) * rng.randrange(10 ** rng.randint(1, 3)) for _ in range(count)]


def test_without_mistakes_every_sum_is_correct():
    rng = random.Random(0)
    for _ in range(2000):
        terms = numbers(rng.randint(2, 4), rng)
        completion = ChainSumDemonstrator().demonstrate(terms, rng)
        assert completion.endswith(f"</reasoning><answer>{sum(terms)}</answer>"), terms


@pytest.mark.parametrize(
    ("mistakes", "terms", "completion"),
    [
        ({"forgotten_carry_frac": 1.0}, [47, 38], "47+38: 7+8=15, 4+3=7, 75; 75"),
        ({"forgotten_carry_frac": 1.0}, [52, -38], "52-38: 12-8=4, 5-3=2, 24; 24"),
        ({"forgotten_sign_frac": 1.0}, [12, -38], "-(38-12): 8-2=6, 3-1=2, 26; 26"),
        ({}, [42, -25, 7], "42-25: 12-5=7, 4-2-1=1, 17; 17+7: 7+7=14, 1+0+1=2, 24; 24"),
        ({"wrong_digit_frac": 1.0}, [0, 0], "0+0: 0+0=1, 1; 1"),
    ],
)
def test_later_steps_are_consistent_with_each_mistake(mistakes, terms, completion):
    text = ChainSumDemonstrator(no_tags_frac=1.0, **mistakes).demonstrate(terms, random.Random(0))
    assert text == completion


def test_noisy_demonstrations_are_correct_in_less_than_half_of_the_cases():
    rng = random.Random(0)
    problems = [numbers(2, rng) for _ in range(2000)]
    correct = sum(
        f"<answer>{sum(terms)}</answer>" in NOISY.demonstrate(terms, rng) for terms in problems
    )
    assert 0.3 < correct / len(problems) < 0.5


def test_terms_are_parsed_from_the_prompt():
    assert parse_terms(PROMPT.format("42 - 25 + 7")) == [42, -25, 7]
    assert parse_terms(PROMPT.format("-3 - -25")) == [-3, 25]
    with raises_for("chain_sum"):
        parse_terms("What is 2?")


def test_exclude_needs_size_and_seed():
    with raises_for("exclude"):
        demonstrations(exclude={"size": 3})


def test_excluded_problems_are_not_demonstrated():
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    arguments = {"size": 300, "seed": 5000, "settings": SETTINGS}
    all_rows = demonstrations(**arguments)
    rows = demonstrations(**arguments, exclude={"size": 3000, "seed": 7})
    generated = gym.create_dataset("chain_sum", size=3000, seed=7, **SETTINGS)
    excluded = {entry["question"] for entry in generated}
    assert rows == demonstrations(**arguments, exclude={"size": 3000, "seed": 7})
    assert 200 < len(rows) < len(all_rows) == 300
    assert not excluded & {row["prompt"] for row in rows}
    with raises_for("exclude"):
        demonstrations(size=3, seed=7, settings=SETTINGS, exclude={"size": 3000, "seed": 7})
    for row in all_rows:
        assert sum(parse_terms(row["prompt"])) == int(row["answer"])
        assert re.search(r"\d", row["completion"])
