"""Table of model types: which of them may use packing, static shapes and the fused decoding step.

A model type that is not listed is trained row by row and decoded by transformers' own code, which
is slower and equally exact. Every entry is tested: packed rows, static shapes and fused decoding
against the transformers forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that depend only on the position; the others also on the longest row.
POSITIONAL_ROPES = {"default", "linear", "llama3", "yarn"}
LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}


@dataclass(frozen=True)
class FusedLayout:
    """Modules of a decoder layer that the fused decoder computes."""

    layer_norms: frozenset[str] = frozenset({"input_layernorm", "post_attention_layernorm"})
    head_norms: frozenset[str] = frozenset()  # of query and key heads
    # Norms after attention and MLP too, norm weights stored minus 1, scaled embeddings and
    # soft-capped scores.
    gemma: bool = False


@dataclass(frozen=True)
class Architecture:
    """Capabilities of a model type."""

    # An encoder computes the prompt. Otherwise tokens interact in transformers' attention functions
    # only, so that rows may be packed and decoded in static shapes.
    encoder_decoder: bool = False
    fused: FusedLayout | None = None  # None: the fused decoder does not support it


GEMMA2 = FusedLayout(
    layer_norms=FusedLayout().layer_norms
    | {"pre_feedforward_layernorm", "post_feedforward_layernorm"},
    gemma=True,
)
ARCHITECTURES = {
    "gemma": Architecture(),
    "gemma2": Architecture(fused=GEMMA2),
    "gemma3_text": Architecture(),
    "gpt2": Architecture(),
    "gpt_neox": Architecture(),
    "granite": Architecture(),
    "llama": Architecture(fused=FusedLayout()),
    "mistral": Architecture(),
    "mt5": Architecture(encoder_decoder=True),
    "olmo2": Architecture(),
    "phi": Architecture(),
    "phi3": Architecture(),
    "qwen2": Architecture(fused=FusedLayout()),
    "qwen3": Architecture(fused=FusedLayout(head_norms=frozenset({"q_norm", "k_norm"}))),
    "smollm3": Architecture(),
    "starcoder2": Architecture(),
    "t5": Architecture(encoder_decoder=True),
}
ENCODER_DECODER = sorted(
    model_type for model_type, entry in ARCHITECTURES.items() if entry.encoder_decoder
)
DECODER_ONLY = sorted(ARCHITECTURES.keys() - ENCODER_DECODER)
# Types whose forward pass is exact with left padding, but whose gradient is not finite: they
# normalize by the standard deviation of a row, and that of an all-zero row has no derivative.
NO_LEFT_PADDING = {"gemma3n_text"}

# Children of the gated MLP of every fused layout.
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def modeling_module_name(model: PreTrainedModel) -> str:
    """Return the name of the transformers module that defines models of this type."""
    model_type = model.config.model_type
    return f"transformers.models.{model_type}.modeling_{model_type}"


def find_fused_layout(model: PreTrainedModel) -> FusedLayout | None:
    """Return the layout of a model's layers; None if it is unknown or not transformers' class."""
    layout = ARCHITECTURES.get(model.config.model_type, Architecture()).fused
    return layout if type(model).__module__ == modeling_module_name(model) else None


def is_listed(model: PreTrainedModel) -> bool:
    """Check that this is transformers' model of a listed type."""
    is_original = type(model).__module__.startswith("transformers.")
    return is_original and model.config.model_type in ARCHITECTURES


def has_known_layers(model: PreTrainedModel) -> bool:
    """Check that this is a listed decoder-only model whose tokens interact in attention only."""
    return (
        is_listed(model)
        and model.config.model_type in DECODER_ONLY
        and set(getattr(model.config, "layer_types", None) or ()) <= LAYER_TYPES
    )


def list_rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """Return the types of rotary embeddings in `rope_parameters` of a config."""
    return {rope["rope_type"] for rope in list_rope_parameters(parameters) if rope}


def list_rope_parameters(parameters: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return `rope_parameters` of a config as a list: one for all layers, or one per layer type."""
    parameters = parameters or {}
    return [inner for inner in parameters.values() if isinstance(inner, dict)] or [parameters]
