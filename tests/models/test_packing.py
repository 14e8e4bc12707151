from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.models.loading import Precision, as_policy
from litgrpo.models.packing import (
    Packing,
    can_share,
    family_buckets,
    sharing_pays,
    similar_lengths,
)
from litgrpo.types import TokenRows
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model
from tests.support.packed_shared_prefix import SPECIAL, rows


def test_a_packing_worked_out_by_hand():
    prompt_ids = torch.tensor([[0, 11, 12], [21, 22, 23]])
    completion_ids = torch.tensor([[5, 6, 0], [7, 8, 9], [4, 0, 0]])
    packing = Packing.of_groups(
        TokenRows(
            prompt_ids, prompt_ids > 0, torch.tensor([1, 0, 1]), completion_ids, completion_ids > 0
        )
    )
    # Prompt 0, the completion 7 8 (9 is not fed), prompt 1, the completion 5 (6 is not fed).
    assert packing.num_tokens == 8
    assert packing.ids.tolist() == [11, 12, 7, 8, 21, 22, 23, 5, *[0] * 120]
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, *[0] * 120]
    assert packing.groups == [[0, 2, 4], [4, 7, 8]]
    # 5 6 follow tokens 6 7; 7 8 9 follow 1 2 3; 4 follows 6.
    assert packing.predicting.tolist() == [6, 7, 1, 2, 3, 6]
    (bucket,) = packing.suffixes
    assert bucket.grid(packing.ids).tolist() == [[7, 8], [5, 0]]
    assert bucket.ungrid(bucket.grid(packing.ids)).tolist() == [7, 8, 5]
    assert packing.prefixes.grid(packing.ids).tolist() == [[11, 12, 0], [21, 22, 23]]


def test_rows_of_similar_length_share_a_bucket():
    lengths = torch.tensor([100, 1, 59, 60, 0, 40, 16, 3])
    parts = [lengths[part].tolist() for part in similar_lengths(lengths)]
    assert parts == [[100, 60], [59, 40], [16, 3, 1]]


def test_unknown_models_and_dropout_read_rows_one_by_one():
    assert can_share(tiny_model("qwen2"))
    assert not can_share(tiny_model("gpt2", attn_pdrop=0.1))
    assert not can_share(AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **SPECIAL)))
    off = as_policy(tiny_model("qwen2"), byte_tokenizer(), precision=Precision(share_prompts=False))
    assert not off.shares_prompts


def test_rows_are_packed_only_where_it_saves_tokens():
    assert sharing_pays(rows())
    longest = prompt_batch("same length", "these do so")
    ids = rows(lengths=(5, 5), prompt_of=(0, 1)).completion_ids
    prompts = longest.prompt_ids, longest.prompt_mask, torch.tensor([0, 1])
    assert not sharing_pays(TokenRows(*prompts, ids, torch.ones_like(ids, dtype=torch.bool)))
    holes = rows().completion_mask & (torch.arange(30) != 1)
    assert not sharing_pays(replace(rows(), completion_mask=holes))


LENGTHS = torch.tensor([3, 9, 1, 9, 4, 4, 30, 0, 2])


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(None, None), (3, None), (None, 25), (4, 31)])
def test_family_buckets_hold_every_row_once_and_share_parents_within_the_limits(
    max_rows, max_tokens
):
    parents = torch.tensor([0, 2, 0, 2, 2, 0, 3, 2, 0])
    of_parents = torch.tensor([7, 99, 2, 20])
    buckets = family_buckets(LENGTHS, of_parents, parents, max_rows=max_rows, max_tokens=max_tokens)
    assert sorted(torch.cat(buckets).tolist()) == list(range(len(LENGTHS)))
    for each in buckets:
        tokens = int(LENGTHS[each].sum() + of_parents[parents[each].unique()].sum())
        assert len(each) <= (max_rows or len(LENGTHS))
        assert max_tokens is None or tokens <= max_tokens or len(each) == 1


def test_a_family_stays_together_where_it_fits():
    lengths, parents = torch.full((6,), 10), torch.tensor([0, 1, 0, 1, 0, 1])
    buckets = family_buckets(lengths, torch.tensor([5, 5]), parents, max_tokens=69)
    assert [each.tolist() for each in buckets] == [[0, 2, 4], [1, 3, 5]]
    none = torch.tensor([], dtype=torch.long)
    assert family_buckets(none, none, none) == []
