"""Metrics of held-out prompts: by hand, and against the packages they follow."""

import itertools
import math
from dataclasses import replace
from math import nan
from statistics import mean

import pytest
import torch
from lightning import Trainer
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu
from torch.utils.data import DataLoader

from litgrpo.evaluation import pass_at_k, wilson_interval
from litgrpo.evaluation.evaluator import Evaluation, summarize_rows
from litgrpo.evaluation.metrics import (
    DialogueScores,
    count_correct,
    count_turns,
    distinct_ngrams,
    episode_means,
    greedy_accuracy,
    initial_distance,
    measure_text,
    reply_counts,
    reward_means,
    sampled_accuracy,
    sum_logprobs,
    sum_rewards,
    text_quality,
)
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.sampling import Sampling
from litgrpo.text.overlap import token_f1, without_articles
from litgrpo.types import Episode, RewardTable, Rollout
from tests.support.models import prompt_batch, tiny_policy
from tests.support.raises import raises_for
from tests.support.standin import prompts, rollout_of

# 5 prompts, 4 samples each: 4, 2, 1, 0, 1 right
CORRECT = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
).double()


def reward_table() -> RewardTable:
    part = CORRECT.clone()
    part[:, 3] = torch.nan
    valid = torch.ones_like(part, dtype=torch.bool)
    valid[:, [0, 3]] = False
    return RewardTable({"right": part}, {"right": 2.0}, 2 * part.nan_to_num(), valid)


def accuracy_of(correct, num_samples, ks):
    return sampled_accuracy(count_correct(torch.tensor(correct)), num_samples, ks)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for correct, k in itertools.product(range(6), range(1, 6)):
        samples = [place < correct for place in range(5)]
        expected = mean(any(chosen) for chosen in itertools.combinations(samples, k))
        assert pass_at_k(5, correct, k) == pytest.approx(expected)


def test_the_report_by_hand() -> None:
    result = accuracy_of(CORRECT.tolist(), 4, (1, 2, 4))
    assert (result["avg@4"], result["pass@1"]) == pytest.approx((8 / 20, 8 / 20))
    # 1, 1 - 1/6, 1/2, 0, 1/2
    assert result["pass@2"] == pytest.approx((1 + 5 / 6 + 1 / 2 + 0 + 1 / 2) / 5)
    assert result["pass@4"] == pytest.approx(4 / 5)
    # rates 1, .5, .25, 0, .25: variance .14375, squared error .02875, effective size .24 / .02875
    low, high = wilson_interval(0.4 * 0.24 / 0.02875, 0.24 / 0.02875)
    assert (result["avg@4_low"], result["avg@4_high"]) == pytest.approx((low, high))
    result = greedy_accuracy(CORRECT[:, 1].tolist())
    assert result["greedy"] == pytest.approx(2 / 5)
    assert (result["greedy_low"], result["greedy_high"]) == pytest.approx(wilson_interval(2, 5))
    # sample 0 failed in another part, sample 3 abstained; samples 1 and 2: 2, 1, 1, 0, 0 right
    result = reward_means(sum_rewards(reward_table()))
    assert result["reward"] == pytest.approx(2 * (2 + 1 + 1 + 0 + 0) / 10)
    assert result["right"] == pytest.approx((3 + 1 + 1 + 0 + 1) / 15)


@pytest.mark.parametrize(
    ("correct", "accuracy", "unscored", "pass_2", "effective"),
    [
        # Rates 1, 1/2 and unknown: mean 3/4; pass@2 of the second prompt alone, 1.
        ([[1, nan, nan], [1, 0, nan], [nan] * 3], 0.75, 6 / 9, 1.0, 3),
        ([[0, nan, nan], [0, 0, 0]], 0.0, 2 / 6, 0.0, 2),
        # pass@2 = 1 - C(2, 2) / C(3, 2) = 2/3, and of one correct of two 1.
        ([[1, 0, 0], [nan, 0, 1]], 5 / 12, 1 / 6, (2 / 3 + 1) / 2, 5),
    ],
)
def test_unscored_samples_are_left_out_of_accuracies(
    correct, accuracy, unscored, pass_2, effective
):
    found = accuracy_of(correct, 3, (1, 2, 3))
    assert (found["avg@3"], found["pass@1"]) == pytest.approx((accuracy, accuracy))
    assert found["unscored_frac"] == pytest.approx(unscored)
    assert found["pass@2"] == pytest.approx(pass_2)
    expected = wilson_interval(accuracy * effective, effective)
    assert (found["avg@3_low"], found["avg@3_high"]) == pytest.approx(expected)


