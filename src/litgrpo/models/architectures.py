"""The one table of the library's model types: which of them may use what.

A model type that is not here is learned row by row and decoded by the library's own code, which is
slower and never wrong. Each entry is tested: packed rows, static shapes and fused decoding against
the library's forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that depend on nothing but the position, and on how long the longest row is.
POSITIONAL_ROPES = {"default", "linear", "llama3", "yarn"}
LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}


@dataclass(frozen=True)
class FusedLayout:
    """The modules of a decoder layer that the fused decoder computes.

    Args:
        layer_norms: norms of a layer.
        head_norms: norms of query and key heads.
        gemma: norms after attention and MLP too, norm weights stored less 1, scaled embeddings and
            soft-capped scores.
    """

    layer_norms: frozenset[str] = frozenset({"input_layernorm", "post_attention_layernorm"})
    head_norms: frozenset[str] = frozenset()
    gemma: bool = False


@dataclass(frozen=True)
class Architecture:
    """What a model type may use.

    Args:
        encoder_decoder: an encoder reads the prompt; else tokens meet in the library's attention
            functions only, so that rows may be packed and decoded in static shapes.
        fused: how its layers are laid out; None: the fused decoder does not compute it.
    """

    encoder_decoder: bool = False
    fused: FusedLayout | None = None


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
# Types that agree with plain forward passes, but whose gradient is not finite where rows are padded
# on the left: the spread of a row of zeros has none.
PADDED_ON_THE_RIGHT = {"gemma3n_text"}


# Children of the gated MLP of every fused layout.
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def home_of(model: PreTrainedModel) -> str:
    """The module of the library that defines models of this type."""
    kind = model.config.model_type
    return f"transformers.models.{kind}.modeling_{kind}"


def fused_layout(model: PreTrainedModel) -> FusedLayout | None:
    """The layout of a model's layers; None: not the library's own class, or not known."""
    known = ARCHITECTURES.get(model.config.model_type, Architecture()).fused
    return known if type(model).__module__ == home_of(model) else None


def known_types(*, encoder_decoder: bool) -> list[str]:
    """The model types of one kind."""
    kinds = ARCHITECTURES.items()
    return sorted(name for name, kind in kinds if kind.encoder_decoder == encoder_decoder)


DECODER_ONLY = known_types(encoder_decoder=False)
ENCODER_DECODER = known_types(encoder_decoder=True)


def has_known_layers(model: PreTrainedModel) -> bool:
    """Whether this is a decoder-only model of the library whose tokens meet in attention only."""
    return (
        type(model).__module__.startswith("transformers.")
        and model.config.model_type in DECODER_ONLY
        and set(model.config.to_dict().get("layer_types") or ()) <= LAYER_TYPES
    )


def rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """The kinds of rotary embeddings; a config has one for all layers or one for each layer type.

    Args:
        parameters: `rope_parameters` of a model's config.
    """
    if not parameters:
        return set()
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return {each["rope_type"] for each in sets if each}
