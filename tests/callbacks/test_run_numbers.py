from types import SimpleNamespace

import pytest
import torch

from litgrpo.callbacks.run_numbers import RunNumbers, clipped, loops, of_success, of_tokens
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import StepReport
from tests.support.training import batches, letters, module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def numbers(**settings):
    """What two iterations logged last."""
    grpo = module(reward=letters, max_iterations=2, check_invariants=False, **settings)
    return train(grpo, batches("a", "b")).callback_metrics


def test_a_run_logs_what_its_texts_and_its_weights_say():
    found = numbers(update=UpdateConfig(max_grad_norm=1e-6))
    assert found["data/prompts_seen"] == 4
    assert 0 < found["completion/unique_frac"] <= 1
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
    assert of_tokens(rollout, policy)["prompt/begin_tokens"] == (1 + 2 + 0) / 3


def test_weights_that_do_not_move_are_seen():
    still = numbers(optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    assert still["optim/update_rel"] == 0


def test_the_largest_ratio_is_of_all_steps_and_micro_batches():
    config = UpdateConfig(epochs_per_rollout=3, micro_batch_size=2)
    fast = numbers(update=config, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    assert fast["policy/ratio_max"] > 1


def test_groups_are_all_right_all_wrong_or_neither():
    success = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    found = of_success(success)
    assert found["reward/correct_frac"] == 3 / 8
    assert found["reward/all_correct_frac"] == 1 / 4
    assert found["reward/all_incorrect_frac"] == 1 / 2


def test_a_loop_is_four_tokens_four_times_and_padding_is_none():
    loop = [1, 2, 3, 4] * 4
    three = [1, 2, 3, 4] * 3 + [9, 8, 7, 6]
    padded = [5, 6, 7] + [0] * 13
    ids = torch.tensor([loop, three, padded])
    assert loops(ids, ids != 0).tolist() == [True, False, False]
    assert loops(ids[:, :5], ids[:, :5] != 0).tolist() == [False] * 3


def test_steps_without_a_gradient_are_not_counted_as_clipped():
    def report(norm):
        return StepReport(0.1, {"optim/grad_norm": torch.tensor([norm, 1.0])})

    steps = [report(0.5), report(3.0), StepReport(0.1, skipped={})]
    assert clipped(steps, 1.0)["optim/clipped_frac"].tolist() == [1, 2]
    assert clipped(steps, None)["optim/clipped_frac"].tolist() == [0, 2]


def test_the_module_brings_it():
    assert any(isinstance(each, RunNumbers) for each in module().configure_callbacks())
