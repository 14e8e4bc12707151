import pytest

from tests.benchmarks import tone
from tests.benchmarks.tone import Shares, bootstrap_change, shares, split


def test_the_shares_of_ending_and_of_tone_by_hand(monkeypatch):
    def judge(prompts, completions, truncated):
        return [1.0 if "happy" in text else 0.0 for text in completions]

    monkeypatch.setattr(tone, "cheerful", judge)
    texts = [("happy", False), ("happy [cut]", True), ("sad", False), ("sad [cut]", True)]
    found = shares([{"completion": text, "truncated": cut} for text, cut in texts])
    assert found == Shares(ended=0.5, tone=0.5, any_tone=0.5)
    assert found.success == 0.25


def test_the_two_parts_of_a_change_add_up_to_it():
    before, after = Shares(0.6, 0.3, 0.3), Shares(0.9, 0.8, 0.8)
    assert sum(split(before, after)) == pytest.approx(after.success - before.success)
    assert split(before, Shares(0.9, 0.3, 0.3))[1] == 0


def test_a_change_is_paired_by_topic_whatever_the_order():
    before = [{"index": 0, "correct": 0.0}, {"index": 1, "correct": 1.0}]
    after = [{"index": 1, "correct": 1.0}, {"index": 0, "correct": 0.0}]
    assert bootstrap_change(before, after) == (0.0, 0.0)
