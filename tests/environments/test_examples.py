"""The tools that are shipped."""

import pytest

from litgrpo.environments.examples import NumberGame, Search, calculate
from litgrpo.environments.tool import schema_of


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("347*82", "28454"),
        (" (347 + 5) * -82 ", "-28864"),
        ("7/2", "3.5"),
        ("1/3", "0.3333333333"),
        ("6/3", "2"),
        ("1/3*3", "1"),
        ("9" * 90 + "*" + "9" * 90, str((10**90 - 1) ** 2)),
        ("--3", "3"),
        ("0.75 - 0.5", "0.25"),
        ("0.1+0.2", "0.3"),
    ],
)
def test_the_calculator_computes_exactly(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "not an expression"),
        ("9**9**9**9", "not an expression"),
        ("7//2", "not an expression"),
        ("1.5.2", "not an expression"),
        ("1e5", "not an expression"),
        ("__import__('os')", "not an expression"),
        ("(" * 199, "not an expression"),
        ("(1)(2)", "not an expression"),
        ("1 2", "not an expression"),
        ("()", "not an expression"),
        ("\u0663*2", "not an expression"),
        ("1/(2-2)", "division by zero"),
        ("1" * 201, "at most 200 characters"),
    ],
)
def test_the_calculator_refuses_anything_else(expression, why):
    with pytest.raises(ValueError, match=why):
        calculate(expression)


def test_a_search_finds_the_lines_with_the_rarest_words(tmp_path):
    facts = tmp_path / "facts.txt"
    facts.write_text(
        "The Rhine is a river.\n\nThe Zugspitze is a mountain.\nThe Elbe is a river.\n"
    )
    search = Search(str(facts), max_results=2)
    assert search.reset(prompt="x") is None
    assert search.search("which RIVER is the Elbe") == "The Elbe is a river.\nThe Rhine is a river."
    assert search.search("zugspitze") == "The Zugspitze is a mountain."
    assert search.search("nothing; at all") == "nothing found"
    facts.write_text("The Zugspitze is 2962 m high.\n")
    assert search.search("zugspitze") == "The Zugspitze is 2962 m high."


def test_a_search_in_no_file_is_refused():
    with pytest.raises(ValueError, match=r"path nowhere\.txt"):
        Search("nowhere.txt")


def test_the_examples_describe_themselves(tmp_path):
    assert list(schema_of(calculate)["function"]["parameters"]["properties"]) == ["expression"]
    assert list(schema_of(Search.search)["function"]["parameters"]["properties"]) == ["words"]


def test_the_number_game_answers_by_what_a_guess_leaves_possible():
    game = NumberGame(opening="Guess {minimum}-{maximum} in {max_guesses}.")
    assert game.reset({}, seed=1) == "Guess 1-15 in 4."  # the number is 3
    heard = game.step("8")
    assert (heard.observation, heard.reward, heard.done, heard.state) == (
        "<high>",
        0.0,
        False,
        (1, 7, 3),
    )
    heard = game.step("<think>3</think>I say 1.")
    assert (heard.observation, heard.state, heard.log) == (
        "<low>",
        (2, 7, 2),
        {"contradicted": 0.0},
    )
    heard = game.step("11")
    assert (heard.state, heard.log) == ((2, 7, 1), {"contradicted": 1.0})
    heard = game.step("it is 3")
    assert (heard.observation, heard.reward, heard.done) == ("", 1.0, True)


def test_a_turn_without_a_number_of_the_range_costs_a_try():
    game = NumberGame(max_guesses=2)
    game.reset({}, seed=1)
    heard = game.step("hm")
    assert (heard.observation, heard.calls, heard.done) == ("<invalid>", {"guess": (1, 1)}, False)
    heard = game.step("16")
    assert (heard.calls, heard.done, heard.reward) == ({"guess": (1, 1)}, True, 0.0)


def test_the_seed_makes_the_number():
    won = {tuple(_plays_and_wins(seed, guess) for guess in "123") for seed in range(30)}
    assert won == {(True, False, False), (False, True, False), (False, False, True)}


def _plays_and_wins(seed, guess):
    game = NumberGame(maximum=3, max_guesses=1)
    game.reset({}, seed)
    return game.step(guess).reward == 1.0


def test_a_range_without_numbers_is_refused():
    with pytest.raises(ValueError, match="maximum is 0; it must be at least 1"):
        NumberGame(maximum=0)
