"""All uses of transformers' private interface, each with its reason.

Everything else in litgrpo uses documented functions of transformers. Each function here raises a
`RuntimeError` that names the tested versions if the private attribute no longer exists;
`tests/models/test_transformers_compat.py` checks every one against the installed version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel, __version__
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import AttentionMaskInterface

TESTED_VERSIONS = ">=5.23,<6"  # as in setup.cfg

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
MaskFunction = Callable[..., Tensor | None]


def require_private(owner: Any, name: str) -> Any:
    """Return a private attribute of a module, class or instance of transformers."""
    if not hasattr(owner, name):
        owner_class = owner if isinstance(owner, type) else type(owner)
        raise RuntimeError(
            f"transformers {__version__} has no {owner_class.__name__}.{name}, which litgrpo uses. "
            f"Install a tested version: pip install 'transformers{TESTED_VERSIONS}'."
        )
    return getattr(owner, name)


# --- attention ---


def register_attention(name: str, attend: AttentionFunction, mask: MaskFunction | None) -> None:
    """Register an attention function and its mask function with transformers (public interface).

    Registering the same name again replaces the entry, so this may be called for every policy.
    `mask` builds the attention mask once per forward pass. None: there is no mask, and transformers
    does not look at the positions, for which the host would wait for a GPU.
    """
    AttentionInterface.register(name, attend)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


@contextmanager
def use_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run a model, or the decoder of one, with another registered attention function.

    Sets `config._attn_implementation`. The public `set_attn_implementation` visits all modules and
    reads source files, which takes longer than a decoding step of a small model; this is called
    once per token.
    """
    config: Any = model.config
    original = require_private(config, "_attn_implementation")
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = original


def keep_attention_in_recompute(
    model: PreTrainedModel,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of torch's activation checkpointing: forward pass and recomputation.

    The backward pass runs after `use_attention` has ended, so the recomputation must select the
    attention function of the forward pass again.
    """
    name = require_private(model.config, "_attn_implementation")
    return nullcontext(), use_attention(model, name)


def supports_sdpa(model_class: type[PreTrainedModel]) -> bool:
    """Check if a model class can compute attention by torch's scaled_dot_product_attention.

    `plan` needs to know this before a model exists; the public way is to build the model and
    read the attention that it selected.
    """
    return bool(require_private(model_class, "_supports_sdpa"))


# --- layers ---


def find_unsplit_modules(model: PreTrainedModel) -> list[str]:
    """Return the class names of a model's layers, e.g. `["LlamaDecoderLayer"]`.

    FSDP wrappers (accelerate, TRL, torchtitan) read the same attribute; there is no public one.
    """
    return sorted(require_private(model, "_no_split_modules") or ())


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the backward pass of a model recompute activations (gradient checkpointing)."""
    # Versions that vLLM needs have the old name only; newer ones warn about it.
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    context = partial(keep_attention_in_recompute, model)
    enable({"use_reentrant": False, "context_fn": context})
    remove_input_hooks(model)


def remove_input_hooks(model: PreTrainedModel) -> None:
    """Remove the hooks that give the output of the embedding a gradient.

    Transformers adds them to models that checkpoint activations, and peft adds them again. Only
    reentrant checkpoints need them, and a model with hooks is decoded without the fused decoder.
    """
    if hasattr(model, "_require_grads_hook"):
        model.disable_input_require_grads()


def checkpoints_activations(model: PreTrainedModel) -> bool:
    """Return True if the backward pass recomputes activations (gradient checkpointing).

    The public property has another name in older versions, which environments with vLLM have; both
    read this attribute of the layers.
    """
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


# --- step-by-step generation ---


def prepare_generation(
    model: PreTrainedModel, inputs: dict[str, Any], *, num_rows: int, max_length: int
) -> None:
    """Add the cache of a model's own type to the inputs of its forward pass.

    `model.generate` samples whole completions and cannot be stepped from outside, which stop
    strings, forced random numbers and multi-turn episodes need. `inputs` are changed in place, and
    `max_length` includes the prompt.
    """
    prepare = require_private(model, "_prepare_cache_for_generation")
    prepare(GenerationConfig(), inputs, GenerationMode.SAMPLE, num_rows, max_length)


def update_generation_inputs(
    model: PreTrainedModel, output: Any, inputs: dict[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments for the next token: cache, longer mask and positions."""
    update = require_private(model, "_update_model_kwargs_for_generation")
    next_inputs: dict[str, Any] = update(output, inputs)
    return next_inputs
