"""Prompts and completions that a model has no positions or no embeddings for."""

from dataclasses import replace
from functools import partial

import pytest

from litgrpo.models.limits import (
    ContextLength,
    check_lengths,
    check_rope_length,
    check_tokens,
    find_context_length,
    find_rope_switch,
)
from litgrpo.models.loading.load import build_policy
from litgrpo.rollout.rollouter import Rollouter
from tests.support.limits import random_model
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
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


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("architecture", "rope", "limit"),
    [("llama", LONG, 24), ("phi3", LONG, 24), ("qwen2", DYNAMIC, 48), ("mistral", DYNAMIC, 48)],
)
def test_rows_beyond_the_switch_of_a_rotary_embedding_raise_by_its_name(architecture, rope, limit):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    build = tiny_model
    if architecture not in ("llama", "qwen2"):
        build = partial(random_model, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if architecture == "phi3":  # its config has the limit itself
        sizes["original_max_position_embeddings"] = limit
    model = build(architecture, max_position_embeddings=48, rope_parameters=dict(rope), **sizes)
    policy = build_policy(model, byte_tokenizer())
    check_lengths(policy, {"train": limit - 8}, 8, "max_prompt_length")
    with raises_for(f"beyond {limit}", rope["rope_type"], "data.max_prompt_length"):
        check_lengths(policy, {"train": limit - 7}, 8, "max_prompt_length")
    check_rope_length(policy, limit)
    with raises_for(f"beyond {limit}", rope["rope_type"]):
        check_rope_length(policy, limit + 1)


def test_a_rollout_that_may_reach_the_switch_raises_and_a_shorter_one_is_exact():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = tiny_model("llama", max_position_embeddings=48, rope_parameters=dict(LONG), **sizes)
    policy = build_policy(model, byte_tokenizer()).eval()
    prompts = prompt_batch("a", "what is")
    rollouter = Rollouter(policy, 2, 24 - int(prompts.prompt_mask.sum(1).max()))
    rollout = rollouter.generate(prompts, "train")
    found = policy.logprobs(rollout.tokens).logprobs.detach()
    gap = (found - rollout.sampler_logprobs).masked_fill(~rollout.loss_mask, 0)
    assert gap.abs().max() < 1e-5
    with raises_for("longrope"):
        replace(rollouter, max_completion_length=24).generate(prompts, "train")


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotary_embeddings_of_positions_alone_have_no_switch(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 24}
    assert find_rope_switch(tiny_model("llama", rope_parameters=rope).config) is None


def test_rows_of_more_than_eight_times_the_trained_length_raise():
    policy = build_policy(tiny_model("llama", max_position_embeddings=48), byte_tokenizer())
    with pytest.warns(UserWarning, match="was trained for 48"):
        check_lengths(policy, {"train": 8 * 48 - 10}, 10, "max_prompt_length")
    with raises_for("385 positions", "was trained for 48"):
        check_lengths(policy, {"train": 8 * 48 - 9}, 10, "max_prompt_length")
