"""What functions say of themselves, and which values fit."""

from enum import Enum
from typing import Any, Literal

import pytest

from litgrpo.environments.tool import schema_of, unfit


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
        ("text", ["", "3"], [3, None, ["a"]], "a string"),
        ("whole", [0, -3, 10**300], ["3", 3.0, True, None], "an integer"),
        ("number", [3, 0.5], ["3", True, float("inf"), float("nan")], "a number"),
        ("flag", [True, False], [1, "true"], "true or false"),
        ("items", [[], [1, 2]], [["1"], [None], 1, {"0": 1}], "a list, each item an integer"),
        ("pair", [["a", 1]], [["a"], [1, "a"], ["a", 1, 2], "a1"], "a list"),
        ("table", [{}, {"a": 1, "b": 0.5}], [{"a": "1"}, [1]], "an object"),
        ("either", [1, "a"], [1.5, None, [1]], "an integer or a string"),
        ("mixed", [[1], "a"], [["a"], 1], "a list or a string, each item an integer"),
        ("colour", ["red"], ["green", "RED", None], "one of 'red', 'blue'"),
        ("level", [1, "high"], [True, 1.0, "1"], "one of 1, 'high'"),
        ("maybe", [None, 3], ["3", 0.5], "an integer"),
    ],
)
def test_a_value_fits_its_type_exactly_or_is_refused(name, good, bad, says):
    assert [unfit(name, value, PARAMETERS[name]) for value in good] == [""] * len(good)
    assert {unfit(name, value, PARAMETERS[name]) for value in bad} == {f"'{name}' must be {says}"}


def test_a_parameter_of_any_type_takes_anything():
    assert unfit("anything", [1, {"a": None}], PARAMETERS["anything"]) == ""


def untyped(a):
    """Do.

    Args:
        a: what
    """


def silent(a: int) -> int:
    return a


def unexplained(a: int, b: int) -> int:
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
        (untyped, "Argument a is missing a type hint"),
        (silent, "no docstring"),
        (unexplained, "no description for the argument 'b'"),
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
