"""Rollouts of agents: tokens, segments, random numbers, limits, failures, gradients."""

import math
import time
from dataclasses import replace

import pytest
import torch

from litgrpo.agents.conversations import InlineConversations
from litgrpo.checks.invariants import gradient
from litgrpo.environments.agent import Agent
from litgrpo.environments.base import EnvironmentFailure
from litgrpo.learning.micro_batches import BatchLimits
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import build_policy
from litgrpo.models.reference import FrozenReference
from litgrpo.rollout.groups import with_groups
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.client import ServersUnavailable
from litgrpo.rollout.servers.vllm import ServerEngine
from tests.learning.parts import learner_of, rewards_of
from tests.support.agent_rollouts import GROUP, KEY, agent_episodes, play_agents
from tests.support.algorithms import PUBLISHED
from tests.support.episode_gradients import turns_error
from tests.support.models import byte_tokenizer, tiny_model, tiny_policy
from tests.support.turns_support import ending
from tests.support.vllm_stand_in import StandIn


@pytest.fixture(scope="module")
def episodes():
    """One pool of processes for all tests."""
    episodes = agent_episodes(timeout_s=300)
    yield episodes
    episodes.close()


# Not `turns`: parallel calls are numbered in the order in which they are answered.
TENSORS = ("completion_ids", "completion_mask", "loss_mask", "segments", "turn_rewards")


