"""Calling tools, and the text of their results."""

import asyncio
import logging
import math
from enum import Enum
from typing import Any, Literal

import pytest

from litgrpo.arguments import import_object
from litgrpo.environments.schemas import explain_mismatch
from litgrpo.environments.tool import (
    describe_error,
    make_tool,
    quote_name,
    resolve,
    run_calls,
    schema_of,
    to_result,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def many(  # noqa: PLR0913, PLR0917
    text: str,
    whole: int,
    number: float,
    flag: bool,
    items: list[int],
    pair: tuple[str, int],
    table: dict[str, float],
    either: int | str,
    mixed: list[int] | str,
    colour: Colour,
    level: Literal[1, "high"],
    maybe: int | None = None,
    anything: Any = 1,
) -> str:
    """Take one of each.

    Args:
        text: a
        whole: b
        number: c
        flag: d
        items: e
        pair: f
        table: g
        either: h
        mixed: i
        colour: j
        level: k
        maybe: l
        anything: m
    """
    return text


PARAMETERS = schema_of(many)["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    ("name", "good", "bad", "says"),
    [
        ("text", ["", "3"], [3, None, ["a"]], "'text' must be a string"),
        ("whole", [0, -3, 10**300], ["3", 3.0, True, None], "'whole' must be an integer"),
        (
            "number",
            [3, 0.5],
            ["3", True, float("inf"), float("nan")],
            "'number' must be a number",
        ),
        ("flag", [True, False], [1, "true"], "'flag' must be true or false"),
        ("items", [[], [1, 2]], [1, {"0": 1}], "'items' must be a list"),
        ("items", [], [["1"], [None]], "'items.0' must be an integer"),
        ("pair", [["a", 1]], ["a1"], "'pair' must be a list"),
        ("pair", [], [["a", "a"]], "'pair.1' must be an integer"),
        ("table", [{}, {"a": 1, "b": 0.5}], [[1]], "'table' must be an object"),
        ("table", [], [{"a": "1"}], "'table.a' must be a number"),
        ("either", [1, "a"], [1.5, None, [1]], "'either' must be an integer or a string"),
        ("mixed", [[1], "a"], [["a"], 1], "'mixed' must be a list or a string"),
        ("colour", ["red"], ["green", "RED", None], "'colour' must be one of 'red', 'blue'"),
        ("level", [1, "high"], [True, "1"], "'level' must be one of 1, 'high'"),
        ("maybe", [None, 3], ["3", 0.5], "'maybe' must be an integer or null"),
    ],
)
def test_a_value_matches_its_type_exactly_or_is_rejected(name, good, bad, says):
    schema = {"type": "object", "properties": PARAMETERS}
    assert [explain_mismatch(schema, {name: value}) for value in good] == [""] * len(good)
    assert {explain_mismatch(schema, {name: value}) for value in bad} == {says}


def test_a_parameter_of_any_type_takes_anything():
    assert explain_mismatch({"properties": PARAMETERS}, {"anything": [1, {"a": None}]}) == ""


def no_type(a):
    """Do.

    Args:
        a: what
    """


def silent(a: int) -> int:
    return a


def no_description(a: int, b: int) -> int:
    """Do.

    Args:
        a: what
    """
    return a + b


def only_returns() -> int:
    """
    Returns:
        one
    """
    return 1


def custom(a: pytest.FixtureRequest) -> int:
    """Do.

    Args:
        a: what
    """
    return 1


def unknown_name(a: "Nowhere") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Do.

    Args:
        a: what
    """
    return 1


def spread(*a: int) -> int:
    """Do.

    Args:
        a: what
    """
    return 1


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_type, "Argument a is missing a type hint"),
        (silent, "no docstring"),
        (no_description, "no description for the argument 'b'"),
        (only_returns, "its docstring is empty"),
        (custom, "FixtureRequest"),
        (unknown_name, "Nowhere"),
        (spread, r"an argument without a name \(\*a"),
        (lambda a: a, "no docstring"),
    ],
)
def test_a_function_that_says_too_little_is_refused_with_what_to_write(function, why):
    with pytest.raises(ValueError, match=why) as raised:
        schema_of(function)
    line = str(raised.value)
    assert line.startswith(f"tool '{function.__name__}'")
    assert "a tool is `def f(x: int) -> str` with a docstring" in line
    assert "\n" not in line


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


TOOL = make_tool(multiply)


@pytest.mark.parametrize(
    ("named", "positional", "given"),
    [
        ({"a": 3}, (), {"a": 3}),
        ({}, (3, 4), {"a": 3, "b": 4}),
        ({"b": 4}, (3,), {"a": 3, "b": 4}),
    ],
)
def test_arguments_are_taken_by_name_and_by_place(named, positional, given):
    assert TOOL.arguments(named, positional) == given


@pytest.mark.parametrize(
    ("named", "positional", "says"),
    [
        ({}, (), "multiply needs a"),
        ({"a": "3"}, (), "multiply: 'a' must be an integer"),
        ({"a": 3, "c": 4}, (), "multiply has no argument 'c'; it takes a, b"),
        ({"a": 3, "x\n" * 99: 4}, (), "multiply has no argument of that name; it takes a, b"),
        ({"a": 3}, (3,), "multiply: 'a' is given twice"),
        ({}, (1, 2, 3), "multiply has too many arguments; it takes a, b"),
    ],
)
def test_arguments_that_do_not_fit_are_told_in_fixed_words(named, positional, says):
    with pytest.raises(ValueError, match="multiply") as raised:
        TOOL.arguments(named, positional)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is\n", "as it is\n"),
        (28454, "28454"),
        (0.1 + 0.2, "0.30000000000000004"),
        (None, "null"),
        (True, "true"),
        ({"b": [1, "\u00fc"], "a": None}, '{"b": [1, "\u00fc"], "a": null}'),
    ],
)
def test_a_result_is_a_text_as_it_is_or_json(result, text):
    assert to_result(TOOL, (result, None)).text == text


def test_a_result_that_is_neither_text_nor_json_is_a_failure_without_its_address():
    said = to_result(TOOL, (object(), None))
    assert said.failed
    assert said.text == "error: multiply returned object, which is neither a text nor JSON"


class GameOver(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("Game over."), "Game over."),
        (GameOver("lost\nTraceback: ..."), "lost"),
        (RuntimeError("no /home/me/x.db at 0x7f3a"), "no ... at ..."),
        (ValueError("3/4 of a/b, and/or 1.5"), "3/4 of a/b, and/or 1.5"),
        (ValueError("x" * 999), "x" * 200),
        (ValueError(), "multiply failed (ValueError)"),
        (KeyError("secret"), "multiply failed (KeyError)"),
        (FileNotFoundError("/root/x"), "multiply failed (FileNotFoundError)"),
        (SystemExit(3), "multiply failed (SystemExit)"),
    ],
)
def test_an_error_is_heard_in_its_authors_words_or_by_its_type(error, words):
    assert describe_error("multiply", error) == words


def test_where_a_tool_raised_is_logged_once(caplog):
    def wrong(x: int) -> float:
        return 1 / x

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            said = to_result(TOOL, run_calls([(wrong, {"x": 0})])[0])
    assert said.text == "error: multiply failed (ZeroDivisionError)"
    (record,) = caplog.records
    assert "test_tool.py, line" in record.getMessage()


def test_coroutines_wait_together_and_results_keep_the_order_of_the_calls():
    met: list[str] = []

    async def slow(name: str) -> str:
        met.append(f"{name} begins")
        await asyncio.sleep(0.01 if name == "a" else 0)
        met.append(f"{name} ends")
        return name

    async def raises() -> None:
        raise GameOver

    calls = [(slow, {"name": "a"}), (lambda: 1, {}), (raises, {}), (slow, {"name": "b"})]
    found = run_calls(calls)
    assert [value for value, _ in found] == ["a", 1, None, "b"]
    assert isinstance(found[2][1], GameOver)
    assert met == ["a begins", "b begins", "b ends", "a ends"]


def test_coroutines_run_also_where_an_event_loop_runs_already():
    async def three() -> int:
        return 3

    async def notebook() -> int:
        return resolve(three())

    assert asyncio.run(notebook()) == 3
    assert resolve(4) == 4


def test_a_tool_that_leaves_the_program_only_fails():
    ((value, error),) = run_calls([(exit, {"code": 3})])
    assert value is None
    assert isinstance(error, SystemExit)


def test_a_tool_that_is_not_there_is_named_with_what_is_near():
    assert import_object("tool", "math.sqrt") is math.sqrt
    near = r"tool 'math.sqr': module 'math' has no 'sqr' \(did you mean 'sqrt'\?\)"
    with pytest.raises(ValueError, match=near):
        import_object("tool", "math.sqr")
    with pytest.raises(ValueError, match=r"tool 'multiply'.*is not an import path"):
        make_tool("multiply")
    with pytest.raises(ValueError, match="tool must be a function"):
        make_tool(GameOver)
    with pytest.raises(ValueError, match="tool must be a function"):
        make_tool("math.pi")


def test_only_a_harmless_name_is_echoed():
    assert quote_name("f.g-1", otherwise="it") == "'f.g-1'"
    names = ("", "<|im_end|>", "x" * 41, "a b", "\u00fc")
    assert {quote_name(name, otherwise="it") for name in names} == {"it"}


def test_a_tool_is_told_in_a_line():
    assert TOOL.line == "multiply(a: integer, b: integer): Multiply two numbers."
