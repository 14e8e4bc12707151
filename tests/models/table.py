"""Tries every language model type of transformers, small and random.

Prints a line with the errors of the start-up checks of each type, and the lists of types in
docs/reference/models.md.

python -m tests.models.table                 # all, some minutes of one core
python -m tests.models.table qwen3 mamba     # only these
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from litgrpo.algorithms.objective import Objective
from litgrpo.checks.invariants import CheckResult, Conditions, Invariant, measure_invariants
from litgrpo.learning.steppers import PlainStepper
from litgrpo.models.architectures import ARCHITECTURES
from litgrpo.models.generic import GenericPolicy
from litgrpo.models.loading.load import Precision, load_policy, load_reference
from litgrpo.models.policy import Policy
from litgrpo.models.weights import find_model_class, select_text_config
from tests.learning.parts import build_training_batch, learner_of, rollouter_of
from tests.support.models import byte_tokenizer, prompt_batch

WIDE = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "dim_model", "emb_dim")
INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim")
EXPERT = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")
DEEP = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
DEEP += ("encoder_layers", "num_decoder_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
HEADS += ("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
SMALL: dict[str, Any] = (
    dict.fromkeys(WIDE, 32)
    | dict.fromkeys(INNER, 48)
    | dict.fromkeys(EXPERT, 24)
    | dict.fromkeys(DEEP, 2)
    | dict.fromkeys(HEADS, 4)
    | dict.fromkeys(EXPERTS, 4)
    | dict(num_key_value_heads=2, head_dim=8, d_kv=8, global_head_dim=8, num_global_kv_heads=2)
    | dict(num_experts_per_tok=2, top_k_experts=2, moe_topk=2, moe_k=2, zero_expert_num=0)
    | dict(num_experts_per_token=2, num_expert_group=1, num_shared_experts=1, moe_top_k=2)
    | dict(num_nextn_predict_layers=0, model_max_length=512, hidden_size_global=32)
    | dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
    | dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)
    | dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8)
    | dict(linear_value_head_dim=8, state_size=8, ssm_state_size=8, hidden_size_per_layer_input=8)
    | dict(rotary_dim=4, mamba_d_state=8, mamba_d_conv=4, d_state=8)
    | dict(sliding_window=6, max_position_embeddings=512, n_positions=512, initializer_range=0.3)
    | dict(vocab_size=259, vocab_size_per_layer_input=259, pad_token_id=0, bos_token_id=1)
    | dict(eos_token_id=2, decoder_start_token_id=0, encoder_hash_byte_group_vocab=64)
    | dict(pronunciation_vocab_size=9, shape_vocab_size=9)
    | dict(adapter_in_dim=32, adapter_input_size=32)
)
ROPE = dict(rope_type="default", rope_theta=1e4)
OWN: dict[str, dict[str, Any]] = {
    "bamba": dict(mamba_n_heads=8, mamba_d_head=8, attn_layer_indices=[1]),
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_head=8, layer_types=["mamba", "attention"]),
    "kimi_linear": dict(
        layer_types=["linear_attention", "full_attention"], linear_head_dim=8, linear_num_heads=4
    ),
    "cohere_compass_text": dict(rope_parameters=dict(full_attention=ROPE)),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    ),
    "qwen4_exp_text": dict(
        layer_types=["linear_attention", "full_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=16,
        indexer_compress_ratio=2,
    ),
    "deepseek_v2": dict(num_experts_per_tok=2, topk_method="greedy"),
    "gemma3n_text": dict(
        num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"]
    ),
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=8, chunk_size=16),
    "xmod": dict(default_language="en_XX", is_decoder=True),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=2),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=6),
    "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8),
    "ministral": dict(head_dim=8),
    "nemotron": dict(head_dim=8, num_key_value_heads=2),
    "zaya": dict(num_experts_per_tok=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "bailing_hybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, chunk_size=16
    ),
    "dots3_note_text": dict(num_key_value_heads=4),
    "reformer": dict(is_decoder=True, axial_pos_embds=False, attn_layers=["local", "local"]),
    "dots1": dict(
        layer_types=["full_attention", "full_attention"],
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
    ),
    "xlstm": dict(qk_dim_factor=1.0, chunk_size=16),
    "falcon_h1": dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
}
PARTS = ("_config", "encoder", "decoder")  # what settings that are configs end with
LARGEST = 8e6  # parameters
TIME_LIMIT = 60  # s of one type
NAMES = {
    Invariant.DECODING: "1 cache",
    Invariant.HEAD: "2 head",
    Invariant.RATIO: "3 ratio",
    Invariant.FROZEN_REFERENCE: "3 stays",
    Invariant.INITIAL_KL: "3 KL",
    Invariant.PADDING: "4 padding",
    Invariant.END_TOKEN: "5 ends",
    Invariant.GROUPS: "6 groups",
    Invariant.SPLIT: "7 split",
}


class TooSlow(BaseException):
    """A type takes longer than it may; no `except Exception` stops it."""


@dataclass
class Row:
    """Result for one model type."""

    model_type: str
    verdict: str
    path: str = ""
    findings: list[CheckResult] = field(default_factory=list)


def small(settings: dict[str, Any], layers: int) -> dict[str, Any]:
    """The sizes to shrink of a config's settings, and those of the configs in it."""
    sizes = SMALL | dict.fromkeys(DEEP, layers)
    found = {name: sizes[name] for name, value in settings.items() if name in sizes and value != ""}
    kept = {name: size for name, size in found.items() if settings[name] is not None}
    inner = {name: each for name, each in settings.items() if isinstance(each, dict)}
    parts = {name: each for name, each in inner.items() if name.endswith(PARTS)}
    own = OWN.get(settings.get("model_type", ""), {})
    return kept | {name: small(each, layers) for name, each in parts.items()} | own