def assert_equal(one, other):
    for name in TENSORS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert torch.equal(mine.nan_to_num(-9), theirs.nan_to_num(-9)), name
    # Which calls are sampled together decides how these are rounded.
    assert torch.allclose(one.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
    assert torch.equal(one.prompts.prompt_ids, other.prompts.prompt_ids)


def segments_of(rollout, row):
    """Tokens of each segment of a row, and which of them the policy sampled."""
    found = {}
    for number in rollout.segments[row][rollout.completion_mask[row]].unique().tolist():
        here = (rollout.segments[row] == number) & rollout.completion_mask[row]
        found[number] = rollout.completion_ids[row][here], rollout.loss_mask[row][here], here
    return found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=5, temperature=0.8)])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_log_probabilities_are_those_of_a_plain_forward_pass(episodes, architecture, sampling):
    policy = ending(tiny_policy(architecture))
    rollout = play_agents(episodes, "talk", "branch", "parallel", policy=policy, sampling=sampling)
    found = policy.logprobs(rollout.tokens, temperature=sampling.policy_temperature).logprobs
    gap = (found - rollout.sampler_logprobs)[rollout.loss_mask].abs()
    assert gap.max() < 1e-4
    assert not found[~rollout.loss_mask].any()
    if sampling.has_filters:
        return
    for row in range(len(rollout.completion_ids)):
        prompt = rollout.prompts.prompt_ids[row // GROUP][rollout.prompts.prompt_mask[row // GROUP]]
        for number, (ids, sampled, here) in segments_of(rollout, row).items():
            before = prompt if number == 0 else ids[:1]
            after = ids if number == 0 else ids[1:]
            logits = policy.dense_logits(
                before[None], torch.ones_like(before[None], dtype=torch.bool), after[None]
            )[0, :-1]
            expected = logits.log_softmax(-1).gather(1, after[:, None]).squeeze(1)
            gap = (rollout.sampler_logprobs[row][here][-len(after) :] - expected).abs()
            assert gap[sampled[-len(after) :]].max() < 1e-4


def test_calls_that_continue_a_conversation_are_one_segment_of_recorded_tokens(episodes):
    rollout = play_agents(episodes, "talk")
    assert not rollout.segments.any()
    assert rollout.prompts.prompts == ["q0?"]  # of the data: the agent began with it
    for row, episode in enumerate(rollout.episodes):
        roles = [message["role"] for message in episode.messages]
        assert roles == ["assistant", "user", "assistant", "user", "assistant"]
        assert [rollout.turns[row][first].item() for first, _ in episode.spans] == [0, -1, 1, -1, 2]
        assert episode.spans[0][0] == 0
        assert all(a[1] == b[0] for a, b in zip(episode.spans, episode.spans[1:], strict=False))
    # Replies with bytes that are no text cannot be tokenized again.
    texts = [text for episode in rollout.episodes for text in episode.assistant_texts]
    assert any("\ufffd" in text for text in texts)
    assert rollout.turn_rewards[:, :2].eq(0).all()
    assert rollout.completions == [each.assistant_texts[-1] for each in rollout.episodes]


def test_other_conversations_become_segments_whose_earlier_replies_are_not_trained_again(episodes):
    rollout = play_agents(episodes, "branch")
    for row in range(GROUP):
        first, *others = segments_of(rollout, row).values()
        assert len(others) == 3  # the helper, the edited history, the other continuation
        turns = rollout.turns[row]
        assert {*turns[turns >= 0].tolist()} == {*range(6)}
        for ids, sampled, _ in others:
            assert not sampled[0]
            assert ids[0] == 1  # they begin with the begin token
            changes = sampled.int().diff().ne(0).sum()
            assert changes == 1  # context, then one reply
        reply = first[0][rollout.turns[row][first[2]] == 0].tolist()
        repeated = [ids for ids, *_ in others if ids.tolist()[4 : 4 + len(reply)] == reply]
        assert repeated  # the other continuation has the recorded tokens of the first reply
    assert float(episodes.stats(rollout)["env/segments"]) == 4


def test_the_order_in_which_parallel_calls_arrive_does_not_matter(episodes):
    one, other = (play_agents(episodes, "parallel", "branch") for _ in range(2))
    assert_equal(one, other)
    assert one.segments.max() >= 5
    drawn = [ids.tolist() for ids, *_ in segments_of(one, 0).values()]
    assert len({*map(tuple, drawn)}) == len(drawn)  # equal requests get different replies


def test_random_numbers_depend_on_iteration_and_purpose(episodes):
    given = play_agents(episodes, "once")
    for name, value in (("seed", 1), ("iteration", 1), ("attempt", 1), ("purpose", "val")):
        other = play_agents(episodes, "once", key=KEY._replace(**{name: value}))
        assert not torch.equal(given.completion_ids[:, :4], other.completion_ids[:, :4]), name


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo", "gtpo", "reinforce_pp"])
def test_the_gradient_is_that_of_each_reply_as_a_row_of_its_own(episodes, name):
    policy = ending(tiny_policy("llama"))
    # The KL term of a whole row is not that of its turns if the ratio is that of the row.
    objective = replace(PUBLISHED[name], kl_coef=0.0 if name == "gspo" else 0.1)
    reference = FrozenReference(tiny_policy("llama", seed=1)) if objective.kl_coef else None
    learner = learner_of(policy, objective, reference=reference)
    learner = replace(learner, group_size=GROUP, max_completion_length=64)
    rollout = play_agents(episodes, "branch", "parallel", "talk", policy=policy)

    assert turns_error(learner, rollout, rewards_of(rollout)) < 1e-5
    whole = learner.build_batch(
        rollout, rewards_of(rollout), learner.old_and_reference_logprobs(rollout)
    )
    micro = gradient(learner, whole, BatchLimits(max_rows=1))
    at_once = gradient(learner, whole, BatchLimits(max_rows=None))
    for one, other in zip(micro, at_once, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_agents_that_begin_differently_or_make_no_call_have_rows_of_their_own(episodes):
    policy = ending(tiny_policy("llama"))
    rollout = play_agents(episodes, *["uneven"] * 6, policy=policy)
    turns = rollout.turns.amax(1) + 1
    assert {*turns.tolist()} <= {0, 1, 3}
    found = policy.logprobs(rollout.tokens).logprobs
    assert (found - rollout.sampler_logprobs)[rollout.loss_mask].abs().max() < 1e-4
    rewards = rewards_of(rollout)
    assert rewards.valid.all()
    learner = replace(learner_of(policy), group_size=GROUP)
    batch = learner.build_batch(rollout, rewards, learner.old_and_reference_logprobs(rollout))
    assert all(each.isfinite().all() for each in gradient(learner, batch, BatchLimits()))
    assert rollout.turn_rewards[turns == 0].eq(0.5).any(1).all()


def test_a_rollout_without_any_call_has_a_zero_gradient(episodes):
    policy = ending(tiny_policy("llama"))
    rollout = play_agents(episodes, "silent", policy=policy)
    assert not rollout.completion_mask.any()
    assert rollout.completions == ["", ""]
    learner = replace(learner_of(policy), group_size=GROUP)
    batch = learner.build_batch(
        rollout, rewards_of(rollout), learner.old_and_reference_logprobs(rollout)
    )
    assert not batch.loss_weights.any()
    assert learner.logprobs(batch.tokens).logprobs.shape == (GROUP, 1)


# --- limits and failures ---


def test_a_flood_of_calls_ends_at_the_limit_and_the_episode_counts_as_cut_off(episodes):
    rollout = play_agents(episodes, "flood", "insist")
    assert (rollout.turns.amax(1) + 1).tolist() == [8] * 4
    assert rollout.truncated.all()
    assert [each.failed for each in rollout.episodes] == [""] * 4
    assert rollout.turn_rewards[:2, -1].tolist() == [2.0, 2.0]  # statuses 200 and 400
    assert rollout.turn_rewards[2:].isnan().all()  # the agent raised: no reward


def test_a_conversation_ends_at_the_completion_length(episodes):
    rollout = play_agents(episodes, "insist", length=20)
    assert rollout.completion_mask.sum(1).max() <= 20
    assert rollout.truncated.all()
    assert not any(each.failed for each in rollout.episodes)


def test_a_short_conversation_may_go_on_while_a_long_one_reaches_the_last_position(
    episodes, monkeypatch
):
    policy = tiny_policy("gpt2", n_positions=40)  # fails beyond
    monkeypatch.setattr(episodes, "settings", replace(episodes.settings, max_turn_tokens=30))
    rollout = play_agents(episodes, "once", "wordy", policy=policy, length=60)
    assert rollout.lengths.tolist() == [30, 30, 9, 9]  # of 40 positions, 31 are the messages
    assert rollout.truncated.all()


def test_long_messages_are_rejected(episodes, monkeypatch):
    for tokens in (3, 4):
        agent = Agent("tests.support.agents.once", max_prompt_tokens=tokens)
        monkeypatch.setattr(episodes, "agent", agent)
        rollout = play_agents(episodes, "once")
        assert bool(rollout.completion_mask.any()) is (tokens == 4)
        assert tokens == 4 or rollout.truncated.all()


@pytest.fixture
def impatient(episodes, monkeypatch):
    """The pool, with 2 seconds for an agent."""
    assert episodes.pool.timeout_s == 300
    monkeypatch.setattr(episodes.pool, "timeout_s", 2.0)
    return episodes


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("hang", "timed out after 2 s"),
        ("crash", "exited with 3"),
        ("raises", "RuntimeError: no luck (agents.py, line "),
    ],
)
def test_an_agent_that_fails_costs_its_row_only(impatient, agent, reason):
    rollout = play_agents(impatient, agent, "once")
    failed = [each.failed for each in rollout.episodes]
    assert all(each.startswith(reason) for each in failed[:GROUP])
    assert failed[GROUP:] == ["", ""]
    assert rollout.turn_rewards[:GROUP].isnan().all()
    assert rewards_of(rollout).valid.tolist() == [[False, False], [True, True]]
    assert not any(each.failed for each in play_agents(impatient, "once").episodes)


