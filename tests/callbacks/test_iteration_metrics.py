import logging
from types import SimpleNamespace

import pytest
import torch

from litgrpo.callbacks.iteration_metrics import (
    IterationMetrics,
    NoLearningSignal,
    clip_stats,
    has_loop,
    success_stats,
    token_stats,
)
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import StepReport
from tests.support.training import always_half, batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def numbers(**settings):
    """Metrics after two iterations."""
    grpo = module(reward=letters, max_iterations=2, check_invariants=False, **settings)
    return train(grpo, batches("a", "b")).callback_metrics


def test_a_run_logs_text_and_weight_metrics():
    found = numbers(update=UpdateConfig(max_grad_norm=1e-6))
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


def test_groups_are_all_correct_all_incorrect_or_mixed():
    success = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    found = success_stats(success)
    assert found["reward/correct_frac"] == 3 / 8
    assert found["reward/all_correct_frac"] == 1 / 4
    assert found["reward/all_incorrect_frac"] == 1 / 2


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
    grpo = module(reward=reward, max_iterations=iterations, check_invariants=False)
    train(grpo, batches("a", "b"))
    return [line for line in caplog.messages if line.startswith("No learning signal")]


def nothing(prompts, completions):
    return [None for _ in completions]


def test_equal_rewards_warn_after_ten_iterations_and_then_after_twenty(caplog):
    said = lines(caplog, always_half, 21)
    assert [line.split(" iterations")[0].split()[-1] for line in said] == ["10", "20"]
    assert "0.5" in said[0]
    assert "model.group_size" in said[0]


def test_missing_rewards_have_another_remedy(caplog):
    (said,) = lines(caplog, nothing, 10)
    assert "None" in said
    assert "group_size" not in said


def test_a_run_with_advantages_does_not_warn(caplog):
    assert lines(caplog, letters, 12) == []


def test_only_consecutive_iterations_count(caplog):
    def once(prompts, completions):
        """Differs within groups in the fifth call alone."""
        once.calls += 1
        return [float(n) if once.calls == 5 else 0.0 for n in range(len(completions))]

    once.calls = 0
    assert lines(caplog, once, 14) == []
