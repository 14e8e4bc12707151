import pytest

from litgrpo.rewards.builtin.diversity import distinct, group_diversity


def test_distinct_by_hand() -> None:
    texts = ["a b a b a b a b", "a b c d e f g h", "a b", "a", "", "A a a a a a a a"]
    assert distinct(["?"] * 6, texts) == pytest.approx([2 / 7, 1, 0.25, 0, 0, 1 / 7])
    assert distinct(["?"], ["a a b b"], n=1, shortest=1) == [0.5]
    with pytest.raises(ValueError, match="n is 0; it must be at least 1"):
        distinct(["?"], ["a"], n=0)
    with pytest.raises(ValueError, match="shortest is 0"):
        distinct(["?"], ["a"], shortest=0)


def test_distinct_of_text_as_it_stands() -> None:
    settings = {"shortest": 1, "ignore_case": False}
    assert distinct(["?"] * 3, ["A a A a", "a", ""], **settings) == pytest.approx([2 / 3, 0, 0])


def test_group_diversity_by_hand() -> None:
    texts = ["a b c", "a b d", "x y", "x y"]
    # "a b" is shared; the second group is the same text twice
    assert group_diversity(["?"] * 4, texts, 2) == [0.5, 0.5, 0, 0]
    assert group_diversity(["?"] * 4, texts, 4) == [0.5, 0.5, 0, 0]
    assert group_diversity(["?"] * 4, texts, 1) == [0, 0, 0, 0]
    assert group_diversity(["?"] * 2, ["a b", ""], 2) == [1, 0]


def test_repeating_oneself_is_no_diversity() -> None:
    assert group_diversity(["?"] * 2, ["a b a b a b c", "a b"], 2)[0] == pytest.approx(2 / 3)
