"""Tests."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.environments.base import EnvironmentFailure, StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.workers import EpisodeWorkers
from litgrpo.models.loading.load import build_policy
from litgrpo.rollout.episodes import EpisodeSettings, PlayedRow, RolloutKey, episode_seed
from litgrpo.rollout.groups import with_groups
from litgrpo.rollout.sampling import Purpose, draw_uniforms
from tests.learning.parts import learner_of, rewards_of, rollouter_of
from tests.support.models import byte_tokenizer, prompt_batch, tiny_policy
from tests.support.packing import SPECIAL
from tests.support.playing import Echo, episodes_of
from tests.support.raises import raises_for


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_turns": 0}, "episode.max_turns is 0"),
        ({"max_turn_tokens": 0}, "episode.max_turn_tokens is 0"),
        ({"max_observation_tokens": 7}, "episode.max_observation_tokens is 7"),
        ({"turn_format": "xml"}, "episode.turn_format .*template.*inline"),
        ({"on_timeout": "wait"}, "episode.on_timeout .*fail.*reply"),
        ({"timeout_s": 0}, "episode.timeout_s is 0; it must be above 0"),
        ({"num_workers": -1}, "episode.num_workers is -1"),
    ],
)
def test_what_is_not_allowed_is_said(given, said):
    with pytest.raises(ValueError, match=said):
        EpisodeSettings(**given)


def test_a_record_becomes_an_episode_with_spans_calls_and_logs():
    row = PlayedRow()
    row.add([{"role": "assistant", "content": "a"}], 3)
    row.add_result(
        StepResult("", reward=None, calls={"add": (2, 1)}, log={"moves": 1.0}, state="s")
    )
    row.add([{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}], 6)
    row.add([{"role": "assistant", "content": "b"}], 1)
    row.add_result(StepResult("", reward=2, calls={"add": (1, 0)}, log={"moves": 2.0}))
    episode = row.episode
    assert episode.turn_rewards == [None, 2.0]
    assert episode.turn_states == ["s", None]
    assert episode.assistant_texts == ["a", "b"]
    assert episode.spans == [(0, 3), (3, 9), (3, 9), (9, 10)]
    assert episode.calls == {"add": (3, 1)}
    assert episode.log == {"moves": (3.0, 2)}
    assert row.used == 10


PROMPTS = prompt_batch("a", "hello there")


def play_episodes(environment=None, purpose: Purpose = "train", iteration=0, length=60, **settings):
    policy = tiny_policy("qwen2")
    episodes = episodes_of(environment or Echo(), **settings)
    rollouter = rollouter_of(policy, episodes=episodes, max_completion_length=length)
    return policy, rollouter, rollouter.generate(PROMPTS, purpose, iteration)


class Seeds(Echo):
    seen: list = []  # noqa: RUF012 (shared by the copies)

    def reset(self, row, seed):
        self.seen.append((row["prompt"], seed))
        return ""


def test_a_group_begins_in_the_same_state_and_each_iteration_in_another():
    Seeds.seen.clear()
    for purpose, iteration in (("train", 0), ("train", 1), ("val", 0), ("val", 1)):
        play_episodes(Seeds(), purpose, iteration)
    calls = [Seeds.seen[first : first + 8] for first in range(0, 32, 8)]
    for call in calls:
        assert call[0] == call[3]
        assert call[4] == call[7]
        assert call[0][0] == "a"
        assert call[0][1] != call[4][1]
    assert calls[0] != calls[1]
    assert calls[2] == calls[3]
    assert calls[2] != calls[0]
    assert episode_seed(RolloutKey(0, "train", 0, 0), 0) == calls[0][0][1] < 2**31
    assert episode_seed(RolloutKey(0, "train", 0, 1), 0) != calls[0][0][1]


def test_seeds_of_episodes_use_31_bits_and_no_random_numbers_of_completions():
    keys = [RolloutKey(0, "train", iteration, 0) for iteration in range(20)]
    seeds = [episode_seed(key, prompt) for key in keys for prompt in range(5)]
    assert 2**30 <= max(seeds) < 2**31
    for key in keys:
        stream = [0, 3, key.iteration, key.attempt]
        completion = draw_uniforms(0, "train", key.iteration, torch.tensor([3]), 1, 1)
        philox = np.random.Philox(key=[key.seed, 0], counter=stream)
        assert np.random.Generator(philox).random() == completion.item()
        philox = np.random.Philox(key=[key.seed, 0], counter=stream)
        assert episode_seed(key, 3) != np.random.Generator(philox).integers(2**31)


class FailsFirst(Echo):
    """The first episode of each prompt fails in its first turn."""

    count = [0]  # noqa: RUF012 (shared by the copies)

    def reset(self, row, seed):
        self.number = self.count[0]
        self.count[0] += 1
        return super().reset(row, seed)

    def step(self, action):
        if self.number % 4 == 0:
            raise OSError("no net")
        return super().step(action)


def test_an_episode_that_failed_has_its_reason_and_the_others_none():
    FailsFirst.count[0] = 0
    started = time.perf_counter()
    _, _, rollout = play_episodes(FailsFirst())
    elapsed = time.perf_counter() - started
    failed = [episode.failed for episode in rollout.episodes]
    assert [bool(each) for each in failed] == [True, False, False, False] * 2
    assert "no net" in failed[0]
    # Each episode waits for its environment within the rollout, not longer.
    assert all(0 <= episode.seconds <= elapsed for episode in rollout.episodes)


def test_episodes_of_an_evaluation_are_named_by_its_iteration(monkeypatch):
    starts = []
    _, rollouter, _ = play_episodes(purpose="val", iteration=3)
    begin = rollouter.episodes.pool.reset
    monkeypatch.setattr(rollouter.episodes.pool, "reset", lambda s: starts.append(s) or begin(s))
    for iteration in (3, 6):
        rollouter.generate(PROMPTS, "val", iteration)
    three, six = starts
    assert {start.key[0] for start in three} == {3}
    assert {start.key[0] for start in six} == {6}
    assert [start.seed for start in three] == [start.seed for start in six]


def test_what_reset_adds_is_read_with_the_prompt():
    policy, _, rollout = play_episodes(Echo(opening="?!"))
    ids = rollout.prompts.prompt_ids
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert texts == ["a?!", "hello there?!"]
    assert [text.removeprefix("<bos>") for text in rollout.prompts.prompts] == texts
    _, _, plain = play_episodes()
    assert plain.prompts is PROMPTS


def test_an_environment_that_begins_differently_in_a_group_is_rejected():
    class Random(Echo):
        count = [0]  # noqa: RUF012

        def reset(self, row, seed):
            self.count[0] += 1
            return str(self.count[0])

    with raises_for("one row and seed", "reset"):
        play_episodes(Random())


class Failing(Echo):
    def step(self, action):
        raise OSError("no\nnet")


def test_a_run_whose_episodes_fail_is_stopped():
    with pytest.raises(EnvironmentFailure, match="OSError: no net"):
        play_episodes(Failing())


def test_texts_are_of_the_last_turn_and_spoken_tokens_are_counted():
    policy, rollouter, rollout = play_episodes()
    assert rollouter.generated_tokens == int(rollout.loss_mask.sum())
    for row, played_ in enumerate(rollout.episodes):
        ids = rollout.completion_ids[row]
        last = ids[rollout.turns[row] == rollout.turns[row].max()]
        assert rollout.completions[row] == policy.tokenizer.decode(last, skip_special_tokens=True)
        for message, (first, end) in zip(played_.messages, played_.spans, strict=True):
            spoken = rollout.loss_mask[row, first:end]
            assert bool(spoken.all()) == (message["role"] == "assistant")
            assert spoken.any() == spoken.all()


def test_statistics_tell_of_episodes():
    _, rollouter, rollout = play_episodes(Echo(lengths=(3,)))
    stats = rollouter.stats(rollout)
    assert float(stats["env/turns"]) == 3
    total, count = stats["env/reward"].tolist()
    assert total / count == 1 + 2 + 3
    assert float(stats["env/failed_frac"]) == float(stats["env/timeout_frac"]) == 0
    assert float(stats["tools/echo_calls"]) == 3
    assert float(stats["tools/echo_failed"]) == 0
    heard, real = stats["completion/observation_frac"].tolist()
    assert heard == int((rollout.completion_mask & ~rollout.loss_mask).sum())
    assert real == int(rollout.completion_mask.sum())
    assert float(stats["time/env_s"]) > 0
    assert float(rollouter.stats(rollout)["time/env_s"]) == 0


def test_episodes_without_turn_rewards_have_no_mean_of_them():
    _, rollouter, rollout = play_episodes(Echo(lengths=(3,)))
    for episode in rollout.episodes:
        episode.turn_rewards = [None]
    assert rollouter.stats(replace(rollout))["env/reward"].tolist() == [0, 0]
    rollout.episodes[0].turn_rewards = [0.25]
    assert rollouter.stats(rollout)["env/reward"].tolist() == [0.25, 1]


def test_nothing_that_was_heard_is_learned_but_it_is_read():
    policy, _, rollout = play_episodes()
    learner = learner_of(policy)
    logprobs = learner.old_and_reference_logprobs(rollout)
    training_batch = learner.build_batch(rollout, rewards_of(rollout), logprobs)
    heard = rollout.completion_mask & ~rollout.loss_mask
    assert not training_batch.loss_weights[heard].any()
    assert not training_batch.advantages[heard].any()
    found = learner.logprobs(training_batch.tokens).logprobs.detach()
    assert not found[heard].any()
    other = rollout.completion_ids.masked_fill(heard, 99)
    changed = learner.logprobs(replace(training_batch.tokens, completion_ids=other)).logprobs
    assert (found - changed)[rollout.turns > 0].abs().max() > 1e-3
    assert torch.equal(found[rollout.turns == 0], changed.detach()[rollout.turns == 0])


def test_groups_of_other_rollouts_bring_their_episodes():
    _, rollouter, rollout = play_episodes()
    fresh = rollouter.generate(PROMPTS, "train", 7)
    mixed = with_groups(rollout, torch.tensor([1]), fresh, torch.tensor([0]))
    assert mixed.episodes == rollout.episodes[:4] + fresh.episodes[:4]
    used = fresh.turns.shape[1]
    assert torch.equal(mixed.turns[4:, :used], fresh.turns[:4])
    assert (mixed.turns[4:, used:] == -1).all()


class Abstains(Echo):
    def step(self, action):
        return StepResult("", reward=None, done=True)


def test_a_turn_may_abstain_and_an_episode_may_end_at_once():
    _, _, rollout = play_episodes(Abstains())
    assert rollout.turn_rewards.isnan().all()
    assert rollout.turn_rewards.shape == (8, 1)
    assert all(each.done for each in rollout.episodes)


def policy_of(architecture):
    """A policy; rows of Bloom, which transformers decodes, cannot leave their batch."""
    if architecture != "bloom":
        return tiny_policy(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **SPECIAL))
    return build_policy(bloom, byte_tokenizer()).eval()


@pytest.mark.parametrize(("architecture", "num_workers"), [("qwen2", 2), ("t5", 2), ("bloom", 4)])
def test_episodes_that_wait_for_a_process_are_the_same(architecture, num_workers):
    """Also where the rows of a group cannot leave the batch, and where a group waits in parts."""
    rollouts = []
    for pool in (InProcessEpisodes(Echo()), EpisodeWorkers(Echo(), num_workers=num_workers)):
        policy = policy_of(architecture)
        rollouter = rollouter_of(policy, episodes=episodes_of(pool), max_completion_length=60)
        rollouts.append(rollouter.generate(PROMPTS, "train"))
        pool.close()
    here, queued = rollouts
    assert len(here.completion_ids) > num_workers
    assert here.turns.max() > 0
    assert torch.equal(here.completion_ids, queued.completion_ids)
    assert torch.equal(here.turn_rewards.nan_to_num(-1), queued.turn_rewards.nan_to_num(-1))


def test_a_group_that_decodes_together_needs_a_process_for_each_row():
    pool = EpisodeWorkers(Echo(), num_workers=2)
    rollouter = rollouter_of(
        policy_of("bloom"), episodes=episodes_of(pool), max_completion_length=60
    )
    with raises_for("model.episode.num_workers is 2", "model.group_size"):
        rollouter.generate(PROMPTS, "train")
    pool.close()
