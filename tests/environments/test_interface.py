"""What counts as an environment."""

from __future__ import annotations

from typing import Any

from litgrpo.environments import Environment, Heard


class Echo:
    """Says again what it hears."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Add nothing."""
        return ""

    def step(self, said: str) -> Heard:
        """The same again."""
        return Heard(said)


def test_any_class_with_the_two_methods_is_an_environment() -> None:
    """No base class is needed; a class that lacks a method is none."""
    assert isinstance(Echo(), Environment)
    assert not isinstance(object(), Environment)


def test_what_is_heard_costs_and_ends_nothing_by_itself() -> None:
    """Only a text: no reward, and the episode goes on."""
    heard = Echo().step("hello")
    assert (heard.said, heard.reward, heard.done, heard.calls) == ("hello", 0.0, False, {})
