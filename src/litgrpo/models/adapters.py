"""LoRA and QLoRA adapters: add, load, merge and save them in PEFT's format.

Sources: LoRA, arXiv:2106.09685; QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.tensor import DTensor

from litgrpo.argument_types import check_field_types
from litgrpo.distributed.device import to_host
from litgrpo.distributed.messages import rank, rank_zero_info
from litgrpo.models.weights import check_finite
from litgrpo.tensors import full_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINED, INITIAL = "default", "initial"  # names of the adapters in a PEFT model
CONFIG_FILE = "adapter_config.json"
# PEFT adapts every layer of these types but two, whose weights Mamba's kernels read directly.
MAMBA_TYPES = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
NOT_IN_MAMBA = ["out_proj", "conv1d"]
PEFT_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}


@check_field_types
@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters; weights are frozen, and the reference is the model without adapter.

    Args:
        rank: rank of each adapter (PEFT: r).
        alpha: the adapter's output is scaled by alpha / rank (PEFT: lora_alpha).
        target_modules: names of the linear layers to adapt; `all-linear` takes every one that PEFT
            can adapt (in Mamba models all but `out_proj`).
        dropout: dropout before the adapter; above 0, training computes other probabilities than
            sampling did.
        modules_to_save: names of modules that are fully trained and saved with the adapter, such as
            `lm_head` or `embed_tokens`.
        use_rslora: scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732).
        use_dora: train the norm of each weight column separately (DoRA, arXiv:2402.09353).
        adapter_path: folder of an adapter in PEFT's format to continue training from. Its rank,
            alpha, modules and type are used, and the reference is the model with this adapter.

    Example:
        `LoRA(rank=16, alpha=32, target_modules=["q_proj", "v_proj"])`, in YAML
        `lora: {rank: 16, alpha: 32, target_modules: [q_proj, v_proj]}`.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    dropout: float = 0.0
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    adapter_path: str | None = None

    @property
    def peft_settings(self) -> dict[str, Any]:
        """These settings under the names of `peft.LoraConfig`."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        del settings["adapter_path"]
        return {PEFT_NAMES.get(name, name): value for name, value in settings.items()}


def add_adapters(model: PreTrainedModel, lora: LoRA) -> PreTrainedModel:
    """Add low-rank adapters to a model's linear layers; its weights are frozen in place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("lora needs the package peft: pip install peft") from error
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    settings = lora.peft_settings
    if lora.adapter_path is not None:
        settings = _read_settings(lora, lora.adapter_path)
    elif lora.target_modules == "all-linear" and model.config.model_type in MAMBA_TYPES:
        settings["exclude_modules"] = NOT_IN_MAMBA
    try:
        peft_model: Any = get_peft_model(model, LoraConfig(**settings, task_type=task))
    except (RuntimeError, TypeError, ValueError) as error:
        names = sorted({name.rpartition(".")[2] for name in list_linear_names(model)})
        raise ValueError(
            f"lora does not fit the model: {' '.join(str(error).split())[:300]} Set "
            f"model.lora.target_modules to some of its linear layers: {', '.join(names)}."
        ) from error
    if settings.get("layer_replication"):
        separate_replicated_layers(peft_model)
    check_not_tied(peft_model)
    if lora.adapter_path is not None:
        read_adapter(peft_model, lora.adapter_path, TRAINED)
    return peft_model


def separate_replicated_layers(peft_model: Any) -> None:
    """Copy weights that layers share by PEFT's `layer_replication`, each with separate adapters.

    Merging the adapter of one layer would change the others.
    """
    ends = (peft_model.get_input_embeddings(), peft_model.get_output_embeddings())
    tied = {id(layer.weight) for layer in ends if layer is not None}
    seen: set[int] = set()
    for module in peft_model.modules():
        for name, weight in module._parameters.items():
            if weight is None or id(weight) in tied:
                continue
            if id(weight) in seen:
                clone = weight.detach().clone()
                module._parameters[name] = torch.nn.Parameter(clone, weight.requires_grad)
            seen.add(id(weight))


def check_not_tied(peft_model: Any) -> None:
    """Raise if an adapter changes a weight that another module uses as well.

    Merging the adapter would change both modules, so that the exported model would not be the
    trained one, and neither would that of a vLLM server.
    """
    names_by_weight: dict[int, list[str]] = {}
    for name, module in peft_model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            names_by_weight.setdefault(id(weight), []).append(name)
    for name, module in peft_model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        weight = module.base_layer._parameters.get("weight")
        tied_names = [
            tied_name
            for tied_name in names_by_weight.get(id(weight), [])
            if not tied_name.startswith(f"{name}.")
        ]
        if tied_names:
            adapted_name = name.rpartition(".")[2]
            raise ValueError(
                f"lora adapts {adapted_name}, whose weight is tied to that of "
                f"{tied_names[0].removesuffix('.base_layer').rpartition('.')[2]}: merging would "
                f"change both. Leave {adapted_name} out of model.lora.target_modules, or train it "
                f"in full with model.lora.modules_to_save: [{adapted_name}]."
            )


def list_linear_names(model: PreTrainedModel) -> list[str]:
    """Return the full names of a model's linear layers."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, nn.Linear | Conv1D)]


