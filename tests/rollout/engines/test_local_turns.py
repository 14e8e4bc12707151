"""Turns in the local engine: tokens equal plain passes, in any order of responses."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from litgrpo.models.decode.shared_prefix import RowOffloader
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from tests.support.models import tiny_policy
from tests.support.playing import Echo, SlowPool
from tests.support.reference_engine import ReferenceEngine
from tests.support.turns_support import (
    GROUP,
    TEXTS,
    assert_same,
    ending,
    play_turns,
    requests_of,
)

TINY = ending(tiny_policy("qwen2"))
POOLS = [Echo, lambda: SlowPool(Echo()), lambda: SlowPool(Echo(), 1, 0.0)]
ENGINES = [LocalEngine(), LocalEngine(fused_decode=False), LocalEngine(max_rows=3)]


@pytest.mark.parametrize("engine", ENGINES)
def test_turns_are_those_of_plain_passes(architecture, engine):
    policy = ending(tiny_policy(architecture))
    requests = requests_of(policy)
    expected = play_turns(ReferenceEngine(), requests)
    assert (expected.turns == 2).any()
    assert (expected.completion_mask & ~expected.loss_mask).sum() > 100
    for pool in POOLS:
        assert_same(play_turns(engine, requests, pool()), expected)


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=5), Sampling(temperature=0.7, top_p=0.8), Sampling(temperature=0)]
)
def test_filters_hold_in_every_turn_and_what_is_heard_has_no_candidates(sampling):
    policy = ending(tiny_policy("qwen2"))
    requests = requests_of(policy, sampling)
    found = play_turns(LocalEngine(), requests, SlowPool(Echo()))
    assert_same(found, play_turns(ReferenceEngine(), requests))
    if found.candidate_ids is not None:
        heard = found.completion_mask & ~found.loss_mask
        assert (found.candidate_ids[heard] == -1).all()


@given(
    st.integers(6, 40),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 99),
)
@settings(max_examples=15)
def test_masks_of_turns_are_consistent_for_any_limits(length, lengths, turns, turn_tokens, seed):
    requests = requests_of(TINY, length=length)
    limits = {"max_turns": turns, "max_turn_tokens": turn_tokens}
    found = play_turns(LocalEngine(), requests, SlowPool(Echo(tuple(lengths)), seed), **limits)
    assert_same(found, play_turns(ReferenceEngine(), requests, Echo(tuple(lengths)), **limits))
    assert torch.equal(found.loss_mask, found.turns >= 0)
    number = found.completion_mask.sum(1)
    columns = torch.arange(found.completion_ids.shape[1])
    assert torch.equal(found.completion_mask, columns < number[:, None])
    for row, episode in enumerate(found.episodes):
        own, end = found.turns[row], int(number[row])
        assert own[end - 1] >= 0  # an observation without a turn after it is not read
        assert own[own >= 0].tolist() == sorted(own[own >= 0].tolist())
        assert int(own.max()) + 1 == len(episode.assistant_texts) <= turns
        assert all(int((own == turn).sum()) <= turn_tokens for turn in range(turns))
        assert not found.sampler_logprobs[row][own < 0].any()
        if len(episode.assistant_texts) < turns:  # ended by the length limit
            assert found.truncated[row]


@pytest.mark.parametrize(("length", "turns"), [(9, 1), (10, 1), (11, 2)])
def test_an_observation_is_read_only_if_a_token_fits_behind_it(length, turns):
    policy = tiny_policy("qwen2")
    policy.eos_ids = (2,)  # turns end at their limit: 4 tokens, then an end token and 5 observed
    found = play_turns(LocalEngine(), requests_of(policy, length=length), Echo((5,)))
    assert [len(episode.assistant_texts) for episode in found.episodes] == [turns] * len(
        found.turns
    )
    assert found.lengths.tolist() == [5 if turns == 2 else 4] * len(found.turns)
    assert found.truncated.all()


def test_a_stop_string_ends_a_turn_and_is_not_looked_for_in_what_is_heard():
    policy = tiny_policy("qwen2")
    policy.eos_ids = (2,)
    first = play_turns(LocalEngine(), requests_of(policy), max_turn_tokens=30)
    stop = first.episodes[0].assistant_texts[0][5:7]
    stops = StopStrings((stop, "x"), policy.tokenizer, policy.vocab_size)
    requests = requests_of(policy, stops=stops)
    found = play_turns(LocalEngine(), requests, SlowPool(Echo()), max_turn_tokens=30)
    assert_same(found, play_turns(ReferenceEngine(), requests, max_turn_tokens=30))
    turns = found.episodes[0].assistant_texts
    assert turns[0].endswith(stop)
    assert len(turns) > 1


def test_a_row_alone_says_the_same_as_in_company():
    policy = ending(tiny_policy("llama"))
    whole = requests_of(policy)
    together = play_turns(LocalEngine(), whole, SlowPool(Echo(), 4))
    for prompt in range(len(TEXTS)):
        rows = slice(prompt * GROUP, prompt * GROUP + GROUP)
        alone = RolloutRequest(
            policy, whole.prompts.select([prompt]), GROUP, whole.uniforms[rows], Sampling()
        )
        found = play_turns(LocalEngine(), alone)
        used = found.completion_ids.shape[1]
        assert torch.equal(found.completion_ids, together.completion_ids[rows, :used])
        assert torch.equal(found.turns, together.turns[rows, :used])


@contextmanager
def tokens_read(policy, monkeypatch):
    """[how many tokens] a model reads after its prompts."""
    read, step, back = [0], policy.decode_step, RowOffloader.restore

    def count_step(tokens, state):
        read[0] += len(tokens)
        return step(tokens, state)

    def came_back(self, numbers, ids):
        read[0] += sum(map(len, ids))
        return back(self, numbers, ids)

    with monkeypatch.context() as patch:
        patch.setattr(policy, "decode_step", count_step)
        patch.setattr(RowOffloader, "restore", came_back)
        yield read


@pytest.mark.parametrize("pool", [Echo, lambda: SlowPool(Echo(), 1, 0.0)])
def test_no_token_is_read_twice(pool, monkeypatch):
    policy = ending(tiny_policy("llama"))
    with tokens_read(policy, monkeypatch) as read:
        found = play_turns(LocalEngine(fused_decode=False), requests_of(policy), pool())
    # The last token of a row is not read at all.
    assert read[0] == int(found.completion_mask.sum()) - len(found.turns)


def test_lower_precision_hears_too():
    policy = ending(tiny_policy("qwen2"))
    for fused in (True, False):
        engine = LocalEngine(dtype="bfloat16", fused_decode=fused)
        found = play_turns(engine, requests_of(policy), SlowPool(Echo()))
        assert found.turns.max() == 2
        assert (found.sampler_logprobs[found.loss_mask] < 0).all()


def test_caps_end_episodes_and_heard_tokens_are_cut_in_the_middle():
    policy = ending(tiny_policy("qwen2"))
    one = play_turns(LocalEngine(), requests_of(policy), max_turns=1)
    assert (one.turns <= 0).all()
    cut = play_turns(
        LocalEngine(), requests_of(policy), Echo(lengths=(50,)), max_observation_tokens=20
    )
    heard = cut.episodes[0].spans[1]
    assert heard[1] - heard[0] in (20, 21)  # an end token in front where the turn was cut
    ids = cut.completion_ids[0, heard[1] - 20 : heard[1]].tolist()
    assert policy.tokenizer.decode(ids) == "x" * 8 + " ... " + "x" * 7
    assert cut.episodes[0].observation_tokens_cut == (len(cut.episodes[0].assistant_texts) - 1) * 35
    short = play_turns(LocalEngine(), requests_of(policy, length=10), Echo(lengths=(50,)))
    assert short.truncated.all()
    assert (short.turns <= 0).all()


def test_a_turn_cut_by_its_limit_ends_the_episode_unless_it_is_closed():
    policy = tiny_policy("qwen2")
    policy.eos_ids = (2,)
    cut = play_turns(LocalEngine(), requests_of(policy), close_truncated_turns=False)
    assert cut.truncated.all()
    assert torch.equal(cut.lengths, torch.full_like(cut.lengths, 4))
    assert (cut.turn_rewards == 1).all()  # it is rewarded
    closed = play_turns(LocalEngine(), requests_of(policy))
    assert (closed.completion_ids[:, 4] == 2).all()
    assert not closed.loss_mask[:, 4].any()
    assert closed.turns.max() == 2
