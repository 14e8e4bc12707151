import sys

import pytest

from litgrpo.rewards.builtin.sentiment import _vader, cheerful


def test_a_text_that_is_cut_off_or_empty_earns_nothing(monkeypatch):
    class Analyzer:
        def polarity_scores(self, text):
            return {"compound": {"good": 0.5, "bad": -1.0}[text]}

    monkeypatch.setattr("litgrpo.rewards.builtin.sentiment._vader", Analyzer)
    texts = [" good\n", "bad", "good", "  "]
    assert cheerful(["?"] * 4, texts, truncated=[False, False, True, False]) == [0.75, 0, 0, 0]


def test_without_vader_its_extra_is_named(monkeypatch):
    _vader.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(ValueError, match=r'pip install "litgrpo\[real\]"'):
        cheerful(["?"], ["good"], truncated=[False])


def test_vader_likes_happy_words_and_not_sad_ones():
    pytest.importorskip("vaderSentiment", reason="not installed; .ci/real runs it")
    _vader.cache_clear()
    texts = ["What a wonderful, happy day!", "It is a table.", "A horrible, sad day."]
    happy, neutral, sad = cheerful(["?"] * 3, texts, truncated=[False] * 3)
    assert happy > 0.9
    assert neutral == 0.5
    assert sad < 0.2
