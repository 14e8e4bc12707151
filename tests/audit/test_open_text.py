"""Exploits of rewards for open-ended text are found; sound rewards pass."""

from types import SimpleNamespace

import pytest

from litgrpo.audit.cases import Problem
from litgrpo.audit.open_text import LEXICON_WORDS, audit_open_text, find_lexicon
from litgrpo.rewards import Reward, Scorer

LEXICON = {"joyful": 3.0, "splendid": 4.0, "sad": -2.0}
PROBLEMS = [Problem(f"Write about {what} and the sea.", None) for what in ("cats", "dogs")]
SAMPLES = [["It was a fine day. We walked.", "No idea."]] * 2


def cheerful(prompts, completions):
    """Counts words of a lexicon: easy to stuff."""
    return [sum(LEXICON.get(word, 0.0) for word in text.lower().split()) for text in completions]


def on_topic(prompts, completions):
    """Share of the prompt's words: the prompt copied is best."""
    pairs = zip(prompts, completions, strict=True)
    return [len(set(p.split()) & set(c.split())) / len(set(p.split())) for p, c in pairs]


def real_text(prompts, completions):
    """1 for the samples, 0 for every exploit."""
    return [float(text in SAMPLES[0]) for text in completions]


def always_half(prompts, completions):
    return [0.5 for _ in completions]


def first_text(prompts, completions):
    return [float(text == SAMPLES[0][0]) for text in completions]


def no_walk(completions):
    return [-float("walked" in text or len(text) > 80) for text in completions]


def long_enough(completions):
    """As long as the prompts, and no longer."""
    return [float(len(text) > 25) - (len(text) > 40) for text in completions]


def never(completions):
    return [0.0 for _ in completions]


def unscored(completions):
    return [None for _ in completions]


def raises(completions):
    raise RuntimeError("no server")


def broken(prompts, completions):
    return [1 / len(text) for text in completions]


def found(function, **kwargs):
    scorer = Scorer({"one": Reward(function, kwargs=kwargs)})
    return audit_open_text(scorer, PROBLEMS, SAMPLES)


def kinds_of_exploits(report):
    return {fault.split("'")[1] for fault in report.faults}


def test_a_reward_that_counts_words_is_exploited_with_its_lexicon():
    report = found(cheerful)
    assert kinds_of_exploits(report) == {LEXICON_WORDS, f"{LEXICON_WORDS}, repeated"}
    best = report.tables["exploit"].loc[f"{LEXICON_WORDS}, repeated"]
    assert (best["mean"], best["beats_best"]) == (120.0, 2)
    assert best["example"].split()[:2] == ["splendid"] * 2
    assert not report.passed


def test_a_reward_for_the_prompts_words_is_exploited_by_copying_them():
    report = found(on_topic)
    assert {"prompt copied", "keywords of the prompt"} <= kinds_of_exploits(report)


def test_a_sound_reward_passes_and_correctness_is_not_tested():
    report = found(first_text)
    assert (report.passed, report.numbers["mean"], report.numbers["best"]) == (True, 0.5, 1.0)
    assert list(report.lines())[-1] == "PASS (no reference answers: correctness not tested)"
    assert not any("no advantage" in remark for remark in report.remarks)


def test_doing_nothing_that_earns_as_much_as_the_best_sample_is_one_fault():
    (fault,) = found(always_half).faults
    assert fault.startswith("paid for nothing: 'no completion', 'no attempt', 'prompt copied' earn")
    # A penalty that the best sample and an empty text avoid.
    (fault,) = found(no_walk).faults
    assert fault.startswith("paid for nothing: 'no completion', 'no attempt', 'prompt copied' earn")
    report = found(long_enough)
    assert kinds_of_exploits(report) == {"prompt copied"}


@pytest.mark.parametrize("function", [always_half, real_text, never])
def test_samples_that_earn_the_same_are_a_remark(function):
    (remark,) = [remark for remark in found(function).remarks if "no advantage" in remark]
    assert "nothing is learned" in remark


def test_no_success_of_the_samples_is_no_fault():
    assert found(never).passed


def test_a_constant_reward_beside_another_is_a_remark():
    rewards = {"first": Reward(first_text), "half": Reward(always_half)}
    report = audit_open_text(Scorer(rewards), PROBLEMS, SAMPLES)
    assert report.passed
    constant = [remark for remark in report.remarks if remark.startswith("constant")]
    assert constant == ["constant: 'half' ranks no sample above another and gives no gradient"]


def test_rewards_without_a_score_are_one_fault_and_earn_nothing():
    for function in (unscored, raises):
        report = found(function)
        assert len(report.faults) == 1
        assert report.title.endswith("2 samples of the initial policy have no reward")
        assert report.remarks == []
    assert found(unscored).faults == ["no reward: the rewards give no sample a score (None)"]


def test_failures_are_faults():
    (fault,) = [fault for fault in found(broken).faults if "failures" in fault]
    assert "'one' fails on completions of the audit" in fault


def test_words_are_found_in_arguments_constants_closures_and_objects():
    analyzer = SimpleNamespace(lexicon={"closed": 9.0, ":-)": 3.0})

    def count_words(prompts, completions, words=("default",), bad=()):
        return [float(text in analyzer.lexicon) for text in completions]

    words = find_lexicon(
        Scorer({"one": Reward(count_words, kwargs={"bad": ["given", "two words"]})})
    )
    assert words[:3] == ["closed", "splendid", "joyful"]
    assert {"given", "default"} <= set(words)
    assert not {":-)", "two words"} & set(words)


def test_no_prompts_raise():
    with pytest.raises(ValueError, match="no prompts to audit with"):
        audit_open_text(Scorer({"one": Reward(cheerful)}), [], [])
