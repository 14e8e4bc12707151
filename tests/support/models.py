"""Shared by tests of conftest."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

from litgrpo.models.loading.load import build_policy
from litgrpo.models.policy import Policy
from litgrpo.types import PromptBatch, pad_left

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


ARCHITECTURES = {
    # A sliding window below the sequence length and both soft-caps, as in the real model.
    "gemma2": dict(
        **SIZES,
        intermediate_size=48,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        initializer_range=0.3,
    ),
    "qwen2": dict(**SIZES, intermediate_size=48, initializer_range=0.3),
    "llama": dict(**SIZES, intermediate_size=48, initializer_range=0.3),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, initializer_range=0.3),
    "t5": dict(
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        initializer_factor=1.7,
    ),
}


SPECIAL = {
    "gpt2": dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "t5": dict(dropout_rate=0, decoder_start_token_id=0),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, after <pad> 0, <bos> 1 and <eos> 2; the begin token is put in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=fast, padding_side="left", **special)


def tiny_model(architecture: str, *, seed: int = 0, **sizes):
    """A random two-layer model of the given architecture over the byte vocabulary."""
    special = dict(vocab_size=259, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    settings = special | SPECIAL.get(architecture, {}) | ARCHITECTURES[architecture] | sizes
    config = AutoConfig.for_model(architecture, **settings)
    eager = architecture == "gemma2"
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(
            config, attn_implementation="eager" if eager else "sdpa", dtype=torch.float32
        )
    return model.eval()


def tiny_policy(architecture: str, **kwargs) -> Policy:
    """A random policy in eval mode."""
    return build_policy(tiny_model(architecture, **kwargs), byte_tokenizer()).eval()


def prompt_batch(*texts: str, length: int = 0) -> PromptBatch:
    """Prompts of byte tokens, padded on the left to at least `length`."""
    ids, mask = pad_left([byte_tokenizer()(text).input_ids for text in texts], 0, length)
    return PromptBatch(ids, mask, list(texts), {}, torch.arange(len(texts)))


@pytest.fixture(params=ARCHITECTURES)
def architecture(request) -> str:
    """Each of the five architectures in turn."""
    return request.param
