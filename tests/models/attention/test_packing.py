from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.models.attention.packing import Packing, can_share, sharing_pays, similar_lengths
from litgrpo.models.loading import Precision, as_policy
from litgrpo.types import TokenRows
from tests.conftest import byte_tokenizer, prompt_batch, tiny_model
from tests.models.attention.test_packed_shared_prefix import SPECIAL, rows


def test_a_packing_worked_out_by_hand():
    prompt_ids = torch.tensor([[0, 11, 12], [21, 22, 23]])
    completion_ids = torch.tensor([[5, 6, 0], [7, 8, 9], [4, 0, 0]])
    packing = Packing.of_groups(
        TokenRows(
            prompt_ids, prompt_ids > 0, torch.tensor([1, 0, 1]), completion_ids, completion_ids > 0
        )
    )
    # Prompt 0, the completion 7 8 (9 is not fed), prompt 1, the completion 5 (6 is not fed).
    assert packing.ids.tolist() == [11, 12, 7, 8, 21, 22, 23, 5]
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
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
