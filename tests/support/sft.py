"""Shared by tests of training.sft."""

from litgrpo.models.loading.scratch import Scratch

SIZES = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "sliding_window": 8}


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


SCRATCH = Scratch({"model_type": "gemma2", **SIZES, **LAYERS}, vocab_size=300)
