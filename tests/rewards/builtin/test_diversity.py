import pytest

from litgrpo.rewards.builtin.diversity import distinct, group_diversity
from tests.support.raises import raises_for


def test_distinct_by_hand() -> None:
    texts = ["a b a b a b a b", "a b c d e f g h", "a b", "a", "", "A a a a a a a a"]
    assert distinct(["?"] * 6, texts) == pytest.approx([2 / 7, 1, 0.25, 0, 0, 1 / 7])
    assert distinct(["?"], ["a a b b"], n=1, min_words=1) == [0.5]
    with raises_for("n is 0"):
        distinct(["?"], ["a"], n=0)
    with raises_for("min_words"):
        distinct(["?"], ["a"], min_words=0)


def test_distinct_can_keep_case_and_short_texts() -> None:
    settings = {"min_words": 1, "ignore_case": False}
    assert distinct(["?"] * 3, ["A a A a", "a", ""], **settings) == pytest.approx([2 / 3, 0, 0])


def test_group_diversity_by_hand() -> None:
    texts = ["a b c", "a b d", "x y", "x y"]
    # "a b" is shared; the second group is the same text twice
    assert group_diversity(["?"] * 4, texts, 2) == [0.5, 0.5, 0, 0]
    assert group_diversity(["?"] * 4, texts, 4) == [0.5, 0.5, 0, 0]
    assert group_diversity(["?"] * 4, texts, 1) == [0, 0, 0, 0]
    assert group_diversity(["?"] * 2, ["a b", ""], 2) == [1, 0]


def test_group_diversity_compares_with_the_own_group_only() -> None:
    texts = ["a b", "a b", "c d", "a b", "e f", "e f"]
    assert group_diversity(["?"] * 6, texts, 2) == [0, 0, 1, 1, 0, 0]


def test_repeated_words_add_no_group_diversity() -> None:
    assert group_diversity(["?"] * 2, ["a b a b a b c", "a b"], 2)[0] == pytest.approx(2 / 3)
