"""Shared by tests of models.packing."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.types import TokenRows
from tests.support.models import SIZES, prompt_batch

TEXTS = ("a", "what is 3+4?", "hello", "an unused prompt")


SPECIAL = dict(vocab_size=259, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def rows(lengths=(9, 1, 4, 30, 2, 17, 22, 3), prompt_of=(1, 1, 1, 1, 0, 2, 0, 2)):
    """Completions of these lengths of prompts in any order; one prompt has none."""
    prompts = prompt_batch(*TEXTS)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 259, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    prompt_of = torch.tensor(prompt_of)
    return TokenRows(prompts.prompt_ids, prompts.prompt_mask, prompt_of, ids, mask)


def model_of_type(model_type):
    """A random two-layer model of a known type, windows below the length where it has them."""
    own = {
        "gpt2": dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "gemma": dict(head_dim=8),
        "gemma3_text": dict(head_dim=8, sliding_window=6, layer_types=["sliding_attention"] * 2),
        "mistral": dict(sliding_window=6),
        "qwen3": dict(head_dim=8),
        "gpt_neox": dict(hidden_dropout=0.0, attention_dropout=0.0),
        "smollm3": dict(no_rope_layers=[1, 0]),
    }.get(model_type, {})
    sizes = {} if model_type == "gpt2" else SIZES | dict(intermediate_size=48)
    settings = SPECIAL | sizes | dict(initializer_range=0.3) | own
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
