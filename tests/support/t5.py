"""Shared by tests of models.t5."""

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from litgrpo.models.loading.load import build_policy
from tests.support.models import byte_tokenizer

SIZES = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0)


VARIANTS = {
    "Flan-T5": dict(model_type="t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mT5": dict(model_type="mt5"),
    "more decoder layers": dict(model_type="t5", num_decoder_layers=3),
}


def variant(name, seed=0):
    """A random policy of another member of the family; the heads of Flan-T5 and mT5 are untied."""
    ids = dict(vocab_size=259, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    config = AutoConfig.for_model(**VARIANTS[name], **SIZES, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        if name != "more decoder layers":
            model.lm_head.weight = torch.nn.Parameter(torch.randn(259, 32) / 4)
    return build_policy(model.eval(), byte_tokenizer()).eval()
