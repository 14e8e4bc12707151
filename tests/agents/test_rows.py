"""Rows of tokens from calls, by hand."""

import math

import torch

from litgrpo.agents.call_tree import AgentCall
from litgrpo.agents.episodes import AgentRow, agent_row, split_by_width
from litgrpo.agents.rows import build_rollout
from litgrpo.environments.agent import AgentResult
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.sampling import Sampling
from tests.support.agents import user
from tests.support.models import prompt_batch, tiny_policy


def call(context, ids, parent=None, **more):
    logprobs = [-float(token) for token in ids]
    return AgentCall(context, [user("?")], parent, 8, ids=ids, logprobs=logprobs, **more)


def row(*calls, reward=None, completion=None, **more):
    row = AgentRow(start=None, result=AgentResult(reward, completion), **more)
    row.tree.calls = list(calls)
    return row


def rollout_of(*rows, group_size=2):
    prompts = prompt_batch(*["ab"] * (len(rows) // group_size))
    uniforms = torch.zeros(len(rows), 8, dtype=torch.float64)
    policy = tiny_policy("llama")
    return build_rollout(RolloutRequest(policy, prompts, group_size, uniforms, Sampling()), rows)


def test_two_conversations_of_one_agent():
    first = call([7, 8], [9, 2])
    second = call([7, 8, 9, 2, 5], [6], first)
    other = call([7, 8, 9, 2, 4], [3, 2], first)
    plain = call([7, 8], [1])
    rollout = rollout_of(row(first, second, other, reward=2.0), row(plain))
    assert rollout.prompts.prompt_ids.tolist() == [[7, 8]]
    assert rollout.completion_ids.tolist() == [
        [9, 2, 4, 3, 2, 7, 8, 9, 2, 5, 6],
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    # Both branches have one call: that with the smaller tokens continues the chain.
    assert rollout.turns[0].tolist() == [0, 0, -1, 2, 2, -1, -1, -1, -1, -1, 1]
    assert rollout.segments[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert rollout.loss_mask[0].tolist() == [turn >= 0 for turn in rollout.turns[0].tolist()]
    assert rollout.sampler_logprobs[0].tolist() == [-9, -2, 0, -3, -2, 0, 0, 0, 0, 0, -6]
    assert rollout.turn_rewards[0].tolist() == [0, 0, 2]
    assert rollout.turn_rewards[1].isnan().all()
    split, places = rollout.tokens.split_segments()
    pairs = zip(split.prompt_ids, split.prompt_mask, strict=True)
    prompts = [ids[mask].tolist() for ids, mask in pairs]
    rows = zip(split.prompt_of.tolist(), split.completion_ids, split.completion_mask, strict=True)
    assert [(prompts[of], ids[mask].tolist()) for of, ids, mask in rows] == [
        ([7, 8], [9, 2, 4, 3, 2]),
        ([7, 8, 9, 2, 5], [6]),
        ([7, 8], [1]),
    ]
    assert places.tolist() == [[0, 1, 2, 3, 4], [10, -1, -1, -1, -1], [11, -1, -1, -1, -1]]


def test_an_agent_that_begins_differently_has_a_prompt_of_its_own():
    same = [row(call([7, 8], [9])) for _ in range(2)]
    rollout = rollout_of(
        row(call([6], [5])), *same, row(reward=1.0, completion="none"), group_size=4
    )
    assert rollout.prompts.prompt_ids.tolist() == [[7, 8]]
    assert rollout.completion_ids.tolist() == [[6, 5], [9, 0], [9, 0], [0, 0]]
    assert rollout.segments.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert rollout.completion_mask.sum(1).tolist() == [2, 1, 1, 0]
    assert rollout.turn_rewards[3].tolist() == [1.0]
    assert rollout.completions[3] == "none"
    split, _ = rollout.tokens.split_segments()
    assert split.completion_mask.sum(1).tolist() == [1, 1, 1, 0]
    empty = rollout_of(row(reward=1.0), row())
    assert empty.prompts.prompts == ["ab"]
    assert empty.tokens.split_segments()[0].completion_mask.tolist() == [[False], [False]]


def test_log_probabilities_come_back_to_their_places():
    first = call([7, 8], [9, 2])
    rollout = rollout_of(
        row(first, call([7, 8, 9, 2, 5], [6], first), call([4], [3, 2])), row(call([4], [3]))
    )
    policy = tiny_policy("llama")
    found, hidden = policy.logprobs(rollout.tokens), policy.hidden_states(rollout.tokens)
    split, places = rollout.tokens.split_segments()
    alone = policy.logprobs(split)
    real = split.on_host.predicted
    assert torch.equal(found.logprobs.flatten()[places[real]], alone.logprobs[real])
    assert torch.equal(hidden.flatten(0, 1)[places[real]], policy.hidden_states(split)[real])
    assert not found.logprobs[~rollout.loss_mask].any()


def test_limits_and_failures_are_in_the_record():
    cut = call([7], [9], truncated=True)
    rollout = rollout_of(
        row(cut), row(limit="max_turns"), row(failed="no luck", reward=3.0), row(), group_size=4
    )
    assert rollout.truncated.tolist() == [True, True, False, False]
    assert [each.failed for each in rollout.episodes] == ["", "", "no luck", ""]
    assert [each.done for each in rollout.episodes] == [True, False, False, True]
    assert rollout.turn_rewards[2].isnan().all()


def test_tools_are_counted_by_name_whichever_call_came_first():
    first, second = call([7], [9], tools=["search", "add"]), call([7], [8], tools=["add"])
    rollout = rollout_of(row(first, second), row(second, first))
    counts = [list(each.calls.items()) for each in rollout.episodes]
    assert counts == [[("add", (2, 0)), ("search", (1, 0))]] * 2


def test_calls_that_need_positions_for_a_wider_reply_are_sampled_apart():
    far = AgentCall([0] * 9, [], None, limit=1), torch.zeros(1)
    near = AgentCall([0], [], None, limit=4), torch.zeros(4)
    assert [len(calls) for calls in split_by_width([far, near], 10)] == [1, 1]
    assert [len(calls) for calls in split_by_width([far, near], math.inf)] == [2]


def test_an_agent_gets_the_last_message_of_its_row_as_the_prompt():
    messages = [{"role": "user", "content": "6*7?"}]
    row = {"prompt": "<user>6*7?<model>", "conversation": messages}
    assert agent_row(row)["prompt"] == "6*7?"
    assert agent_row({"prompt": "6*7?"}) == {"prompt": "6*7?"}
