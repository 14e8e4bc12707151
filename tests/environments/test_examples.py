"""The tools that are shipped."""

import pytest

from litgrpo.environments.examples import Search, calculate
from litgrpo.environments.schema import schema_of


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
        ("1.5", "not an expression"),
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
    search = Search(str(facts), most=2)
    assert search.reset(prompt="x") is None
    assert search.search("which RIVER is the Elbe") == "The Elbe is a river.\nThe Rhine is a river."
    assert search.search("zugspitze") == "The Zugspitze is a mountain."
    assert search.search("nothing; at all") == "nothing found"
    facts.write_text("The Zugspitze is 2962 m high.\n")
    assert search.search("zugspitze") == "The Zugspitze is 2962 m high."


def test_a_search_in_no_file_is_refused():
    with pytest.raises(ValueError, match=r"there is no file nowhere\.txt"):
        Search("nowhere.txt")


def test_the_examples_describe_themselves(tmp_path):
    assert list(schema_of(calculate)["function"]["parameters"]["properties"]) == ["expression"]
    assert list(schema_of(Search.search)["function"]["parameters"]["properties"]) == ["words"]
