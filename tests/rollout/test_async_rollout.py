"""One-step off-policy: equals a sequential run of the same schedule, and resumes bitwise."""

from dataclasses import replace

import pytest
import torch

from litgrpo.algorithms.losses import ImportanceCorrection, Objective
from litgrpo.models.export import export
from litgrpo.rollout.async_rollout import Prefetch, _select_prompts, _stack_rows, _tensors_of
from litgrpo.rollout.engines.vllm import ServerEngine
from litgrpo.training.update_config import UpdateConfig
from tests.support.async_rollout import (
    Sequential,
    all_batches,
    assert_same_weights,
    run,
)
from tests.support.models import prompt_batch, tiny_policy
from tests.support.training import batches, module, train
from tests.support.vllm_stand_in import StandIn
from tests.training.parts import rollouter_of


def test_it_is_the_sequential_run_of_the_same_schedule_bit_for_bit():
    Sequential.batches = all_batches()
    correction = Objective(importance_correction=ImportanceCorrection())
    expected = run(Sequential, staleness=0, objective=correction)
    found = run()
    assert_same_weights(found, expected)
    assert found.versions == [0, 0, 1, 2, 3]
    plain = run(staleness=0, objective=correction)
    assert plain.versions == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError):
        assert_same_weights(found, plain)


def test_a_server_samples_meanwhile_and_the_run_is_the_same(tmp_path):
    export(tiny_policy("qwen2"), tmp_path)
    with StandIn(tmp_path) as server:
        given = {"engine": ServerEngine([server.url], send_uniforms=True)}
        found = run(**given)
        found.rollouter.prefetch.wait()
        given["objective"] = Objective(importance_correction=ImportanceCorrection())
        Sequential.batches = all_batches()
        expected = run(Sequential, staleness=0, **given)
    assert_same_weights(found, expected)
    assert found.versions == [0, 0, 1, 2, 3]


def test_a_run_goes_on_with_the_rollout_that_was_pending(tmp_path):
    whole = run()
    first = run(iterations=2)
    first.trainer.save_checkpoint(tmp_path / "two.ckpt")
    kept = torch.load(tmp_path / "two.ckpt", weights_only=True)["ahead"]
    assert (kept["iteration"], kept["version"]) == (2, 1)
    resumed = run(ckpt=tmp_path / "two.ckpt")
    assert_same_weights(resumed, whole)
    assert resumed.versions == [1, 2, 3]


def rollout_of(index, lengths):
    """Rows of these lengths, whose tokens are the number of their prompt."""
    group = len(lengths) // len(index)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = mask * torch.tensor(index).repeat_interleave(group)[:, None]
    tensors = {"completion_ids": ids, "completion_mask": mask, "sampler_logprobs": -1.0 * mask}
    return tensors | {"truncated": torch.tensor(lengths) == max(lengths)}


def test_what_two_processes_have_pending_is_given_to_whoever_asks_for_its_prompts():
    parts = [rollout_of([4, 7], [1, 2, 2, 1]), rollout_of([9, 2], [3, 1, 1, 2])]
    state = {"iteration": 2, "version": 1, "group": 2, "index": torch.tensor([4, 7, 9, 2])}
    prefetch = Prefetch(lambda: None)
    prefetch.load_state_dict(state | {"rollout": _stack_rows(parts)})
    pending = prefetch.pending
    kept = pending.future.result()
    assert kept.completion_ids.tolist()[1:6] == [
        [4, 4, 0],
        [7, 7, 0],
        [7, 0, 0],
        [9, 9, 9],
        [9, 0, 0],
    ]
    for index, part in zip(([4, 7], [9, 2]), parts, strict=True):  # as it was
        found = _tensors_of(_select_prompts(kept, pending.index, torch.tensor(index)))
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], part[name]) for name in part)
    mixed = _select_prompts(kept, pending.index, torch.tensor([2, 7]))  # of three processes, say
    assert mixed.completion_ids.tolist() == [[2, 0], [2, 2], [7, 7], [7, 0]]
    assert mixed.truncated.tolist() == [False, False, True, False]


def test_a_rollout_of_another_iteration_or_of_other_prompts_is_not_used():
    rows = rollout_of([4, 7], [1, 2, 2, 1])
    state = {"iteration": 2, "version": 1, "group": 2, "index": torch.tensor([4, 7])}
    for iteration, asked in ((3, [4, 7]), (2, [4, 8])):
        rollouter = rollouter_of(tiny_policy("qwen2"), group_size=2)
        rollouter.prefetch = Prefetch(lambda: None)
        rollouter.prefetch.load_state_dict(state | {"rollout": rows})
        prompts = replace(prompt_batch("a", "b"), index=torch.tensor(asked))
        with pytest.raises(ValueError, match=f"those of iteration {iteration}: the data have"):
            rollouter.generate(prompts, "train", iteration)


def test_with_one_optimizer_step_old_log_probabilities_are_the_learning_policys():
    grpo = run()
    assert grpo.coefficients.objective.importance_correction is not None
    assert not grpo.learner.reuse_sampler_logprobs
    # The distance to the weights before, which is no rounding.
    assert grpo.trainer.callback_metrics["policy/sampler_mismatch"] > 1e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dynamic_sampling_attempts": 2}, "update.staleness"),
        ({"update": UpdateConfig(staleness=1)}, "needs litgrpo.PromptData"),
    ],
)
def test_what_cannot_be_sampled_ahead_is_refused(settings, said):
    def run_stale():
        grpo = module(**{"update": UpdateConfig(staleness=1)} | settings)
        train(grpo, batches("a", "hello there"))

    with pytest.raises(ValueError, match=said):
        run_stale()


def test_more_than_one_step_is_refused():
    with pytest.raises(ValueError, match=r"update\.staleness is 2; it must be one of: 0, 1"):
        UpdateConfig(staleness=2)


def test_without_a_source_it_samples_as_others():
    grpo = module(update=UpdateConfig(staleness=1))
    grpo.configure_model()
    assert grpo.rollouter.prefetch is None
    assert len(grpo.rollouter.generate(batches("a").dataset[0], "train").completions) > 0


def test_an_iteration_that_a_signal_drops_keeps_its_rollout():
    prefetch = run(iterations=3).rollouter.prefetch
    for iteration, version in ((3, 2), (2, 1)):
        state = prefetch.state_dict(iteration)
        assert (state["iteration"], state["version"]) == (iteration, version)
    assert prefetch.state_dict(1) is None