def small_config(model_type: str, layers: int = 2) -> Any:
    """A config of the type with tiny sizes."""
    defaults = AutoConfig.for_model(model_type).to_dict()
    settings = small(defaults, layers)
    if "kv_lora_rank" in defaults:  # latent attention has a key head for every query head
        settings["num_key_value_heads"] = SMALL["num_attention_heads"]
    config = AutoConfig.for_model(model_type, **settings)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    return config


def small_model(model_type: str) -> Any:
    """A random model of the type that reads a text; with more layers where kinds take turns."""
    reasons = []
    for layers in (2, 4, 8):
        try:
            config = select_text_config(small_config(model_type, layers))
            with torch.device("meta"):
                size = sum(each.numel() for each in find_model_class(config)(config).parameters())
            assert size < LARGEST, f"its smallest has {size} parameters"
            torch.manual_seed(0)
            model = find_model_class(config)(config).eval()
            if not config.is_encoder_decoder:
                model(input_ids=torch.arange(3, 13)[None])
        except Exception as error:
            reasons.append(error)
        else:
            return model
    raise reasons[0]


def try_type(model_type: str) -> Row:
    """Build, save, load, check and train one type."""
    try:
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            try:
                small_model(model_type).save_pretrained(folder)
            except Exception as error:
                unsupported = "docs/reference/models.md" in str(error)
                return Row(
                    model_type,
                    f"{'not supported' if unsupported else 'not built small'}: {short(error)}",
                )
            byte_tokenizer().save_pretrained(folder)
            return try_folder(model_type, folder)
    except TooSlow:
        return Row(model_type, f"not tried: more than {TIME_LIMIT} s in small")


def try_folder(model_type: str, folder: str) -> Row:
    """Load, check and train the model of a folder."""
    try:
        policy = load_policy(folder)
        reference = load_reference(policy, None, folder, Precision())
    except ValueError as error:
        return Row(model_type, f"not supported: {short(error)}")
    path = path_of(policy)
    try:
        findings = check_and_train(policy, reference)
    except Exception as error:
        return Row(model_type, f"FAILS: {short(error)}", path)
    wrong = [NAMES[finding.invariant] for finding in findings if not finding.holds]
    return Row(model_type, f"FAILS {', '.join(wrong)}" if wrong else "trains", path, findings)


