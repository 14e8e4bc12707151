"""The evaluator: what it samples, counts and reports."""

import math
from dataclasses import replace

import pytest

from litgrpo.evaluation.evaluator import Evaluation, Evaluator
from litgrpo.evaluation.metrics import CorpusMetrics
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.scorer import Scorer
from litgrpo.rewards.scoring import Scoring
from litgrpo.rollout.sampling import Sampling
from tests.learning.parts import letters, rollouter_of
from tests.support.models import prompt_batch, tiny_policy
from tests.support.playing import Echo, episodes_of
from tests.support.raises import raises_for

BATCH = prompt_batch("a", "hello there", "xyz")


def grade(prompts, completions, **_):
    """0, 1, 2, 3 and again from 0."""
    return [float(row % 4) for row in range(len(completions))]


def zero(prompts, completions, **_):
    return [0.0] * len(completions)


def odd(prompts, completions, **_):
    """Fails for every second completion."""
    return [1.0 if row % 2 else float("nan") for row in range(len(completions))]


def evaluator(*, function=letters, **settings):
    parts = {"first": Reward(function), "second": Reward(grade, weight=0.5)}
    return Evaluator(Evaluation(**settings), Scorer(parts, Scoring(num_workers=0)))


def rollouter():
    return rollouter_of(tiny_policy("qwen2"))


def test_successes_of_the_samples_are_counted_at_the_threshold():
    judge = evaluator(success_reward="second", success_threshold=2.0, greedy=False)
    answered = judge.evaluate(rollouter(), BATCH, "val", 0)
    rollout, rewards = answered.rollout, answered.rewards
    assert rewards.total.shape == (3, 4)
    report = judge.report("val")
    assert report["val/avg@4"] == 0.5  # two of 0, 1, 2, 3
    assert report["val/pass@4"] == 1.0
    assert report["val/second"] == 1.5
    assert report["val/first"] == pytest.approx(float(rewards.components["first"].mean()))
    assert len(rollout.completions) == 12
    assert not [name for name in report if "greedy" in name]


def test_an_evaluation_has_the_definitions_of_what_it_measures():
    judge = evaluator(success_reward="second", success_threshold=2.0, greedy=False)
    rule = f"reward 'second' >= 2 ({__name__}.grade)"
    found = judge.evaluate(rollouter(), BATCH, "val", 0).definitions
    assert (found["correct"], found["rewards/second"]) == (rule, f"{__name__}.grade")
    assert found["reward"].endswith(f" + 0.5 * second ({__name__}.grade)")


def test_the_heaviest_reward_counts_unless_another_is_named():
    assert evaluator().success_rewards == {"": "first"}  # of equal weights
    assert evaluator().success_rule == "reward 'first' >= 1"
    rewards = {"format": Reward(letters, weight=0.2), "exact": Reward(grade), "last": Reward(zero)}
    heaviest = Evaluator(Evaluation(), Scorer(rewards, Scoring(num_workers=0)))
    assert heaviest.success_rewards == {"": "exact"}
    with raises_for("evaluation.success_reward", "secnd"):
        evaluator(success_reward="secnd")


def test_the_most_likely_reply_is_counted_on_its_own():
    judge = evaluator(success_threshold=0.5)
    policy = rollouter()
    judge.evaluate(policy, BATCH, "val", 0)
    greedy = policy.generate(BATCH, "val", group_size=1, sampling=Sampling(temperature=0.0))
    right = [value >= 0.5 for value in letters(BATCH.prompts, greedy.completions)]
    assert judge.report("val")["val/greedy"] == pytest.approx(sum(right) / 3)


def test_a_success_reward_that_scores_nothing_has_no_accuracy():
    def abstains(prompts, completions, **_):
        return [None] * len(completions)

    parts = {"only": Reward(abstains)}
    judge = Evaluator(Evaluation(success_threshold=-1.0), Scorer(parts, Scoring(num_workers=0)))
    judge.evaluate(rollouter(), BATCH, "val", 0)
    report = judge.report("val")
    assert report["val/unscored_frac"] == report["val/greedy_unscored_frac"] == 1
    assert not [name for name in report if "avg@" in name or "pass@" in name or "reward" in name]
    assert not {"val/greedy", "val/greedy_low", "val/only"} & report.keys()
    assert not [value for value in report.values() if math.isnan(value)]


