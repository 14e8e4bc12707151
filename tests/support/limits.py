"""Shared by tests of models.limits."""

from transformers import AutoConfig, AutoModelForCausalLM

SMALL = dict(vocab_size=259, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)


def random_model(model_type, **sizes):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | sizes))
