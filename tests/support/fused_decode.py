"""Shared by tests of models.fused_decode."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.models import SIZES, tiny_model

VARIANTS = {
    "tied": ("llama", dict(tie_word_embeddings=True)),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "scaled turns": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        ),
    ),
    "yarn": (
        "qwen2",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=4.0,
                original_max_position_embeddings=16,
            )
        ),
    ),
    "window": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "head norms": ("qwen3", dict(**SIZES, intermediate_size=48, head_dim=8, initializer_range=0.3)),
    "own head size": ("llama", dict(head_dim=16)),
    "one key head": ("llama", dict(num_key_value_heads=1)),
    "gemma": ("gemma2", {}),
}


def model_of(variant):
    architecture, settings = VARIANTS[variant]
    if architecture != "qwen3":
        return tiny_model(architecture, **settings)
    special = dict(vocab_size=259, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model("qwen3", **special, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
