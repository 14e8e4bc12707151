import random
import re

import pytest

from litgrpo.data.examples.chain_sum import CARELESS, ChainTeacher, supervised, terms_of

ASKED = "State the final answer to the following arithmetic problem: {} ="
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


def numbers(count: int, rng: random.Random) -> list[int]:
    return [rng.choice((-1, 1)) * rng.randrange(10 ** rng.randint(1, 3)) for _ in range(count)]


def test_a_careful_teacher_is_right_about_any_sum():
    rng = random.Random(0)
    for _ in range(2000):
        terms = numbers(rng.randint(2, 4), rng)
        completion = ChainTeacher().demonstrate(terms, rng)
        assert completion.endswith(f"</reasoning><answer>{sum(terms)}</answer>"), terms


@pytest.mark.parametrize(
    ("teacher", "terms", "completion"),
    [
        ({"forgotten_carry_frac": 1.0}, [47, 38], "47+38: 7+8=15, 4+3=7, 75; 75"),
        ({"forgotten_carry_frac": 1.0}, [52, -38], "52-38: 12-8=4, 5-3=2, 24; 24"),
        ({"forgotten_sign_frac": 1.0}, [12, -38], "-(38-12): 8-2=6, 3-1=2, 26; 26"),
        ({}, [42, -25, 7], "42-25: 12-5=7, 4-2-1=1, 17; 17+7: 7+7=14, 1+0+1=2, 24; 24"),
        ({"wrong_digit_frac": 1.0}, [0, 0], "0+0: 0+0=1, 1; 1"),
    ],
)
def test_each_mistake_is_made_and_what_follows_agrees_with_it(teacher, terms, completion):
    made = ChainTeacher(no_tags_frac=1.0, **teacher).demonstrate(terms, random.Random(0))
    assert made == completion


def test_the_careless_teacher_is_wrong_more_often_than_right_but_never_always():
    rng = random.Random(0)
    problems = [numbers(2, rng) for _ in range(2000)]
    right = sum(
        f"<answer>{sum(terms)}</answer>" in CARELESS.demonstrate(terms, rng) for terms in problems
    )
    assert 0.3 < right / len(problems) < 0.5


def test_terms_are_read_from_the_text():
    assert terms_of(ASKED.format("42 - 25 + 7")) == [42, -25, 7]
    assert terms_of(ASKED.format("-3 - -25")) == [-3, 25]
    with pytest.raises(ValueError, match=r"'What is 2\?' is no problem of chain_sum"):
        terms_of("What is 2?")


def test_problems_to_leave_out_are_given_as_their_recipe_has_them():
    with pytest.raises(ValueError, match=r"apart_from is \{'size': 3\}; give `\{size: 4000"):
        supervised(apart_from={"size": 3})


def test_demonstrations_are_of_other_problems_than_those_to_practice():
    gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    asked = {"size": 300, "seed": 5000, "settings": SETTINGS}
    everything = supervised(**asked)
    rows = supervised(**asked, apart_from={"size": 3000, "seed": 7})
    made = gym.create_dataset("chain_sum", size=3000, seed=7, **SETTINGS)
    practice = {entry["question"] for entry in made}
    assert rows == supervised(**asked, apart_from={"size": 3000, "seed": 7})
    assert 200 < len(rows) < len(everything) == 300
    assert not practice & {row["prompt"] for row in rows}
    with pytest.raises(ValueError, match="all problems are among those of apart_from"):
        supervised(size=3, seed=7, settings=SETTINGS, apart_from={"size": 3000, "seed": 7})
    for row in everything:
        assert sum(terms_of(row["prompt"])) == int(row["answer"])
        assert re.search(r"\d", row["completion"])
