"""Off-policy by k steps: equals a sequential run of the same schedule, and resumes bitwise."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.turns import GiGPO
from litgrpo.data.modules import PromptData
from litgrpo.models.loading.export import export
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.rollout.groups import join_rollouts, pack_rollout, select_groups
from litgrpo.rollout.servers.vllm import ServerEngine
from litgrpo.rollout.sources.ahead import Ahead, InFlight
from litgrpo.rollout.sources.base import SourceParts
from litgrpo.types import Rollout
from tests.learning.parts import rollouter_of
from tests.support.checkpoints import digest
from tests.support.models import prompt_batch, tiny_policy
from tests.support.playing import Echo
from tests.support.training import GROUP, LENGTH, batches, letters, module, train
from tests.support.vllm_stand_in import StandIn

CORRECTED = Objective(importance_correction=ImportanceCorrection())
ROWS = [{"prompt": text} for text in ("a", "hello there", "what is it?", "7", "xy")]
ITERATIONS = 5  # over two epochs of three batches


class Sequential(GRPO):
    """The schedule written down with nothing beside anything, from the list of all batches."""

    batches, steps = (), 1

    def training_step(self, prompts, batch_idx):
        n, kept = self.iteration, vars(self).setdefault("kept", {})
        generate = self.rollouter.generate
        for ahead in range(self.steps + 1):
            if n + ahead not in kept:
                rollout = generate(self.batches[n + ahead], "train", n + ahead)
                kept[n + ahead] = rollout
        current = kept[n]

        def learn_from_it(asked, purpose, iteration, *, attempt=0):
            if attempt:
                return generate(asked, purpose, iteration, attempt=attempt)
            return current

        self.rollouter.generate = learn_from_it
        try:
            return super().training_step(prompts, batch_idx)
        finally:
            del self.rollouter.generate


class Recording(GRPO):
    """Notes whose weights it learned from, and saves a checkpoint after `save_after` iterations."""

    save_after, file = 0, None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.iteration == self.save_after:
            self.trainer.save_checkpoint(self.file)

    def training_step(self, prompts, batch_idx):
        shown = super().training_step(prompts, batch_idx)
        self.versions = [*vars(self).get("versions", []), shown["iteration"].rollout.policy_version]
        self.rollouts = [*vars(self).get("rollouts", []), shown["iteration"].rollout]
        return shown


def data():
    return PromptData(ROWS, batch_size=2)


def run(kind=Recording, staleness=1, engine=None, ckpt=None, saved=None, **settings):
    """A finished run.

    Args:
        ckpt: checkpoint that it continues.
        saved: (iterations, file) of a checkpoint that it writes.
    """
    if staleness:
        settings = {"source": Ahead(staleness)} | settings
    sizes = {"group_size": GROUP, "max_completion_length": LENGTH, "max_iterations": ITERATIONS}
    given = {"engine": engine or LocalEngine(), "rewards": {"letters": Reward(letters)}}
    grpo = kind("", **given | sizes | settings)
    grpo.policy = tiny_policy("qwen2")
    if saved is not None:
        grpo.save_after, grpo.file = saved
    train(grpo, data(), ckpt)
    return grpo


def sequential(steps, **settings):
    """A finished run of the sequential schedule, `steps` iterations off-policy."""
    Sequential.batches, Sequential.steps = all_batches(steps), steps
    return run(Sequential, staleness=0, **settings)


def assert_same_weights(one, other):
    weights, others = one.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in others)


@cache
def all_batches(steps):
    """Return the batches of the first epochs, in order."""

    class Seen(GRPO):
        def training_step(self, prompts, batch_idx):
            found.append(prompts)
            return super().training_step(prompts, batch_idx)

    found = []
    run(Seen, staleness=0, max_iterations=ITERATIONS + steps)
    return found


@pytest.mark.parametrize("steps", [1, 4])
def test_it_is_the_sequential_run_of_the_same_schedule_bit_for_bit(steps):
    expected = sequential(steps, objective=CORRECTED)
    found = run(staleness=steps, objective=CORRECTED)
    assert_same_weights(found, expected)
    assert found.versions == [max(0, n - steps) for n in range(ITERATIONS)]
    with pytest.raises(AssertionError):
        assert_same_weights(found, run(staleness=0, objective=CORRECTED))


def test_a_server_samples_meanwhile_and_the_run_is_the_same(tmp_path):
    steps = 1
    export(tiny_policy("qwen2"), tmp_path)
    with StandIn(tmp_path) as server:
        given = {"engine": ServerEngine([server.url], send_uniforms=True)}
        found = run(staleness=steps, **given)
        found.source.pending.wait()
        expected = sequential(steps, objective=CORRECTED, **given)
    assert_same_weights(found, expected)
    assert found.versions == [max(0, n - steps) for n in range(ITERATIONS)]


@pytest.mark.parametrize(("steps", "iterations"), [(1, 1), (4, 2), (2, 3)])
def test_a_run_goes_on_with_the_rollouts_that_were_pending(tmp_path, steps, iterations):
    file = tmp_path / "first.ckpt"
    whole = run(staleness=steps, saved=(iterations, file))
    kept = torch.load(file, weights_only=True)["source"]
    assert [each["iteration"] for each in kept] == [*range(iterations, iterations + steps)]
    resumed = run(staleness=steps, ckpt=file)
    assert_same_weights(resumed, whole)
    assert resumed.versions == whole.versions[iterations:]


def lucky(prompts, completions):
    """A reward that is often the same for a whole group."""
    return [float(sum(map(ord, text)) % 4 == 0) for text in completions]


def test_with_dynamic_sampling_other_groups_come_from_the_current_weights(tmp_path):
    given = {
        "rewards": {"lucky": Reward(lucky)},
        "staleness": 2,
        "dynamic_sampling_attempts": 2,
        "objective": CORRECTED,
    }
    found = run(**given, saved=(3, tmp_path / "three.ckpt"))
    expected = sequential(2, **{name: given[name] for name in given if name != "staleness"})
    assert_same_weights(found, expected)
    ages = [n - each.token_versions.amax(1) for n, each in enumerate(found.rollouts)]
    assert any((age == 0).any() and (age == 2).any() for age in ages[2:])  # rows of both kinds
    assert_same_weights(run(ckpt=tmp_path / "three.ckpt", **given), expected)


def test_episodes_are_played_ahead_by_a_server_and_resumed(tmp_path):
    export(tiny_policy("qwen2"), tmp_path / "model")
    with StandIn(tmp_path / "model") as server:
        given = {
            "staleness": 2,
            "environment": Echo(),
            "max_completion_length": 24,
            "episode": EpisodeSettings(
                max_turns=2,
                max_turn_tokens=3,
                max_observation_tokens=8,
                close_truncated_turns=True,
                num_workers=0,
                turn_format="inline",
            ),
            "objective": replace(CORRECTED, advantages=GiGPO()),
            "engine": ServerEngine([server.url], send_uniforms=True),
        }
        found = run(**given, saved=(3, tmp_path / "three.ckpt"))
        resumed = run(ckpt=tmp_path / "three.ckpt", **given)
        del given["staleness"]
        expected = sequential(2, **given)
    assert found.versions == [0, 0, 0, 1, 2]
    assert any(len(each.assistant_texts) > 1 for each in found.rollouts[-1].episodes)
    assert_same_weights(found, expected)
    assert_same_weights(resumed, expected)


def rollout_of(index, lengths):
    """Rows of these lengths, whose tokens are the number of their prompt."""
    group = len(lengths) // len(index)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = mask * torch.tensor(index).repeat_interleave(group)[:, None]
    prompts = replace(prompt_batch(*map(str, index)), index=torch.tensor(index))
    return Rollout(prompts, group, ids, mask, -1.0 * mask, torch.tensor(lengths) == max(lengths))


def state_of(*parts, iteration=2):
    return [{"iteration": iteration, "parts": [pack_rollout(each) for each in parts]}]


def test_what_two_processes_have_pending_is_given_to_whoever_asks_for_its_prompts():
    parts = [rollout_of([4, 7], [1, 2, 2, 1]), rollout_of([9, 2], [3, 1, 1, 2])]
    source = Ahead()
    source.load_state_dict(state_of(*parts))
    kept = source.pending.queue[0].future.result()
    assert kept.completion_ids.tolist()[1:6] == [
        [4, 4, 0],
        [7, 7, 0],
        [7, 0, 0],
        [9, 9, 9],
        [9, 0, 0],
    ]
    for groups, part in (([0, 1], parts[0]), ([2, 3], parts[1])):  # as it was
        assert digest(pack_rollout(select_groups(kept, groups))) == digest(pack_rollout(part))
    mixed = select_groups(kept, [3, 1])  # of three processes, say
    assert mixed.completion_ids.tolist() == [[2, 0], [2, 2], [7, 7], [7, 0]]
    assert mixed.truncated.tolist() == [False, False, True, False]
    assert mixed.prompts.prompts == ["2", "7"]


def source_of(*parts):
    """A source with pending rollouts."""
    source, rollouter = Ahead(), rollouter_of(tiny_policy("qwen2"), group_size=2)
    source.connect(SourceParts(rollouter, lambda ahead: prompt_batch("a", "b"), None, None))
    source.load_state_dict(state_of(*parts))
    return source


def test_a_process_takes_the_groups_of_its_prompts_from_what_is_pending():
    parts = [rollout_of([4, 7], [1, 2, 2, 1]), rollout_of([9, 2], [3, 1, 1, 2])]
    prompts = replace(prompt_batch("2", "7"), index=torch.tensor([2, 7]))
    rollout = source_of(*parts).take(prompts, 2)
    assert rollout.completion_ids.tolist() == [[2, 0], [2, 2], [7, 7], [7, 0]]
    assert rollout.prompts.index.tolist() == [2, 7]


def test_rows_of_one_segment_are_joined_with_rows_of_several():
    one, other = rollout_of([4], [1, 2]), rollout_of([9], [3, 1])
    segments = torch.tensor([[0, 0, 1], [0, 0, 0]], dtype=torch.int16)
    joined = join_rollouts([one, replace(other, segments=segments)])
    assert joined.segments.tolist() == [[0, 0, 0], [0, 0, 0], *segments.tolist()]


def test_a_rollout_of_another_iteration_or_of_other_prompts_is_not_used():
    for iteration, asked in ((3, [4, 7]), (2, [4, 8])):
        source = source_of(rollout_of([4, 7], [1, 2, 2, 1]))
        prompts = replace(prompt_batch("a", "b"), index=torch.tensor(asked))
        with pytest.raises(ValueError, match=f"those of iteration {iteration}: the data have"):
            source.take(prompts, iteration)


def test_with_one_optimizer_step_old_log_probabilities_are_the_learning_policys():
    grpo = run()
    assert grpo.objective.importance_correction is not None
    assert not grpo.learner.reuse_sampler_logprobs
    # The distance to the weights before, which is no rounding.
    assert grpo.trainer.callback_metrics["policy/sampler_mismatch"] > 1e-5


def test_other_loaders_do_not_say_what_comes_next():
    with pytest.raises(ValueError, match=r"source is Ahead, which needs litgrpo\.PromptData"):
        train(module(source=Ahead()), batches("a", "hello there"))


def test_impossible_staleness_is_refused():
    with pytest.raises(ValueError, match=r"source\.staleness is 0"):
        Ahead(0)
    with pytest.raises(ValueError, match=r"source\.max_staleness is -2"):
        InFlight(-2)


def test_an_engine_without_updates_in_flight_is_refused():
    with pytest.raises(ValueError, match=r"LocalEngine does not\. Use Ahead"):
        module(source=InFlight(2))


def test_a_source_serves_one_module_and_its_options_others():
    source = Ahead()
    one, other = module(source=source), module(source=source)
    assert one.source is not other.source
    assert one.source.pending is not other.source.pending


def test_an_iteration_that_a_signal_drops_keeps_its_rollout():
    source = run(max_iterations=3).source
    for iteration, versions in ((3, {3: 2}), (2, {2: 1, 3: 2}), (4, {})):
        state = source.state_dict(iteration)
        found = {each["iteration"]: each["parts"][0]["policy_version"] for each in state}
        assert found == versions


class Remembering(Recording):
    """Keeps the weights of each version, on request waits until the server has begun ahead."""

    begun, weights = (), {}

    def training_step(self, prompts, batch_idx):
        policy = copy.deepcopy(self.policy)
        self.weights = vars(self).get("weights", {}) | {self.iteration: policy}
        return super().training_step(prompts, batch_idx)


def test_weights_change_while_a_server_generates_and_each_token_knows_which(tmp_path):
    steps = 1
    export(tiny_policy("qwen2"), tmp_path)
    with StandIn(tmp_path, at_once=1) as server:
        engine = ServerEngine([server.url], send_uniforms=True)
        found = run(Remembering, source=InFlight(steps), engine=engine)
    ages = []
    for iteration, rollout in enumerate(found.rollouts):
        sampled = rollout.loss_mask
        versions = rollout.token_versions
        ages += (iteration - versions)[sampled].tolist()
        for version in versions[sampled].unique().tolist():
            known = found.weights[version].logprobs(rollout.tokens).logprobs
            there = sampled & (versions == version)
            assert torch.allclose(known[there], rollout.sampler_logprobs[there], atol=1e-5)
        for row in range(len(versions)):  # newer weights never give way to older ones
            assert versions[row][sampled[row]].diff().ge(0).all()
    assert 0 <= min(ages) <= max(ages) <= steps
    assert max(ages) > 0
    assert found.trainer.callback_metrics["async/staleness_max"] <= steps
