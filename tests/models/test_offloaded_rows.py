"""Rows that leave and come back predict what plain passes predict."""

import pytest
import torch

from litgrpo.models.shared_prefix import SharedPrefixCache
from tests.support.models import prompt_batch, tiny_policy

PROMPTS, GROUP = prompt_batch("ab", "hello"), 2


def fed(policy, state, logits, said, ids):
    """Feed a token to each of the live rows, which are numbered in `said`."""
    for row, token in ids.items():
        said[row].append(token)
    return policy.step(torch.tensor(list(ids.values())), state)


@pytest.mark.parametrize("name", ["gemma2", "qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_a_row_that_comes_back_goes_on_where_it_was(name, fused):
    policy, said = tiny_policy(name), {row: [] for row in range(4)}
    with policy.decoding(4, fused=fused):
        logits, state = policy.prefill(PROMPTS.prompt_ids, PROMPTS.prompt_mask, GROUP, 12)
        assert isinstance(state, SharedPrefixCache)
        away = policy.away(state)
        fed(policy, state, logits, said, {0: 5, 1: 6, 2: 7, 3: 8})
        away.leave(1)
        away.leave(0)  # no row of the first prompt is left
        state.select(torch.tensor([3, 2]))
        for token in range(9, 13):
            fed(policy, state, logits, said, {3: token, 2: token + 1})
        away.leave(1)
        state.select(torch.tensor([0]))
        back = away.come_back([1, 2], [[20, 21, 22], [23]])  # rows 0 and 2
        said[0] += [20, 21, 22]
        said[2] += [23]
        logits = torch.cat([fed(policy, state, logits, said, {3: 30, 0: 31, 2: 32}), back])
        away.leave(0)
        away.leave(1)
        away.leave(2)
        state.select(torch.tensor([], dtype=torch.long))  # all are away
        away.forget([0])
        last = away.come_back([2], [[40] * 3])
        said[2] += [40] * 3
        final = fed(policy, state, last, said, {2: 41})
    expected = {row: plain(policy, row, said[row]) for row in (0, 2, 3)}
    for place, row in enumerate((3, 0, 2)):
        length = {3: 6, 0: 5, 2: 7}[row]
        assert (logits[place] - expected[row][length]).abs().max() < 1e-4
    assert (logits[3] - expected[0][4]).abs().max() < 1e-4
    assert (logits[4] - expected[2][6]).abs().max() < 1e-4
    assert (last[0] - expected[2][10]).abs().max() < 1e-4
    assert (final[0] - expected[2][11]).abs().max() < 1e-4


def plain(policy, row, said):
    """[C + 1, V] logits of a row by itself."""
    prompt = row // GROUP
    ids = PROMPTS.prompt_ids[prompt][PROMPTS.prompt_mask[prompt]][None]
    return policy.dense_logits(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([said]))[0]
