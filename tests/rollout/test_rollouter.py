from concurrent.futures import Future
from dataclasses import replace
from threading import Timer

import pytest
import torch

from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.rollouter import PendingRollout
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from tests.learning.parts import GROUP, LENGTH, rollouter_of
from tests.support.models import prompt_batch, tiny_policy

TEXTS = ("a", "hello there")


class Noting(RolloutEngine):
    """Samples as the local engine does, and notes what it was asked."""

    def __init__(self):
        self.asked, self.versions = [], []

    def sync_weights(self, policy, version):
        self.versions.append(version)

    def generate(self, requests):
        self.asked.append(requests)
        return LocalEngine().generate(requests)


@pytest.fixture
def engine():
    return Noting()


@pytest.fixture
def rollouter(engine):
    return rollouter_of(tiny_policy("qwen2"), engine=engine, sampling=Sampling(temperature=0.7))


def test_completions_are_decoded_and_of_the_version_that_sampled_them(rollouter):
    rollout = rollouter.generate(prompt_batch(*TEXTS), "train", 3)
    policy = rollouter.policy
    expected = [
        policy.tokenizer.decode(ids[:-1] if ids[-1] in policy.eos_ids else ids)
        for ids in rollout.token_lists()
    ]
    assert rollout.completions == expected
    assert rollout.policy_version == 3
    assert len(rollout.completions) == len(TEXTS) * GROUP


def test_random_numbers_follow_purpose_iteration_and_attempt(rollouter, engine):
    def numbers(*asked, **how):
        rollouter.generate(prompt_batch(*TEXTS), *asked, **how)
        return engine.asked[-1].uniforms

    first = numbers("train", 1)
    assert first.shape == (len(TEXTS) * GROUP, LENGTH)
    assert torch.equal(numbers("train", 1), first)
    for other in (numbers("train", 2), numbers("train", 1, attempt=1), numbers("val", 1)):
        assert not torch.equal(other, first)
    assert torch.equal(numbers("val", 5), numbers("val", 1))  # evaluations are comparable


def test_settings_are_those_of_training_unless_others_are_given(rollouter, engine):
    rollouter.generate(prompt_batch(*TEXTS), "train")
    rollouter.generate(prompt_batch(*TEXTS), "val", group_size=1, sampling=Sampling(top_k=5))
    trained, evaluated = engine.asked
    assert (trained.group_size, trained.sampling) == (GROUP, Sampling(temperature=0.7))
    assert (evaluated.group_size, evaluated.sampling) == (1, Sampling(top_k=5))


def test_samplings_of_an_evaluation_end_with_the_stop_tokens_of_training(engine):
    training = Sampling(stop_token_ids=tuple(range(3, 100)), include_stop_str_in_output=True)
    rollouter = rollouter_of(tiny_policy("qwen2"), engine=engine, sampling=training)
    rollout = rollouter.generate(prompt_batch(*TEXTS), "val", sampling=Sampling(temperature=0.5))
    assert engine.asked[-1].sampling == replace(training, temperature=0.5)
    ended = ~rollout.truncated
    assert ended.any()
    last = rollout.completion_ids.gather(1, rollout.lengths[:, None] - 1).squeeze(1)
    assert ((last < 100) == ended).all()


def test_the_seed_is_zero_by_default(rollouter, engine):
    prompts = prompt_batch(*TEXTS)
    rollouter.generate(prompts, "train", 2)
    expected = draw_uniforms(0, "train", 2, prompts.index, GROUP, LENGTH)
    assert torch.equal(engine.asked[-1].uniforms, expected)


def test_without_an_environment_nothing_is_logged_of_episodes(rollouter):
    assert rollouter.stats(rollouter.generate(prompt_batch("a"), "train")) == {}


def test_weights_are_handed_over_once_for_each_iteration(rollouter, engine):
    for iteration in (0, 0, 1, 1, 2):
        rollouter.generate(prompt_batch("a"), "train", iteration)
    assert engine.versions == [0, 1, 2]


def test_the_policy_samples_in_eval_mode(rollouter, engine):
    rollouter.policy.train()
    rollouter.generate(prompt_batch("a"), "train")
    assert not rollouter.policy.training


def test_only_tokens_of_training_are_counted(rollouter):
    rollouter.generate(prompt_batch("a"), "val")
    assert rollouter.generated_tokens == 0
    lengths = [rollouter.generate(prompt_batch("a"), "train", n).lengths.sum() for n in (0, 1)]
    assert rollouter.generated_tokens == sum(lengths)


def test_the_seconds_are_counted_as_those_of_the_rollout(rollouter):
    rollouter.generate(prompt_batch("a"), "train")
    assert rollouter.clock.seconds.keys() == {"time/rollout_s"}


def test_short_memory_halves_the_rows_and_changes_no_completion(rollouter, engine):
    prompts = prompt_batch("a", "bb", "ccc", "dddd")
    whole = rollouter.generate(prompts, "train")

    class Small(Noting):
        def generate(self, requests):
            if (requests.max_rows or requests.num_rows) > GROUP:
                raise MemoryError
            return super().generate(requests)

    rollouter.engine = Small()
    with pytest.warns(UserWarning, match="model.engine.max_rows ="):
        parts = rollouter.generate(prompts, "train")
    assert rollouter.row_limit.max_rows == GROUP  # groups are not divided
    assert torch.equal(parts.completion_ids, whole.completion_ids)


@pytest.mark.parametrize("batch", [{"a": 1}, ["text"], None])
def test_a_batch_that_is_none_of_prompts_is_refused(rollouter, batch):
    with pytest.raises(ValueError, match="PromptData"):
        rollouter.generate(batch, "train")


def test_texts_keep_special_tokens_that_the_policy_generated_but_not_its_end():
    policy = tiny_policy("llama")
    tokenizer = policy.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    call, newline = len(tokenizer) - 1, tokenizer.convert_tokens_to_ids("Ċ")
    word = tokenizer("ab", add_special_tokens=False).input_ids
    assert policy.completion_texts([[*word, call, *word, 2], [1, *word, 0], [2], []]) == [
        "ab<|call|>ab",
        "<bos>ab<pad>",
        "",
        "",
    ]
    policy.eos_ids = (2, newline)  # an end token that is text
    assert policy.completion_texts([[*word, newline], [*word, 2]]) == ["ab\n", "ab"]
    # A stop token is left out if it is special, and stays if it is text, as in vLLM.
    rows = [[*word, call], [*word, newline], [call, *word]]
    assert policy.completion_texts(rows, [call, newline]) == ["ab", "ab\n", "<|call|>ab"]


def test_episodes_begin_when_those_that_are_played_in_the_background_have_ended():
    # They share environments, which are reset; also if the weights are those of this iteration.
    class Episodes:
        def play(self, engine, request, key):
            ended.append(background.done())
            return engine.generate(request)

    background, ended = Future(), []
    rollouter = rollouter_of(tiny_policy("qwen2"), episodes=Episodes())
    rollouter.generate(prompt_batch("a"), "train", 3)
    rollouter.pending.queue.append(PendingRollout(4, background))
    Timer(0.2, background.set_result, [None]).start()
    rollouter.generate(prompt_batch("a"), "val", 3)
    assert ended == [False, True]