def _read_settings(lora: LoRA, folder: str) -> dict[str, Any]:
    """Read the `LoraConfig` of a saved adapter; raise if `lora` contradicts it."""
    from peft import LoraConfig

    if not (Path(folder) / CONFIG_FILE).is_file():
        raise ValueError(
            f"model.lora.adapter_path: {folder!r} is not an adapter folder (no {CONFIG_FILE} in "
            "it). Give a folder written by peft's save_pretrained, such as RUN/final_adapter."
        )
    file_settings = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    peft_type = file_settings.get("peft_type")
    if peft_type != "LORA":
        raise ValueError(
            f"model.lora.adapter_path: {folder!r} contains an adapter of type {peft_type}; "
            "expected LORA."
        )
    lora_config = LoraConfig.from_pretrained(folder)
    config, settings, default = lora_config.to_dict(), lora.peft_settings, LoRA().peft_settings
    del settings["lora_dropout"]  # a setting of the run, not of the adapter
    options = {peft_name: option for option, peft_name in PEFT_NAMES.items()}
    for name, value in settings.items():
        if value not in (default[name], config[name]):
            option = options.get(name, name)
            raise ValueError(
                f"model.lora.{option} is {value!r}, but the adapter in model.lora.adapter_path has "
                f"{config[name]!r}. Leave out model.lora.{option} or model.lora.adapter_path."
            )
    rank_zero_info(
        f"Continuing from the adapter in {folder}: rank {config['r']}, alpha {config['lora_alpha']}"
    )
    not_settings = {"peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"}
    names = {field.name for field in fields(lora_config)} - not_settings
    return {name: config[name] for name in names if name in config} | {"lora_dropout": lora.dropout}


def read_adapter(peft_model: Any, folder: str, name: str) -> None:
    """Read the weights of adapter `name`; the folder must contain all of them and no others.

    An adapter that the model does not have yet is added and frozen.
    """
    advice = "Set pretrained to the model that the adapter was trained on."
    try:
        report = peft_model.load_adapter(folder, name, is_trainable=name == TRAINED)
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"The adapter in {folder!r} does not fit this model: "
            f"{' '.join(str(error).split())[:300]}. {advice}"
        ) from error
    missing = [key for key in report.missing_keys if f".{name}" in key]
    for problem, names in {"missing": missing, "unexpected": report.unexpected_keys}.items():
        if names:
            raise ValueError(
                f"The adapter in {folder!r} does not fit this model: {problem} "
                f"{min(names)} ({len(names)} in all). {advice}"
            )
    weights = (
        (key, weight) for key, weight in peft_model.state_dict().items() if f".{name}" in key
    )
    check_finite(weights, f"The adapter in {folder!r} is damaged")


@contextmanager
def use_initial_adapter(peft_model: Any) -> Iterator[None]:
    """Compute with the adapter that training started from."""
    peft_model.set_adapter(INITIAL, inference_mode=True)
    try:
        yield
    finally:
        peft_model.set_adapter(TRAINED)


