import pytest
import torch

from litgrpo.models.decode import shared_prefix
from litgrpo.models.decode.shared_prefix import PromptGrid, SharedPrefixCache
from tests.support.models import prompt_batch, tiny_policy


def test_rows_of_a_prompt_are_adjacent_in_any_order():
    grid = PromptGrid(torch.tensor([2, 0, 2, 2, 0]), num_prompts=3)
    assert grid.width == 3
    cells = grid.row_of_cell.view(3, 3)
    assert cells[0, :2].tolist() == [1, 4]
    assert cells[2].tolist() == [0, 2, 3]
    assert grid.row_of_cell[grid.cell_of_row].tolist() == [0, 1, 2, 3, 4]


PROMPTS, GROUP = prompt_batch("ab", "hello"), 2


def feed(policy, state, logits, fed, ids):
    """Feed a token to each of the live rows, which are numbered in `fed`."""
    for row, token in ids.items():
        fed[row].append(token)
    return policy.decode_step(torch.tensor(list(ids.values())), state)


@pytest.mark.parametrize("name", ["gemma2", "qwen2", "llama", "gpt2", "t5"])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_a_restored_row_continues_where_it_was(name, fused):
    policy, fed = tiny_policy(name), {row: [] for row in range(4)}
    with policy.decoding(4, fused=fused):
        logits, state = policy.prefill(PROMPTS.prompt_ids, PROMPTS.prompt_mask, GROUP, 12)
        assert isinstance(state, SharedPrefixCache)
        offloader = policy.make_row_offloader(state)
        feed(policy, state, logits, fed, {0: 5, 1: 6, 2: 7, 3: 8})
        offloader.offload(1)
        offloader.offload(0)  # no row of the first prompt is left
        state.select(torch.tensor([3, 2]))
        for token in range(9, 13):
            feed(policy, state, logits, fed, {3: token, 2: token + 1})
        offloader.offload(1)
        state.select(torch.tensor([0]))
        back = offloader.restore([1, 2], [[20, 21, 22], [23]])  # rows 0 and 2
        fed[0] += [20, 21, 22]
        fed[2] += [23]
        logits = torch.cat([feed(policy, state, logits, fed, {3: 30, 0: 31, 2: 32}), back])
        offloader.offload(0)
        offloader.offload(1)
        offloader.offload(2)
        state.select(torch.tensor([], dtype=torch.long))  # all are offloaded
        offloader.discard([0])
        last = offloader.restore([2], [[40] * 3])
        fed[2] += [40] * 3
        final = feed(policy, state, last, fed, {2: 41})
    expected = {row: plain(policy, row, fed[row]) for row in (0, 2, 3)}
    for place, row in enumerate((3, 0, 2)):
        length = {3: 6, 0: 5, 2: 7}[row]
        assert (logits[place] - expected[row][length]).abs().max() < 1e-4
    assert (logits[3] - expected[0][4]).abs().max() < 1e-4
    assert (logits[4] - expected[2][6]).abs().max() < 1e-4
    assert (last[0] - expected[2][10]).abs().max() < 1e-4
    assert (final[0] - expected[2][11]).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "fused"), [("llama", True), ("llama", False), ("t5", False)])
@torch.no_grad()
def test_memory_that_was_never_written_is_never_read(name, fused, monkeypatch):
    allocate = shared_prefix._allocate

    def allocate_nan(*arguments):
        return allocate(*arguments).fill_(torch.nan)

    monkeypatch.setattr(shared_prefix, "_allocate", allocate_nan)
    policy, fed = tiny_policy(name), {row: [] for row in range(4)}
    with policy.decoding(4, fused=fused):
        logits, state = policy.prefill(PROMPTS.prompt_ids, PROMPTS.prompt_mask, GROUP, 12)
        offloader = policy.make_row_offloader(state)
        feed(policy, state, logits, fed, {0: 5, 1: 6, 2: 7, 3: 8})
        offloader.offload(0)
        state.select(torch.tensor([3, 1, 2]))
        # The restored row is longer than all others, whose tokens move to the right.
        offloader.restore([0], [[20, 21, 22, 23, 24, 25]])
        fed[0] += [20, 21, 22, 23, 24, 25]
        logits = feed(policy, state, None, fed, {3: 30, 1: 31, 2: 32, 0: 33})
    for place, row in enumerate((3, 1, 2, 0)):
        expected = plain(policy, row, fed[row])[len(fed[row])]
        assert (logits[place] - expected).abs().max() < 1e-4


def plain(policy, row, fed):
    """Compute the logits [C + 1, V] of one row alone."""
    prompt = row // GROUP
    ids = PROMPTS.prompt_ids[prompt][PROMPTS.prompt_mask[prompt]][None]
    return policy.dense_logits(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([fed]))[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@torch.no_grad()
def test_rows_that_join_later_continue_their_own_prompts(name):
    policy, fed = tiny_policy(name), {row: [] for row in range(4)}
    half = PROMPTS.prompt_ids.split(1), PROMPTS.prompt_mask.split(1)
    with policy.decoding(4):
        logits, state = policy.prefill(half[0][0], half[1][0], GROUP, 12)
        feed(policy, state, logits, fed, {0: 5, 1: 6})
        feed(policy, state, logits, fed, {0: 7, 1: 8})
        state.join(policy.prefill(half[0][1], half[1][1], GROUP, 12)[1])
        feed(policy, state, logits, fed, {0: 9, 1: 10, 2: 11, 3: 12})
        state.select(torch.tensor([3, 1]))
        logits = feed(policy, state, logits, fed, {3: 13, 1: 14})
    for place, row in enumerate((3, 1)):
        assert (logits[place] - plain(policy, row, fed[row])[-1]).abs().max() < 1e-4