def test_more_than_half_of_failing_agents_stop_the_run(episodes):
    with pytest.raises(EnvironmentFailure, match=r"4 of 4|3 of 4"):
        play_agents(episodes, "crash", "raises")


def test_tokenizing_a_request_takes_no_time_from_the_agents_limit(impatient, monkeypatch):
    encode = InlineConversations.encode_opening

    def encode_slowly(self, *args):
        time.sleep(0.7)
        return encode(self, *args)

    monkeypatch.setattr(InlineConversations, "encode_opening", encode_slowly)
    rollout = play_agents(impatient, "once", "once")  # four requests: 2.8 s
    assert [each.failed for each in rollout.episodes] == [""] * 4
    assert sum(impatient.pool.seconds.values()) < 2.0


def test_the_limit_of_an_agent_goes_on_after_a_rejected_call(impatient):
    impatient.pool.timeout_s = 0.2  # reading the requests takes ten times as long
    start = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"timed out after 0\.2 s"):
        play_agents(impatient, "send_rejected", "send_rejected")
    assert time.monotonic() - start < 30


def test_a_call_that_the_agent_does_not_wait_for_is_rejected(episodes):
    rollout = play_agents(episodes, "leaves", "once")
    assert not any(each.failed for each in rollout.episodes)
    assert (rollout.turns[GROUP:].amax(1) == 0).all()