def test_a_completion_whose_other_reward_failed_is_left_out_of_accuracy():
    parts = {"first": Reward(lambda completions: [1.0] * len(completions)), "other": Reward(odd)}
    scorer = Scorer(parts, Scoring(num_workers=0, max_failed_frac=1.0))
    judge = Evaluator(Evaluation(success_threshold=0.5, greedy=False), scorer)
    evaluated = judge.evaluate(rollouter(), BATCH, "val", 0)
    assert (~evaluated.correct.isnan()).tolist() == evaluated.rewards.valid.tolist()
    report = judge.report("val")
    assert (report["val/avg@4"], report["val/unscored_frac"]) == (1.0, 0.5)


def test_a_reward_of_another_task_does_not_decide_and_has_no_mean():
    """A completion that the deciding reward did not score is left out."""
    decides = [None, 1.0, 0.0, None] * 3
    parts = {
        "decides": Reward(lambda completions: decides[: len(completions)]),
        "other": Reward(lambda completions: [0.25] * len(completions), weight=0.5),
        "never": Reward(lambda completions: [None] * len(completions), weight=0.1),
    }
    judge = Evaluator(Evaluation(greedy=False), Scorer(parts, Scoring(num_workers=0)))
    judge.evaluate(rollouter(), BATCH, "val", 0)
    report = judge.report("val")
    assert (report["val/avg@4"], report["val/pass@1"]) == (0.5, 0.5)
    assert report["val/unscored_frac"] == 0.5
    assert report["val/reward"] == pytest.approx((3 * 0.125 + 1.125) / 4)  # of all, once each
    assert "val/never" not in report
    assert "val/pass@4" not in report  # no prompt has four scored samples


def test_a_distance_that_some_prompts_lack_is_not_reported():
    """As if the initial policy could not be loaded on another rank."""
    judge, policy = evaluator(greedy=False), rollouter()
    judge.evaluate(policy, BATCH, "val", 0)
    judge.measure_initial_distance(lambda rollout: rollout.sampler_logprobs)
    judge.evaluate(policy, replace(BATCH, index=BATCH.index + 3), "val", 0)
    report = judge.report("val")
    assert "val/distinct_1" in report
    assert not [name for name in report if "initial" in name]


def test_a_report_forgets_what_it_reported():
    judge, policy = evaluator(success_reward="second", success_threshold=2.0), rollouter()
    judge.evaluate(policy, BATCH, "val", 0)
    once = judge.report("val")
    judge.evaluate(policy, BATCH, "val", 7)
    assert judge.report("val") == once  # the same random numbers in every iteration


def test_each_purpose_has_random_numbers_of_its_own():
    policy = rollouter()
    val, again, test = (
        evaluator().evaluate(policy, BATCH, purpose, n).rollout
        for purpose, n in (("val", 0), ("val", 5), ("test", 0))
    )
    assert val.completions == again.completions
    assert val.completions != test.completions


def test_evaluation_is_not_counted_as_training():
    policy = rollouter()
    evaluator().evaluate(policy, BATCH, "val", 0)
    assert policy.generated_tokens == 0


def test_the_corpus_gets_the_reply_that_would_be_given():
    class Corpus(CorpusMetrics):
        def count(self, reply, columns):
            return [reply, columns["level"]]

        def summarize(self, rows):
            self.rows = rows
            return {"corpus": 1.0}

    batch, policy = replace(BATCH, columns={"level": [1, 2, 3]}), rollouter()
    for greedy in (True, False):
        corpus = Corpus()
        judge = evaluator(greedy=greedy, corpus_metrics=corpus)
        rollout = judge.evaluate(policy, batch, "val", 0).rollout
        likely = policy.generate(batch, "val", group_size=1, sampling=Sampling(temperature=0.0))
        replies = likely.completions if greedy else rollout.completions[::4]
        assert judge.report("test")["test/corpus"] == 1.0
        assert corpus.rows == [
            [reply, level] for reply, level in zip(replies, (1, 2, 3), strict=True)
        ]