def check_and_train(policy: Policy, reference: Any) -> list[CheckResult]:
    """Check the invariants and train one iteration."""
    learner = learner_of(policy, Objective(kl_coef=0.1), reference=reference)
    batch = prompt_batch("a", "hello there", "what is 3+4?")
    findings = measure_invariants(
        rollouter_of(policy), learner, batch, Conditions(fresh_reference=True)
    )
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    stepper = PlainStepper(torch.optim.AdamW(policy.parameters(), lr=1e-3))
    learner.update(build_training_batch(learner, batch, unequal), stepper)
    after = zip(before, policy.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in after), "no weight has moved"
    return findings


def unequal(prompts: list[str], completions: list[str]) -> list[float]:
    """Return rewards that differ within every group."""
    return [row % 3 / 2 for row in range(len(completions))]


def path_of(policy: Policy) -> str:
    """Name the code path of a policy."""
    if isinstance(policy, GenericPolicy):
        names = {True: "transformers, with cache", False: "transformers, no cache"}
        return names[policy.cached] + ("" if policy.batched else ", row by row")
    known = policy.bare_model.config.model_type in ARCHITECTURES
    return "shared prompts" if known else "shared prompts in decoding"


def short(error: Exception) -> str:
    """The first sentence of an error."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.replace("|", "/").split(". docs/reference/models.md")[0][:220]


def cells(row: Row) -> str:
    """The line of a row in the table."""
    errors = {NAMES[finding.invariant]: f"{finding.error:.0e}" for finding in row.findings}
    shown = [errors.get(name, "") for name in NAMES.values()]
    return "| " + " | ".join([f"`{row.model_type}`", row.verdict, row.path, *shown]) + " |"


def main(names: list[str]) -> None:
    """Try all types, or those given, and print their lines."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_slow)
    print(f"| {' | '.join(['model type', 'verdict', 'path', *NAMES.values()])} |")
    rows = []
    for name in names or types():
        began = time.monotonic()
        signal.alarm(TIME_LIMIT)
        rows.append(try_type(name))
        signal.alarm(0)
        print(cells(rows[-1]), f"{time.monotonic() - began:.1f} s", flush=True)
    print(*summary(rows), sep="\n")


def too_slow(*_: Any) -> None:
    """End the type that is tried."""
    raise TooSlow


def types() -> list[str]:
    """Every type that generates text after a text."""
    t5_like = [name for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if "t5" in name]
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *t5_like, "switch_transformers"})


def summary(rows: list[Row]) -> list[str]:
    """Lines of the lists of types by code path, and of those that cannot be trained."""
    trains = [row for row in rows if row.verdict == "trains"]
    lines = [
        f"{len(trains)} of the {len(rows)} types of transformers {transformers.__version__}:",
        "",
    ]
    for path in sorted({row.path for row in trains}, key=place):
        names = [f"`{row.model_type}`" for row in trains if row.path == path]
        lines += fold(f"{path}: {len(names)} types", [", ".join(names)])
    others = [row for row in rows if row.verdict != "trains"]
    table = ["| why | model types |", "|---|---|"]
    for reason in sorted({reason_of(row) for row in others}):
        names = [f"`{row.model_type}`" for row in others if reason_of(row) == reason]
        table.append(f"| {reason} | {', '.join(names)} |")
    return lines + fold(f"{len(others)} types that cannot be trained, or were not tried", table)


def reason_of(row: Row) -> str:
    """Return why a type does not train, without its name and numbers."""
    return next((reason for part, reason in REASONS.items() if part in row.verdict), row.verdict)


def place(path: str) -> int:
    """Sort code paths by speed, the fastest first."""
    return PATHS.index(path.removesuffix(", row by row"))


def fold(title: str, lines: list[str]) -> list[str]:
    """Lines that are folded until the reader opens them."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


PATHS = (
    "shared prompts",
    "shared prompts in decoding",
    "transformers, with cache",
    "transformers, no cache",
)


# {part of a verdict: the reason in a few words}
REASONS = {
    "depends on later tokens": "not supported: attention is not causal",
    "encoder-decoder": "not supported: an encoder-decoder model other than T5 and mT5",
    "no text generation class": "not supported: transformers has no text generation class",
    "not built small": "not built small; pretrained models of the type may work",
}


if __name__ == "__main__":
    main(sys.argv[1:])