def test_malformed_requests_are_rejected_and_the_row_goes_on(episodes):
    rollout = play_agents(episodes, "send_malformed")
    assert [each.failed for each in rollout.episodes] == ["", ""]
    assert rollout.turn_rewards[:, 0].tolist() == [1.0, 1.0]


def test_more_rows_than_processes_and_async_agents(episodes, monkeypatch):
    other = play_agents(episodes, "talk", "later", "branch")
    monkeypatch.setattr(episodes.pool, "size", 2)
    assert_equal(play_agents(episodes, "talk", "later", "branch"), other)
    assert agent_episodes(num_workers=2).pool.size == 2


# --- with the rest ---


def test_groups_with_and_without_segments_can_replace_each_other(episodes):
    one = play_agents(episodes, "talk", "branch")
    other = play_agents(episodes, "branch", "talk")
    zero = torch.tensor([0])
    mixed = with_groups(one, zero, other, zero)
    assert mixed.segments[:GROUP].max() == 3
    plain = with_groups(replace(one, segments=None), zero, other, zero)
    assert torch.equal(plain.segments[:GROUP], mixed.segments[:GROUP])
    assert not plain.segments[GROUP:].any()


def test_rewards_get_the_answer_of_the_agent_and_the_ids_of_the_last_reply(episodes):
    seen = {}

    def record(prompts, completions, completion_ids, messages, turns, turn_rewards, **_):
        seen.update(completions=completions, ids=completion_ids, turns=turns, paid=turn_rewards)
        return [0.0] * len(prompts)

    rollout = play_agents(episodes, "talk", "silent")
    rewards_of(rollout, record)
    assert seen["completions"][:GROUP] == [each[-1] for each in seen["turns"][:GROUP]]
    assert seen["ids"][GROUP:] == [[], []]
    last = rollout.turns[0] == 2
    assert seen["ids"][0] == rollout.completion_ids[0][last].tolist()
    assert seen["paid"][GROUP:] == [[0.5], [0.5]]
    assert math.isclose(sum(seen["paid"][0]), float(rollout.turn_rewards[0].nansum()))


@pytest.fixture
def served_policy(tmp_path):
    """A policy, with the folder of another model of its sizes for a server."""
    export(build_policy(tiny_model("qwen2", seed=5), byte_tokenizer()), tmp_path)
    return ending(tiny_policy("qwen2"))


def engine_at(server, policy, wait_s):
    """An engine whose server has the weights of a policy."""
    engine = ServerEngine([server.url], send_uniforms=True, timeout_s=60.0, wait_s=wait_s)
    engine.sync_weights(policy, 0)
    return engine


def test_a_server_samples_the_replies_that_the_local_engine_samples(
    episodes, served_policy, tmp_path
):
    policy = served_policy
    with StandIn(tmp_path) as server:
        engine = engine_at(server, policy, 5.0)
        served = play_agents(episodes, "talk", "branch", policy=policy, engine=engine)
        # A server generates no token beyond the limit of a call.
        limits = {each["sampling_params"]["max_tokens"] for each in server.asked}
    assert limits == {3, 8}  # `branch` asks for 3 beside calls that do not
    assert_equal(served, play_agents(episodes, "talk", "branch", policy=policy))


def test_a_rollout_ends_with_its_server_and_is_repeated_with_the_next_one(
    episodes, served_policy, tmp_path
):
    policy = served_policy
    with StandIn(tmp_path) as server:
        engine = engine_at(server, policy, 0.5)
        sample = server.sample

        def die_in_the_second_round(body, *args):
            if len(body["token_ids"]) > 12:
                raise ConnectionAbortedError
            return sample(body, *args)

        server.sample = die_in_the_second_round
        with pytest.raises(ServersUnavailable, match="No server responds"):
            play_agents(episodes, "talk", policy=policy, engine=engine)
    with StandIn(tmp_path, server.server_address[1]):
        found = play_agents(episodes, "talk", policy=policy, engine=engine)
    assert_equal(found, play_agents(episodes, "talk", policy=policy))
