import csv
import logging
from math import isfinite, nan
from types import SimpleNamespace

import pytest
import torch

from litgrpo.callbacks.iteration_metrics import (
    IterationMetrics,
    NoLearningSignal,
    clip_stats,
    has_loop,
    length_stats,
    success_stats,
    task_stats,
    token_stats,
)
from litgrpo.callbacks.loggers import MetricsCSV
from litgrpo.data.modules import PromptData
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.metrics import average_over_ranks, mean_and_extremes
from litgrpo.rewards import Scoring
from litgrpo.types import RewardTable, StepReport
from tests.support.raises import raises_for
from tests.support.training import always_half, batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


ONE = torch.ones(1, 2, dtype=torch.float64)


def numbers(**settings):
    """Metrics after two iterations."""
    grpo = module(reward=letters, max_iterations=2, check_invariants=False, **settings)
    return train(grpo, batches("a", "b")).callback_metrics


def test_a_run_logs_text_and_weight_metrics():
    found = numbers(
        update=UpdateConfig(max_grad_norm=1e-6), evaluation=Evaluation(success_threshold=0.5)
    )
    assert found["data/prompts_seen"] == 4
    assert 0 < found["completion/unique_frac"] <= 1
    assert {"completion/correct_len_mean", "completion/incorrect_len_mean"} <= found.keys()
    assert found["prompt/begin_tokens"] == 1
    assert found["optim/clipped_frac"] == 1
    assert 1e-9 < found["optim/update_rel"] < 1e-2
    assert found["policy/ratio_max"] == 1


def test_begin_tokens_count_in_front_of_a_prompt_and_not_before_later_messages():
    pad, begin = 0, 1
    ids = torch.tensor([[pad, begin, 7, begin, 8], [begin, begin, 7, 8, 9], [7, begin, 7, 8, 9]])
    rows = torch.zeros(3, 1, dtype=torch.long)
    rollout = SimpleNamespace(
        prompts=SimpleNamespace(prompt_ids=ids, prompt_mask=ids != pad),
        completion_ids=rows,
        loss_mask=rows == 0,
    )
    tokenizer = SimpleNamespace(bos_token_id=begin)
    policy = SimpleNamespace(eos_ids=(2,), tokenizer=tokenizer)
    assert token_stats(rollout, policy)["prompt/begin_tokens"] == (1 + 2 + 0) / 3


def test_unchanged_weights_have_an_update_of_zero():
    still = numbers(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    assert still["optim/update_rel"] == 0


def test_the_largest_ratio_is_over_all_steps_and_micro_batches():
    config = UpdateConfig(epochs_per_rollout=3, micro_batch_size=2)
    fast = numbers(update=config, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    assert fast["policy/ratio_max"] > 1


@pytest.mark.parametrize(
    ("success", "correct", "all_correct", "all_incorrect"),
    [
        ([[1, 1], [0, 0], [1, 0], [0, 0]], [3, 8], [1, 4], [2, 4]),
        ([[1, nan], [nan, 0], [nan, nan]], [1, 2], [1, 2], [1, 2]),
        ([[nan, nan]], [0, 0], [0, 0], [0, 0]),
    ],
)
def test_groups_are_all_correct_all_incorrect_or_mixed(
    success, correct, all_correct, all_incorrect
):
    found = success_stats(torch.tensor(success).double())
    assert found["reward/correct_frac"].tolist() == correct
    assert found["reward/all_correct_frac"].tolist() == all_correct
    assert found["reward/all_incorrect_frac"].tolist() == all_incorrect


def test_statistics_of_tasks_and_lengths_leave_out_unscored_rows():
    total = torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 1.0]]).double()
    valid = torch.tensor([[True, False], [False, False], [True, True]])
    table = RewardTable({}, {}, total, valid, tasks=["a", "a", "b"])
    rollout = SimpleNamespace(lengths=torch.tensor([2, 9, 9, 9, 4, 8]))
    success = torch.tensor([[1.0, nan], [nan, nan], [1.0, 0.0]]).double()
    stats = task_stats(["a", "b", "c"], rollout, table, success)
    found = {name: pair.tolist() for name, pair in stats.items()}
    assert found["task/a/reward"] == found["task/a/correct_frac"] == [1, 1]
    assert found["task/a/zero_variance_groups_frac"] == [1, 1]  # the second group has no reward
    assert found["task/b/reward"] == [4, 2]
    assert found["task/b/zero_variance_groups_frac"] == [0, 1]
    assert found["task/c/frac"] == [0, 3]
    assert found["task/c/reward"] == [0, 0]
    lengths = {name: pair.tolist() for name, pair in length_stats(rollout, success).items()}
    assert lengths["completion/correct_len_mean"] == [6, 2]
    assert lengths["completion/incorrect_len_mean"] == [8, 1]


def test_what_an_iteration_did_not_measure_is_not_logged(tmp_path):
    """In the second iteration no completion has a reward."""
    calls = []

    def not_the_second(prompts, completions):
        calls.append(1)
        return [None if len(calls) == 2 else float(n) for n in range(len(completions))]

    settings = {"scoring": Scoring(num_workers=0), "check_invariants": False}
    grpo = module(reward=not_the_second, max_iterations=3, **settings)
    train(grpo, batches("a", "b"), logger=MetricsCSV(tmp_path), log_every_n_steps=1)
    with (tmp_path / "metrics.csv").open() as file:
        first, second, third = csv.DictReader(file)
    names = ["mean", "std", "min", "max", "group_std", "zero_variance_groups_frac", "correct_frac"]
    names = [f"reward/{name}" for name in names]
    names += ["policy/advantage_mean", "policy/advantage_std", "completion/incorrect_len_mean"]
    for name in names:
        assert (first[name] != "", second[name], third[name] != "") == (True, "", True), name
    assert float(second["reward/failed_frac"]) == float(second["reward/unscored_groups_frac"]) == 1
    assert float(second["completion/len_mean"]) > 0
    assert all(isfinite(float(x)) for row in (first, second, third) for x in row.values() if x)


