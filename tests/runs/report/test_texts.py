import pytest

from litgrpo.runs.report.texts import MAX_CHARS, diff_messages, mark_difference
from litgrpo.text.visible import visible
from tests.runs.report.run_folders import HOSTILE


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_every_text_can_be_encoded_and_is_visible(text):
    shown = visible(text, MAX_CHARS)
    shown.encode()
    assert len(shown) < 13_000
    assert not {*shown} & {*"\u202e\u2066\u200f\x00\x07\x1b\x7f\ud800"}


@pytest.mark.parametrize(
    ("now", "earlier"), [("", "a"), ("aa", "a"), ("a", "aa"), ("abc", "xyz"), ("ab", "ab")]
)
def test_the_three_parts_add_up_to_the_text(now, earlier):
    assert "".join(mark_difference(now, earlier)) == now


def test_an_episode_is_shown_turn_by_turn():
    messages = [
        {"role": "assistant", "content": "<call>2*3</call>"},
        {"role": "tool", "name": "calculator", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
    row = {"completion": "", "messages": messages, "turn_rewards": [0.0, 1.0]}
    diffs = diff_messages(row, {"completion": "", "messages": messages[:2], "turn_rewards": [0.0]})
    assert [each.role for each in diffs] == ["policy", "tool calculator", "policy"]
    assert [each.reward for each in diffs] == ["0", "", "1"]
    assert [each.new for each in diffs] == ["", "", "6"]
