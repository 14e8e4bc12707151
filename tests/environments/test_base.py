"""Environment protocol and step results."""

from __future__ import annotations

from typing import Any

import pytest

from litgrpo.environments import Environment, StepResult, Tools
from litgrpo.environments.base import schemas_of, shown_tools_of


class Echo:
    """Repeats the action."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Add nothing."""
        return ""

    def step(self, action: str) -> StepResult:
        """The same again."""
        return StepResult(action)


def test_any_class_with_the_two_methods_is_an_environment() -> None:
    """No base class is needed; a class that lacks a method is none."""
    assert isinstance(Echo(), Environment)
    assert not isinstance(object(), Environment)


def test_what_is_heard_costs_and_ends_nothing_by_itself() -> None:
    """A step result with only a text has reward 0 and continues the episode."""
    heard = Echo().step("hello")
    assert (heard.observation, heard.reward, heard.done, heard.calls) == ("hello", 0.0, False, {})


class Calculator(Echo):
    """Has a function and a schema to show."""

    def __init__(self, *functions: Any) -> None:
        """Keep what is shown."""
        self.tools = functions


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: to be doubled.
    """
    return 2 * number


def test_the_tools_that_a_model_is_shown_are_json_schemas() -> None:
    """Functions are described by their types and docstrings; schemas are taken as they are."""
    given = {"type": "function", "function": {"name": "other", "parameters": {}}}
    made, same = schemas_of(Calculator(double, given))
    assert made["function"]["name"] == "double"
    assert made["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert same == given
    assert schemas_of(Echo()) == []


def test_a_function_that_says_nothing_of_its_arguments_cannot_be_shown() -> None:
    """One line names it."""
    with pytest.raises(ValueError, match=r"a tool cannot be shown to the model: .*quiet"):
        schemas_of(Calculator(lambda_of_one()))


@pytest.mark.parametrize(("describe", "number"), [(True, 0), (False, 1)])
def test_tools_that_are_told_in_the_prompt_are_not_shown_by_the_template_too(
    describe: bool, number: int
) -> None:
    """They stay tools."""
    calculator = Tools(functions=[double], list_tools_in_prompt=describe)
    assert len(shown_tools_of(calculator)) == number
    assert len(schemas_of(calculator)) == 1


def lambda_of_one() -> Any:
    """A function without types or docstring."""

    def quiet(number):  # type: ignore[no-untyped-def]
        return number

    return quiet
