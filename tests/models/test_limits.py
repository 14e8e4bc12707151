"""Prompts and completions that a model has no positions or no embeddings for."""

import pytest

from litgrpo.models.limits import Context, check_lengths, check_tokens, context_of
from tests.support.limits import random_model
from tests.support.models import tiny_model, tiny_policy


def test_tables_of_positions_are_a_hard_limit_and_rotary_ones_are_not():
    assert context_of(tiny_model("gpt2", n_positions=40)) == Context(40, hard=True)
    opt = random_model("opt", max_position_embeddings=40, ffn_dim=32, word_embed_proj_dim=32)
    assert context_of(opt) == Context(40, hard=True)
    gptj = random_model("gptj", n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=40)
    assert context_of(gptj) == Context(40, hard=True)
    assert context_of(tiny_model("llama", max_position_embeddings=40)) == Context(40, hard=False)
    assert context_of(tiny_model("t5")) is None
    assert context_of(random_model("bloom")) is None


def test_learned_positions_refuse_with_the_keys_that_help():
    policy = tiny_policy("gpt2", n_positions=40)
    check_lengths(policy, {"train": 30, "val": 20}, 10, "max_prompt_length")
    with pytest.raises(
        ValueError, match=r"longest of the val data has 31 tokens .* 41 pos"
    ) as said:
        check_lengths(policy, {"train": 30, "val": 31}, 10, "max_prompt_length")
    assert "gpt2 has 40" in str(said.value)
    assert "data.max_prompt_length to 30 or less" in str(said.value)
    assert "lower model.max_completion_length by 1" in str(said.value)
    with pytest.raises(ValueError, match=r"has 41 tokens: 41 positions.*data\.max_length to 40 or"):
        check_lengths(policy, {"train": 41}, 0, "max_length")


def test_rotary_positions_warn_once():
    policy = tiny_policy("llama", max_position_embeddings=40)
    with pytest.warns(UserWarning, match=r"llama was made for 40\. Beyond that"):
        check_lengths(policy, {"predict": 31}, 10, "max_prompt_length")
    check_lengths(policy, {"predict": 30}, 10, "max_prompt_length")
    check_lengths(policy, {}, 10, "max_prompt_length")


def test_a_token_without_an_embedding_is_named_with_its_row():
    policy = tiny_policy("llama")
    check_tokens(policy, {"train": [[1, 258]], "val": []})
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    with pytest.raises(
        ValueError, match=r"Row 2 of the val data contains the token '<image>' \(nu"
    ):
        check_tokens(policy, {"train": [[1, 258]], "val": [[3], [4, 259]]})