def test_a_prompt_counts_once_in_mean_rewards_however_many_samples_are_scored():
    rows = [{"reward": (3.0, 3), "a": (1.0, 1)}, {"reward": (0.0, 1), "a": (0.0, 0)}]
    rows.append({"reward": (0.0, 0), "a": (0.0, 0)})  # of which nothing is known
    result = reward_means(rows)
    assert (result["reward"], result["a"]) == (0.5, 1.0)
    assert (result["reward_low"], result["reward_high"]) == (0.0, 1.0)


def test_greedy_accuracy_is_that_of_the_scored_completions():
    found = greedy_accuracy([1.0, nan, 0.0, 1.0])
    assert (found["greedy"], found["greedy_unscored_frac"]) == pytest.approx((2 / 3, 0.25))
    assert (found["greedy_low"], found["greedy_high"]) == pytest.approx(wilson_interval(2, 3))


def test_a_single_reply_has_scores_without_an_interval():
    scores = DialogueScores()
    row = {"sampled": (1, 1), "rewards": {"reward": (1.0, 1)}}
    row["corpus"] = scores.count("a b c", {"answers": ["a b d"]})
    settings = Evaluation(num_samples=1, pass_at_k=[1], corpus_metrics=scores)
    found = summarize_rows([row], settings)
    assert "corpus_f1" in found
    assert [name for name in found if name.endswith(("_low", "_high"))] == [
        "avg@1_low",
        "avg@1_high",
    ]


# --- episodes ---


SAID = {"role": "assistant", "content": "a"}


def make_rollout(*turns):
    """Return two prompts with two episodes each; all turns but the last call a tool."""
    rollout = rollout_of(prompts("A", "B"))
    episodes = [Episode([SAID] * n, calls={"f": (n - 1, 0)} if n > 1 else {}) for n in turns]
    numbers = torch.zeros_like(rollout.completion_ids, dtype=torch.int16)
    return replace(rollout, turns=numbers, episodes=episodes)


def test_turns_and_calls_are_averaged_over_prompts():
    rows = count_turns(make_rollout(1, 3, 2, 2)) + count_turns(make_rollout(4, 4, 1, 1))
    assert episode_means(rows, "greedy_") == {
        "greedy_turns": pytest.approx((2 + 2 + 4 + 1) / 4),
        "greedy_tool_call_frac": pytest.approx((0.5 + 1 + 1 + 0) / 4),
    }


# --- text quality and the distance from the initial policy ---