def test_a_mean_and_an_extreme_of_nothing_are_left_out():
    nothing, some = torch.tensor([False, False]), torch.tensor([False, True])
    lengths = torch.tensor([4.0, 7.0])
    seen = mean_and_extremes("ended", lengths, nothing) | mean_and_extremes("cut", lengths, some)
    clipped = {"policy/clip_low_frac": torch.tensor([0.0, 0.0])}
    steps = [StepReport(0.1, clipped), StepReport(0.1, {n: x + 1 for n, x in clipped.items()})]
    found = average_over_ranks(seen, steps[:1], SingleProcess(), torch.device("cpu"))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"cut_mean": 7, "cut_min": 7, "cut_max": 7, "optim/lr": 0.1}
    )
    found = average_over_ranks({}, steps, SingleProcess(), torch.device("cpu"))
    names = ("policy/clip_low_frac", "policy/clip_low_frac_min", "policy/clip_low_frac_max")
    assert [float(found[name]) for name in names] == [1, 1, 1]  # of the second step alone


def test_a_loop_is_four_tokens_four_times_and_padding_does_not_count():
    loop = [1, 2, 3, 4] * 4
    three = [1, 2, 3, 4] * 3 + [9, 8, 7, 6]
    padded = [5, 6, 7] + [0] * 13
    ids = torch.tensor([loop, three, padded])
    assert has_loop(ids, ids != 0).tolist() == [True, False, False]
    assert has_loop(ids[:, :5], ids[:, :5] != 0).tolist() == [False] * 3


def test_steps_without_a_gradient_are_not_counted_as_clipped():
    def report(norm):
        return StepReport(0.1, {"optim/grad_norm": torch.tensor([norm, 1.0])})

    steps = [report(0.5), report(3.0), StepReport(0.1, skipped={})]
    assert clip_stats(steps, 1.0)["optim/clipped_frac"].tolist() == [1, 2]
    assert clip_stats(steps, None)["optim/clipped_frac"].tolist() == [0, 2]


def test_the_module_adds_both_callbacks():
    added = {type(each) for each in module().configure_callbacks()}
    assert added >= {IterationMetrics, NoLearningSignal}


def lines(caplog, reward, iterations):
    """Warnings of a run with this reward."""
    caplog.set_level(logging.INFO, "litgrpo")
    settings = {"scoring": Scoring(num_workers=0), "check_invariants": False}
    train(module(reward=reward, max_iterations=iterations, **settings), batches("a", "b"))
    return [line for line in caplog.messages if line.startswith("No learning signal")]


def nothing(prompts, completions):
    return [None for _ in completions]


def test_equal_rewards_warn_after_ten_iterations_and_then_after_twenty(caplog):
    said = lines(caplog, always_half, 21)
    assert [line.split(" iterations")[0].split()[-1] for line in said] == ["10", "20"]
    assert "0.5" in said[0]
    assert "model.group_size" in said[0]


@pytest.mark.parametrize(("reward", "count"), [(always_half, 1), (letters, 0)])
def test_equal_held_out_rewards_warn_once_before_training(caplog, reward, count):
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module(reward=reward, max_iterations=2, check_invariants=False)
    texts = ["a", "b"], ["c", "d", "e"]
    data = PromptData(texts[0], val=texts[1], batch_size=2, eval_batch_size=2)
    train(grpo, data, num_sanity_val_steps=-1, val_check_interval=1)
    said = [line for line in caplog.messages if "All held-out rewards are 0.5" in line]
    assert len(said) == count


@pytest.mark.parametrize("iterations", [1, 3, 30])
def test_a_run_in_which_no_completion_has_a_reward_fails(iterations):
    grpo = module(reward=nothing, max_iterations=iterations, check_invariants=False)
    with raises_for(f"no completion of {min(iterations, 10)} iteration", "'letters'", "None"):
        train(grpo, batches("a", "b"))


def test_missing_rewards_after_others_have_another_remedy(caplog):
    def at_first(prompts, completions):
        at_first.calls += 1
        return [float(n) if at_first.calls == 1 else None for n in range(len(completions))]

    at_first.calls = 0
    (said,) = lines(caplog, at_first, 12)
    assert "None" in said
    assert "group_size" not in said


def test_a_resumed_run_remembers_that_it_had_rewards():
    before, after = NoLearningSignal(), NoLearningSignal(patience=1)

    def outputs_of(rewards, advantages):
        return {
            "iteration": SimpleNamespace(
                rewards=rewards, batch=SimpleNamespace(advantages=advantages)
            )
        }

    scored = RewardTable({"r": ONE}, {"r": 1.0}, ONE, ONE == 1)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(reduce_boolean_decision=lambda x, all: x), should_stop=True
    )
    before.on_train_batch_end(trainer, None, outputs_of(scored, ONE))
    after.load_state_dict(before.state_dict())
    unscored = RewardTable({"r": torch.nan * ONE}, {"r": 1.0}, 0 * ONE, ONE == 0)
    after.on_train_batch_end(trainer, None, outputs_of(unscored, 0 * ONE))
    after.on_train_end(trainer, None)


def test_a_run_with_advantages_does_not_warn(caplog):
    assert lines(caplog, letters, 12) == []


def test_only_consecutive_iterations_count(caplog):
    def once(prompts, completions):
        """Differs within groups in the fifth call alone."""
        once.calls += 1
        return [float(n) if once.calls == 5 else 0.0 for n in range(len(completions))]

    once.calls = 0
    assert lines(caplog, once, 14) == []
