"""Export a policy as a Hugging Face folder, or its adapter as a PEFT folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from litgrpo.distributed.device import backend, to_host
from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.distributed.messages import rank
from litgrpo.models.adapters import (
    is_quantized,
    merge_adapter,
    merge_into_dequantized,
    save_adapter,
)
from litgrpo.models.loading.load import Dtype
from litgrpo.models.loading.sharded_weights import collect_weights, write_weights
from litgrpo.models.policy import Policy
from litgrpo.models.weights import silence_transformers


def export(policy: Policy, folder: str | Path, dtype: Dtype | None = None) -> None:
    """Write the policy as a folder that transformers' `from_pretrained` loads.

    Adapters are merged into the weights; the policy itself is unchanged. If it is sharded, every
    rank must call this, and no rank holds the whole model.

    Args:
        policy: the policy.
        folder: where to write config, weights (safetensors) and tokenizer.
        dtype: of the weights in the folder; None: unchanged.

    Raises:
        OSError: writing fails.

    Example:
        `export(grpo.policy, "my_model", dtype="bfloat16")`, then
        `AutoModelForCausalLM.from_pretrained("my_model")`.
    """
    folder = Path(folder)
    if is_sharded(policy):
        _export_shards(policy, folder, dtype)
        if rank():
            return
    else:
        _export_whole(policy, folder, dtype)
    _save_tokenizer(policy, folder)
    _align_permissions(folder)


def _export_whole(policy: Policy, folder: Path, dtype: Dtype | None) -> None:
    model: Any = policy.model
    if policy.has_adapter:
        model = merge_into_dequantized(model) if is_quantized(model) else merge_adapter(model)
    if dtype is not None:
        model = copy.deepcopy(model).to(getattr(torch, dtype))
    config = _restore_config(policy, model)
    trained_config, model.config = model.config, config
    try:
        with silence_transformers():
            weights = _copy_to_host(model) if backend(model.device).static_shapes else None
            model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    finally:
        model.config = trained_config


def _export_shards(policy: Policy, folder: Path, dtype: Dtype | None) -> None:
    write_weights(collect_weights(policy.model, dtype and getattr(torch, dtype)), folder)
    if rank():
        return
    config = _restore_config(policy, policy.bare_model)
    config.dtype = dtype or config.dtype
    config.architectures = [type(policy.bare_model).__name__]
    config.save_pretrained(folder)
    if policy.bare_model.generation_config is not None:
        policy.bare_model.generation_config.save_pretrained(folder)


def _restore_config(policy: Policy, model: Any) -> Any:
    """Copy the model's config and undo the changes made at load."""
    config = copy.deepcopy(model.config)
    for name, value in policy.original_dropout.items():
        setattr(config, name, value)
    if config.is_encoder_decoder:
        # Transformers 5 ignores this for T5; older versions tie the head if it is True.
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        config.tie_word_embeddings = is_tied
    return config


def _copy_to_host(model: Any) -> dict[str, Tensor]:
    """Return the state dict in host memory; tied weights stay one tensor."""
    state = model.state_dict(keep_vars=True)
    tensors = {id(tensor): tensor for tensor in state.values()}
    copies = dict(zip(tensors, to_host(list(tensors.values())), strict=True))
    return {name: copies[id(tensor)] for name, tensor in state.items()}


def export_adapter(policy: Policy, folder: str | Path) -> None:
    """Write the trained adapter in PEFT's format, with the tokenizer."""
    if not policy.has_adapter:
        raise ValueError(
            "Could not export an adapter: this run trains all weights (model.lora is not set). "
            "Export the model instead."
        )
    save_adapter(policy.model, folder)
    if rank():
        return
    _save_tokenizer(policy, Path(folder))


def _save_tokenizer(policy: Policy, folder: Path) -> None:
    """Save the tokenizer under a class name that older transformers know.

    Transformers 5 writes `TokenizersBackend`, which version 4 cannot load.
    """
    policy.tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2) + "\n")


def _align_permissions(folder: Path) -> None:
    """Give the weights the permissions of config.json; safetensors writes private files."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