def rollout() -> Rollout:
    """Two prompts, two samples each: loops, and texts without a repetition; the last is cut off."""
    ids = torch.tensor([[7, 7, 7], [7, 7, 7], [1, 2, 3], [4, 5, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    cut = torch.tensor([False, False, False, True])
    return Rollout(prompt_batch("a", "b"), 2, ids, mask, -0.5 * mask, cut)


def test_fluency_by_hand():
    assert text_quality(measure_text(rollout())) == pytest.approx(
        {
            "terminated_frac": 0.75,
            "len_mean": 2.75,
            "distinct_1": (1 / 6 + 1) / 2,  # one token of six, five of five
            "distinct_2": (1 / 4 + 1) / 2,
        }
    )


def test_samples_without_tokens_have_no_perplexity_and_no_ngrams():
    empty = replace(rollout(), turns=torch.full((4, 3), -1))
    found = initial_distance(sum_logprobs(empty, torch.zeros(4, 3)))
    assert all(map(math.isnan, found.values()))
    mask = torch.tensor([[1, 0, 0]] * 2 + [[1, 1, 1]] * 2).bool()
    short = replace(rollout(), completion_mask=mask)
    # 1 2 3 and 4 5 0; the first prompt has no pair of tokens
    assert text_quality(measure_text(short))["distinct_2"] == 1


def test_perplexity_and_kl_to_the_start_by_hand():
    start = torch.full((4, 3), -2.0)
    start[3, 2] = torch.nan  # no token of the policy
    found = initial_distance(sum_logprobs(rollout(), start))
    assert found["initial_perplexity"] == pytest.approx(math.exp(2.0))
    assert found["initial_kl"] == pytest.approx(1.5)  # -0.5 - -2


def test_a_text_that_the_initial_policy_cannot_write_has_infinite_perplexity():
    found = initial_distance(sum_logprobs(rollout(), torch.full((4, 3), -1e4)))
    assert found["initial_perplexity"] == math.inf


def test_a_text_of_one_token_has_no_pairs_to_compare():
    single, pairs = distinct_ngrams([[5], []])
    assert single == 1
    assert math.isnan(pairs)


def test_ngrams_do_not_cross_from_one_text_to_the_next():
    assert distinct_ngrams([[7, 7, 7], [7, 8]]) == [2 / 5, 2 / 3]


# --- corpus metrics ---


REPLIES = [
    "R: i have two dogs and a cat .",
    "The food is good",
    "i do not know , what about you ?",
    "",
    "hello",
]
ANSWERS = [
    ["i have two big dogs and one cat ."],
    ["food is really good here !", "the food was good ."],
    ["what do you do ? i do not work ."],
    ["yes"],
    ["hello there how are you ?"],
]
BARE = [REPLIES[0].removeprefix("R: "), *REPLIES[1:]]


def scores(replies=REPLIES, answers=ANSWERS):
    metrics = DialogueScores()
    pairs = zip(replies, answers, strict=True)
    return metrics.summarize([metrics.count(reply, {"answers": each}) for reply, each in pairs])


def test_f1_is_by_hand_after_squads_normalization():
    # The -> nothing, good == good: {food, is, good} of 3, reference {food, is, really, good, here};
    # {food, good} of {food, was, good}: 2 * 2 / (3 + 3).
    assert without_articles("The food, is good!") == "food is good"
    f1 = reply_counts(REPLIES[1], ANSWERS[1])[10]
    assert f1 == pytest.approx(max(2 * 3 / (3 + 5), 2 * 2 / (3 + 3)))


def test_corpus_numbers_are_those_of_the_libraries():
    single = [answers[:1] for answers in ANSWERS]
    report = scores(answers=single)
    expected = corpus_bleu(BARE, [[answers[0] for answers in single]]).score
    assert expected > 0
    assert report["corpus_bleu"] == pytest.approx(expected)
    for kind in ("rouge1", "rouge2", "rougeL"):
        judge = RougeScorer([kind])
        values = [
            judge.score(answers[0], reply)[kind].fmeasure
            for answers, reply in zip(single, BARE, strict=True)
        ]
        assert report[f"corpus_{kind}"] == pytest.approx(100 * sum(values) / 5)
    values = [
        token_f1(without_articles(reply), without_articles(answers[0]))
        for answers, reply in zip(single, BARE, strict=True)
    ]
    assert report["corpus_f1"] == pytest.approx(100 * sum(values) / 5)
    assert report["corpus_f1_low"] < report["corpus_f1"] < report["corpus_f1_high"]


def test_the_prefix_is_taken_away_once_and_only_if_asked():
    assert reply_counts("R: hello", "hello") == reply_counts(" hello", "hello")
    assert reply_counts("R: hello", "hello", strip="")[0] > reply_counts("hello", "hello")[0]


def test_a_missing_column_is_named():
    with raises_for("evaluation.corpus_metrics.answers", "replies"):
        DialogueScores(answers="replies").count("x", {"answers": "x"})


def always_one(prompts, completions):
    return [1.0] * len(prompts)


def test_a_validation_reports_them_for_the_greedy_replies():
    settings = Evaluation(num_samples=2, pass_at_k=[1], corpus_metrics=DialogueScores())
    grpo = GRPO("", {"one": Reward(always_one)}, max_completion_length=6, evaluation=settings)
    grpo.policy = tiny_policy("t5")
    columns = {"answers": [["tall"], ["hi hi"]]}
    batch = replace(prompt_batch("a", "hello"), columns=columns)
    trainer = Trainer(logger=False, enable_progress_bar=False)
    (report,) = trainer.validate(grpo, DataLoader([batch], batch_size=None), verbose=False)
    greedy = Sampling(temperature=0.0)
    replies = grpo.rollouter.generate(batch, "val", group_size=1, sampling=greedy).completions
    expected = scores(replies, columns["answers"])
    found = {name: value for name, value in report.items() if name.startswith("val/corpus_")}
    assert found == pytest.approx({f"val/{name}": value for name, value in expected.items()})
