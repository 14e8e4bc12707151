"""Replies against their references: each term worked out by hand, and LAPDOG's sum of them."""

import math

import pytest
from sacrebleu import sentence_bleu

from litgrpo.rewards.builtin import dialogue
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer

SAID = ["i have two dogs .", "i like cats .", ""]
GIVEN = [["i have two big dogs ."], ["no , i do not like dogs ."], ["hello"]]
NOBODY = [""] * 3


def test_f1_counts_whitespace_tokens_as_they_are():
    # 5 of 5 said and 5 of 6 wanted; {i, like, .} of 4 said and 8 wanted.
    assert dialogue.f1(NOBODY, SAID, GIVEN) == pytest.approx([10 / 11, 6 / 12, 0.0])
    assert dialogue.f1([""], ["I like"], ["i like"]) == [0.5]


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    # Without punctuation: i have two dogs (4 of 4, 4 of 5); i .. like (2 of 3, 2 of 6).
    assert dialogue.rouge_l(NOBODY, SAID, GIVEN) == pytest.approx([8 / 9, 4 / 9, 0.0])


def test_bleu_is_that_of_sacrebleu_over_a_hundred():
    expected = [
        sentence_bleu(said, given).score / 100 for said, given in zip(SAID, GIVEN, strict=True)
    ]
    assert dialogue.bleu(NOBODY, SAID, GIVEN) == pytest.approx(expected)
    assert dialogue.bleu([""], ["a b c d e"], ["a b c d e"]) == pytest.approx([1.0])


def test_the_nearest_of_several_references_counts():
    several = [["never", "i have two dogs ."]]
    for reward in (dialogue.f1, dialogue.rouge_l, dialogue.bleu):
        assert reward([""], SAID[:1], several) == pytest.approx([1.0])


def test_lapdog_adds_its_three_terms_the_third_over_the_norm_of_the_batch():
    bleus = dialogue.bleu(NOBODY, SAID, GIVEN)
    norm = math.hypot(*bleus)
    assert norm > 0
    terms = zip(
        dialogue.f1(NOBODY, SAID, GIVEN), dialogue.rouge_l(NOBODY, SAID, GIVEN), bleus, strict=True
    )
    expected = [a + b + c / norm for a, b, c in terms]
    assert dialogue.lapdog(NOBODY, SAID, GIVEN) == pytest.approx(expected)
    assert dialogue.lapdog([""], SAID[:1], GIVEN[:1])[0] == pytest.approx(10 / 11 + 8 / 9 + 1)


def test_lapdog_is_zero_not_nan_where_no_reply_has_any_bleu():
    assert dialogue.lapdog(["", ""], ["", "x"], ["hello", "hello"]) == [0.0, 0.0]


def test_weights_add_the_share_of_different_pairs_of_words_to_lapdog():
    said = ["a b a b", "A a A a"]
    given = ["a b", "a b"]
    kwargs = {"min_words": 1, "ignore_case": False}
    parts = {
        "lapdog": Reward("litgrpo.rewards.builtin.dialogue.lapdog"),
        "distinct": Reward("litgrpo.rewards.builtin.diversity.distinct", kwargs=kwargs),
    }
    table = Scorer(parts)(["", ""], said, {"answers": given}, group_size=2)
    assert table.components["distinct"].tolist() == [pytest.approx([2 / 3, 2 / 3])]
    assert (table.total - table.components["lapdog"]).tolist() == [pytest.approx([2 / 3, 2 / 3])]


def test_blank_space_and_chat_messages_make_no_difference():
    messages = [[{"role": "assistant", "content": f" {text}\n"}] for text in SAID]
    for reward in (dialogue.f1, dialogue.rouge_l, dialogue.bleu, dialogue.lapdog):
        assert reward(NOBODY, messages, GIVEN) == reward(NOBODY, SAID, GIVEN)


def test_a_row_without_a_reference_does_not_change_the_rewards_of_others():
    for reward in (dialogue.f1, dialogue.rouge_l, dialogue.bleu, dialogue.lapdog):
        scored = reward(NOBODY, SAID, GIVEN)
        assert reward([*NOBODY, ""], [*SAID, "x"], [*GIVEN, []]) == [*scored, None]


def test_lapdog_is_asked_about_the_whole_batch_and_single_terms_can_be_shown_beside_it():
    parts = {
        "lapdog": Reward("litgrpo.rewards.lapdog"),
        "f1": Reward("litgrpo.rewards.f1", weight=0.0),
    }
    table = Scorer(parts)(NOBODY[:2], SAID[:2], {"answers": GIVEN[:2]}, group_size=2)
    assert table.total.tolist() == [pytest.approx(dialogue.lapdog(NOBODY[:2], SAID[:2], GIVEN[:2]))]
    assert table.components["f1"].tolist() == [pytest.approx([10 / 11, 0.5])]


def test_a_failing_batch_is_not_asked_again_row_by_row():
    parts = {"lapdog": Reward("litgrpo.rewards.lapdog"), "f1": Reward(dialogue.f1)}
    composite = Scorer(parts)
    composite.runner.max_failed_frac = 1.0
    table = composite(NOBODY[:2], SAID[:2], {"answers": [["x"], [7]]}, group_size=2)
    assert composite.failures["lapdog"] == {"AttributeError": 2}
    assert composite.failures["f1"] == {"AttributeError": 1}
    assert not table.valid.any()
