"""Shared code of the adapters."""

import pytest

from litgrpo.arguments import import_package
from litgrpo.environments.adapters.external import (
    construct,
    format_opening,
    game_result,
    reject_action,
)


def test_a_package_that_is_absent_is_named_with_the_command_that_installs_it():
    with pytest.raises(ValueError, match=r"No module named 'nowhere'; `pip install no-where`"):
        import_package("nowhere", "no-where")


def test_what_a_library_raises_becomes_one_line():
    def raises():
        raise KeyError("two\nlines")

    with pytest.raises(ValueError, match=r"^id: X cannot be played: KeyError: 'two\\nlines'$"):
        construct("id: X", raises)


def test_the_opening_stands_apart_from_a_prompt():
    assert format_opening({"prompt": "Play."}, " board\n") == "\n\nboard"
    assert format_opening({}, " board\n") == "board"


def test_equal_states_have_equal_hashes_and_refusals_count_as_failed_calls():
    first, second = (game_result(text, 1, done=False, state="s") for text in "ab")
    assert first.state == second.state != game_result("a", 1, done=False, state="t").state
    assert first.calls == {"action": (1, 0)}
    assert reject_action("no").calls == {"action": (1, 1)}
