import pytest

from litgrpo.runs.summary import format_samples
from litgrpo.text.visible import visible


@pytest.mark.parametrize("category", ["\x00", "\x1b", "\u202e", "\ud800", "\u2028", "\x7f"])
def test_no_character_acts(category):
    assert visible(f"a{category}b") == f"a[U+{ord(category):04X}]b"


def test_what_is_seen_or_joins_stays():
    text = "два\tlines\nnä 👩\u200d🔬"
    assert visible(text) == text


def test_a_completion_cannot_command_the_terminal():
    page = format_samples([(None, {"prompt": "1+1", "completion": "\x1b[2J2"})])
    assert visible(page) == "prompt: 1+1\nafter:  [U+001B][2J2"


def test_a_long_text_is_cut_and_other_objects_are_converted():
    assert visible("a" * 12, 10) == "a" * 10 + " ... [2 more characters]"
    assert visible("ab", 2) == "ab"
    assert visible(1.5, 10) == "1.5"
