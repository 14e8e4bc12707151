"""Prompts are chosen by what they show; how evaluations are paired: report/test_results.py."""

import pytest

from litgrpo.runs.pairing import choose_prompts


def rows(rewards, **more):
    return [{"samples": [{"completion": "x", "reward": x} | more]} for x in rewards]


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        # Of equal rewards before: the largest gain, the largest loss, the first of the others.
        ([0.5, 0.6, 0.5, 0.1, 0.9], [4, 3, 0]),
        # Nothing changed: spread over the data.
        ([0.5] * 6, [0, 2, 4]),
        # No reward is neither a gain nor a loss.
        ([None, 0.4, None, 0.7, 0.5], [3, 1, 0]),
        ([None] * 3, [0, 1, 2]),
    ],
)
def test_prompts_that_changed_most_come_first(rewards, shown):
    pairs = list(zip(rows([0.5] * len(rewards)), rows(rewards), strict=True))
    assert list(choose_prompts(pairs, 3)) == shown


def test_incorrect_and_truncated_prompts_come_before_others():
    pairs = [(None, row) for row in rows([0.5, 0.1, 0.3])]
    pairs[1][1]["samples"][0]["truncated"] = True
    for place in (0, 2):
        pairs[place][1]["samples"][0]["correct"] = False
    assert choose_prompts(pairs, 3) == {
        0: "incorrect, highest reward",
        1: "truncated",
        2: "one of the others",
    }
    assert list(choose_prompts(pairs, 1)) == [0]
    assert choose_prompts(pairs, 0) == choose_prompts([], 3) == {}


def test_rewards_of_two_definitions_show_no_gain():
    before, after = rows([0.5, 0.5]), rows([0.1, 0.9])
    for weight, side in ("1", before), ("5", after):
        for row in side:
            row["definitions"] = {"reward": weight}
    pairs = list(zip(before, after, strict=True))
    assert set(choose_prompts(pairs, 2).values()) == {"one of the others"}
