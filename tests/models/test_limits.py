"""Prompts and completions that a model has no positions or no embeddings for."""

import pytest

from litgrpo.models.limits import ContextLength, check_lengths, check_tokens, find_context_length
from tests.support.limits import random_model
from tests.support.models import tiny_model, tiny_policy
from tests.support.raises import raises_for


def test_position_embeddings_are_a_hard_limit_and_rotary_ones_are_not():
    assert find_context_length(tiny_model("gpt2", n_positions=40)) == ContextLength(40, hard=True)
    opt = random_model("opt", max_position_embeddings=40, ffn_dim=32, word_embed_proj_dim=32)
    assert find_context_length(opt) == ContextLength(40, hard=True)
    gptj = random_model("gptj", n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=40)
    assert find_context_length(gptj) == ContextLength(40, hard=True)
    assert find_context_length(tiny_model("llama", max_position_embeddings=40)) == ContextLength(
        40, hard=False
    )
    assert find_context_length(tiny_model("t5")) is None
    assert find_context_length(random_model("bloom")) is None


def test_rows_beyond_position_embeddings_raise_with_the_options_to_change():
    policy = tiny_policy("gpt2", n_positions=40)
    check_lengths(policy, {"train": 30, "val": 20}, 10, "max_prompt_length")
    with raises_for(
        "val", "gpt2", "data.max_prompt_length to at most 30", "model.max_completion_length by 1"
    ):
        check_lengths(policy, {"train": 30, "val": 31}, 10, "max_prompt_length")
    with raises_for("41", "data.max_length to at most 40", "data.long_examples"):
        check_lengths(policy, {"train": 41}, 0, "max_length")


def test_rows_beyond_rotary_positions_warn():
    policy = tiny_policy("llama", max_position_embeddings=40)
    with pytest.warns(UserWarning, match="data.max_prompt_length"):
        check_lengths(policy, {"predict": 31}, 10, "max_prompt_length")
    check_lengths(policy, {"predict": 30}, 10, "max_prompt_length")
    check_lengths(policy, {}, 10, "max_prompt_length")


def test_a_token_without_an_embedding_raises_with_its_row():
    policy = tiny_policy("llama")
    check_tokens(policy, {"train": [[1, 258]], "val": []})
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    with raises_for("Row 2", "val", "<image>"):
        check_tokens(policy, {"train": [[1, 258]], "val": [[3], [4, 259]]})