@contextmanager
def perturb_adapters(model: Any) -> Iterator[None]:
    """Change all trained weights a little, for checks, and restore them.

    A new adapter adds 0, so code that leaves it out computes correct numbers at first.
    """
    trained = [weight.data for weight in model.parameters() if weight.requires_grad]
    weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained]
    originals = [weight.clone() for weight in weights]
    for weight in weights:
        matrix = weight.view(weight.shape[0], -1)
        # Products of two numbers in [-0.2, 0.2), in place: an embedding may be large.
        column, row = (
            torch.arange(size, device=weight.device).mul(0.618034).frac().sub(0.5).mul(0.4)
            for size in matrix.shape
        )
        matrix.addr_(column.to(weight.dtype), row.to(weight.dtype))
    try:
        yield
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.copy_(original)


def merge_adapter(peft_model: Any) -> Any:
    """Copy the transformers model with the trained adapter merged into its weights."""
    return copy.deepcopy(peft_model).merge_and_unload(adapter_names=[TRAINED])


def save_adapter(peft_model: Any, folder: str | Path) -> None:
    """Write the trained adapter as a folder that PEFT, vLLM and `lora.adapter_path` read."""
    trained = {name for name, weight in peft_model.named_parameters() if weight.requires_grad}
    # Some 4-bit layers have strings in their state dict. Of sharded weights only the trained ones
    # are gathered; PEFT does not write the others.
    state = {
        name: full_tensor(value) if name in trained else value
        for name, value in peft_model.state_dict().items()
        if torch.is_tensor(value) and (name in trained or not isinstance(value, DTensor))
    }
    if rank():
        return
    state = dict(zip(state, to_host(list(state.values())), strict=True))
    peft_model.save_pretrained(
        folder, selected_adapters=[TRAINED], save_embedding_layers=False, state_dict=state
    )


def is_adapter(folder: Path) -> bool:
    """Return True for a folder with an adapter in PEFT's format instead of a model."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def check_not_adapter(folder: Path) -> None:
    """Raise if a folder given as `pretrained` contains an adapter instead of a model."""
    if is_adapter(folder):
        raise ValueError(
            f"pretrained: {str(folder)!r} is an adapter in PEFT's format, not a model. Set "
            "pretrained to the model that it was trained on (base_model_name_or_path in its "
            f"{CONFIG_FILE}) and --model.lora.adapter_path {folder}."
        )


# --- 4-bit weights under adapters (QLoRA), by bitsandbytes ---

Quantization = Literal["nf4", "fp4"]
# It logs at every import that a kernel of another processor is missing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quantization_arguments(
    quantization: Quantization, autocast_dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load 4-bit weights, by double quantization.

    `autocast_dtype` is that of matrix products.
    """
    try:
        import bitsandbytes  # noqa: F401 (transformers imports it later, with a worse error)
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(
            "model.precision.quantization needs the package bitsandbytes: pip install "
            f"bitsandbytes ({' '.join(str(error).split())[:100]})."
        ) from error
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=autocast_dtype,
    )
    return {"quantization_config": config, "device_map": "cpu"}


def keep_4bit_layout(model: PreTrainedModel) -> None:
    """Disable bitsandbytes' repacking of 4-bit weights on CPUs with AVX-512.

    In eval mode it repacks them in place. Products then differ from training, and dequantizing the
    weights for export returns wrong values.
    """
    for layer in _find_4bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def _find_4bit_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "Linear4bit"]


def is_quantized(model: Any) -> bool:
    """Check if some of the weights are 4-bit."""
    return bool(_find_4bit_layers(model))


def merge_into_dequantized(peft_model: Any) -> Any:
    """Merge the trained adapter into the dequantized weights that training computed with.

    The original weights would not fit the adapter, and quantizing the merged weights again would
    round the adapter away.
    """
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    weights = get_peft_model_state_dict(
        peft_model, adapter_name=TRAINED, save_embedding_layers=False
    )
    base_model = copy.deepcopy(peft_model).unload().dequantize()
    config = copy.deepcopy(peft_model.peft_config[TRAINED])
    dequantized_peft_model = get_peft_model(base_model, config)
    set_peft_model_state_dict(dequantized_peft_model, weights)
    return merge_adapter(dequantized_peft_model)