def test_answers_name_prompt_completion_and_columns_and_are_not_judged():
    def never(prompts, completions):
        raise AssertionError

    batch = replace(BATCH, columns={"level": [1, 2, 3]})
    policy = rollouter()
    rows = evaluator(function=never).predict(policy, batch)
    greedy = policy.generate(batch, "predict", group_size=1, sampling=Sampling(temperature=0.0))
    assert [row["completion"] for row in rows] == greedy.completions
    assert [(row["prompt"], row["columns"]["level"]) for row in rows] == list(
        zip(batch.prompts, (1, 2, 3), strict=True)
    )
    assert [row["truncated"] for row in rows] == greedy.truncated.tolist()
    assert {"reasoning", "answer"} <= rows[0].keys()
    named = replace(BATCH, columns={name: ["mine"] * 3 for name in ("answer", "completion", "id")})
    for row, other in zip(evaluator().predict(policy, named), rows, strict=True):
        assert row["columns"] == {"answer": "mine", "completion": "mine", "id": "mine"}
        assert (row["answer"], row["completion"]) == (other["answer"], other["completion"])


def test_answers_of_episodes_hold_their_messages_and_rewards():
    class Abstaining(Echo):
        """Gives no reward for the second turn."""

        def step(self, action):
            result = super().step(action)
            return replace(result, reward=None) if result.reward == 2 else result

    policy = rollouter_of(tiny_policy("qwen2"), episodes=episodes_of(Abstaining((3,))))
    policy.max_completion_length = 40
    for row in evaluator().predict(policy, BATCH):
        assert [message["role"] for message in row["messages"]][::2] == ["assistant"] * 3
        assert row["turn_rewards"] == [1.0, None, 3.0]
        assert row["calls"] == {"echo": [3, 0]}
        assert not row["failed"]
    assert "messages" not in evaluator().predict(rollouter(), BATCH)[0]


def test_answers_are_drawn_from_the_filtered_distribution():
    policy, drawn = rollouter(), []
    generate = policy.generate

    def record_sampling(*args, sampling, **kwargs):
        drawn.append(sampling)
        return generate(*args, sampling=sampling, **kwargs)

    policy.generate = record_sampling
    likely = {"predict_temperature": 1.0, "predict_top_p": 1e-6}  # the most likely token alone
    one = evaluator(**likely).predict(policy, BATCH)
    greedy = evaluator(predict_temperature=0.0).predict(policy, BATCH)
    free = evaluator(predict_temperature=1.0).predict(policy, BATCH)
    assert one == greedy
    assert free != greedy
    assert [sampling.top_p for sampling in drawn] == [1e-6, 1.0, 1.0]


def test_a_set_that_nobody_answered_is_not_reported():
    judge, policy = evaluator(greedy=False), rollouter()
    judge.start(("easy", "hard"))
    judge.evaluate(policy, BATCH, "val", 0, name="easy")
    judge.measure_initial_distance(lambda rollout: rollout.sampler_logprobs)
    report = judge.report("val")
    assert {"val/easy/avg@4", "val/easy/initial_kl"} <= report.keys()
    assert not [name for name in report if "hard" in name]


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"num_samples": 0}, ("evaluation.num_samples", "0")),
        ({"num_samples": 2}, ("evaluation.pass_at_k", "4")),
        ({"pass_at_k": [0]}, ("evaluation.pass_at_k", "0")),
        ({"predict_top_p": 0.0}, ("evaluation.predict_top_p", "0.0")),
    ],
)
def test_impossible_settings_are_rejected(settings, names):
    with raises_for(*names):
        Evaluation(**settings)
