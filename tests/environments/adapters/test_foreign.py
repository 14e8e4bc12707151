"""What the adapters have in common."""

import pytest

from litgrpo.environments.adapters.foreign import opened, opening, package, played, refused


def test_a_package_that_is_absent_is_named_with_the_command_that_installs_it():
    with pytest.raises(ValueError, match=r"No module named 'nowhere'; `pip install no-where`"):
        package("nowhere", "no-where")


def test_what_a_library_raises_becomes_one_line():
    def raises():
        raise KeyError("two\nlines")

    with pytest.raises(ValueError, match=r"^id: X cannot be played: KeyError: 'two\\nlines'$"):
        opened("id: X", raises)


def test_the_opening_stands_apart_from_a_prompt():
    assert opening({"prompt": "Play."}, " board\n") == "\n\nboard"
    assert opening({}, " board\n") == "board"


def test_equal_states_have_equal_hashes_and_refusals_count_as_failed_calls():
    first, second = (played(text, 1, done=False, state="s") for text in "ab")
    assert first.state == second.state != played("a", 1, done=False, state="t").state
    assert first.calls == {"action": (1, 0)}
    assert refused("no").calls == {"action": (1, 1)}
