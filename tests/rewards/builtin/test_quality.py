"""Text quality."""

import sys

import pytest

from litgrpo.rewards.builtin.quality import (
    _vader,
    cheerful,
    explanation_quality,
    new_share,
    quality,
)
from tests.support.raises import raises_for

HONEST = "<reasoning>Tom has 47 apples and gets 38 more, so he has 47+38=85.</reasoning>"


def explain(text: str, **kwargs) -> float:
    return explanation_quality(["?"], [f"<reasoning>{text}</reasoning>"], **kwargs)[0]


def words(count: int) -> str:
    return " ".join(f"w{n}" for n in range(count))


def test_explanations_are_judged_by_length_by_hand() -> None:
    lengths = [0, 1, 5, 10, 120, 240, 360, 500]
    assert [explain(words(n)) for n in lengths] == pytest.approx([0, 0.1, 0.5, 1, 1, 0.5, 0, 0])
    assert explain(words(3), min_words=3, max_words=3) == 1.0
    with raises_for("min_words", "max_words"):
        explain("a", min_words=0)


def test_an_explanation_that_repeats_itself_loses() -> None:
    assert new_share("a b c a b c") == 0.75  # of four triples, the first is said twice
    assert explain("a b c a b c", min_words=1) == pytest.approx(0.75**2)
    assert explain("The answer is 5. " * 20) < 0.01
    assert explain(words(30)) == 1.0


def test_ordinary_texts_have_full_quality_and_broken_ones_do_not() -> None:
    assert quality(["?"], [HONEST + "<answer>85</answer>"])[0] > 0.95
    assert quality(["?"], ["He has 85 apples."]) == [1.0]
    bad = {
        "": 0.0, "<answer></answer>": 0.0, "   ": 0.0, "!!!! ???? ####": 0.3, "He has": 0.5,
        "x" * 500: 0.1, words(400): 0.5, "yes no yes no " * 50 + ".": 0.1, "}{)(*&^%$#@!~": 0.1,
    }  # fmt: skip
    for text, most in bad.items():
        assert quality(["?"], [text])[0] <= most, text[:20]


def test_chat_messages_are_read() -> None:
    message = [{"role": "assistant", "content": HONEST}]
    assert quality(["?"], [message]) == quality(["?"], [HONEST])
    assert explanation_quality(["?"], [message]) == explanation_quality(["?"], [HONEST])


def test_a_text_that_is_cut_off_or_empty_earns_nothing(monkeypatch):
    class Analyzer:
        def polarity_scores(self, text):
            return {"compound": {"good": 0.5, "bad": -1.0}[text]}

    monkeypatch.setattr("litgrpo.rewards.builtin.quality._vader", Analyzer)
    texts = [" good\n", "bad", "good", "  "]
    assert cheerful(["?"] * 4, texts, truncated=[False, False, True, False]) == [0.75, 0, 0, 0]


def test_without_vader_its_extra_is_named(monkeypatch):
    _vader.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with raises_for("pip install vaderSentiment"):
        cheerful(["?"], ["good"], truncated=[False])


def test_vader_likes_happy_words_and_not_sad_ones():
    pytest.importorskip("vaderSentiment", reason="not installed; .ci/nightly real runs it")
    _vader.cache_clear()
    texts = ["What a wonderful, happy day!", "It is a table.", "A horrible, sad day."]
    happy, neutral, sad = cheerful(["?"] * 3, texts, truncated=[False] * 3)
    assert happy > 0.9
    assert neutral == 0.5
    assert sad < 0.2


@pytest.mark.parametrize("piece", [".", "!", "? ", "<b", "a ", "a. "])
def test_a_long_repetition_is_scored_in_linear_time(piece):
    # This takes a fraction of a second. A quadratic step would take minutes.
    quality([""], [piece * (100_000 // len(piece)) + "x"])
