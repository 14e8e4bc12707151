"""Low-rank adapters: added to a model, started from a folder, merged, saved in PEFT's format."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from litgrpo.arguments import require
from litgrpo.distributed.device import to_host
from litgrpo.distributed.messages import rank, rank_zero_info
from litgrpo.tensors import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINED, START = "default", "start"  # names of adapters in a model
FILE = "adapter_config.json"


@dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters and leave the weights alone; the reference is then the model without.

    Args:
        rank: rank of each adapter.
        alpha: the adapter's output is scaled by alpha / rank.
        target_modules: names of the linear layers to adapt; `all-linear` takes every one.
        dropout: dropout before the adapter; 0 keeps the policy that learns the one that sampled.
        modules_to_save: names of modules that are trained whole and saved with the adapter, such
            as `lm_head` or `embed_tokens`.
        use_rslora: scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732).
        use_dora: train the length of each weight's columns apart (DoRA, arXiv:2402.09353).
        start: folder of an adapter in PEFT's format to go on from; its rank, alpha, modules and
            kind are taken, and the reference is the model with this adapter as it is there.

    Source: LoRA, arXiv:2106.09685.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    dropout: float = 0.0
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False
    start: str | None = None

    @property
    def peft_settings(self) -> dict[str, Any]:
        """The same under PEFT's names."""
        names = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["start"]
        return {names.get(name, name): value for name, value in own.items()}


def with_adapters(model: PreTrainedModel, lora: LoRA) -> PreTrainedModel:
    """The model with low-rank adapters around its linear layers; only they are trained.

    Args:
        model: its weights are frozen in place.
        lora: the adapters.

    Raises:
        ValueError: peft is not installed, or the adapter to start from does not fit.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("lora needs the package peft: pip install 'litgrpo[peft]'") from error
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    settings = lora.peft_settings if lora.start is None else _settings_of(lora, lora.start)
    try:
        adapted: Any = get_peft_model(model, LoraConfig(**settings, task_type=task))
    except (RuntimeError, TypeError, ValueError) as error:
        names = sorted({n.rpartition(".")[2] for n in linear_names(model)})
        raise ValueError(
            f"These adapters do not fit the model: {' '.join(str(error).split())[:300]} Its linear "
            f"layers are called {', '.join(names)} (lora.target_modules)."
        ) from error
    if lora.start is not None:
        read_adapter(adapted, lora.start, TRAINED)
    return adapted


def linear_names(model: PreTrainedModel) -> list[str]:
    """The linear layers of a model, by the whole name of each."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]


def _settings_of(lora: LoRA, folder: str) -> dict[str, Any]:
    """What a saved adapter is, under PEFT's names; refuses settings that say otherwise."""
    from peft import LoraConfig

    require(
        (Path(folder) / FILE).is_file(),
        f"lora.start: {folder!r} is no adapter folder (no {FILE} in it). Give a folder that peft's "
        "save_pretrained wrote, such as RUN/final_adapter.",
    )
    kind = json.loads((Path(folder) / FILE).read_text(encoding="utf-8")).get("peft_type")
    require(
        kind == "LORA",
        f"lora.start: {folder!r} holds an adapter of type {kind}; only LORA can be trained on.",
    )
    saved = LoraConfig.from_pretrained(folder)
    asked, default, found = lora.peft_settings, LoRA().peft_settings, saved.to_dict()
    del asked["lora_dropout"]  # of the run, as in a new adapter
    for name, value in asked.items():
        require(
            value == default[name] or value == found[name],
            f"lora.{name} is {value!r}, but the adapter in lora.start has {found[name]!r}. Leave "
            "it out, or start without lora.start.",
        )
    rank_zero_info(
        f"Adapter: goes on from {folder}, rank {found['r']}, alpha {found['lora_alpha']}"
    )
    unsaved = {"peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"}
    known = {each.name for each in fields(saved)} - unsaved
    return {name: found[name] for name in known if name in found} | {"lora_dropout": lora.dropout}


def read_adapter(adapted: Any, folder: str, name: str) -> None:
    """Read the weights of an adapter, all of which must be in the folder, and nothing else.

    Args:
        adapted: a model of PEFT.
        folder: of the adapter.
        name: of the adapter in the model; a new one is frozen.

    Raises:
        ValueError: weights are missing, unexpected or of another shape.
    """
    try:
        report = adapted.load_adapter(folder, name, is_trainable=name == TRAINED)
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(
            f"The adapter in {folder!r} does not fit this model: "
            f"{' '.join(str(error).split())[:300]}. Is `pretrained` the model that it was made for?"
        ) from error
    missing = [key for key in report.missing_keys if f".{name}" in key]
    for problem, names in {"lacks": missing, "has too": report.unexpected_keys}.items():
        require(
            not names,
            f"The adapter in {folder!r} does not fit this model: it {problem} "
            f"{', '.join(sorted(names)[:1])} ({len(names)} in all). Is `pretrained` the model that "
            "it was made for?",
        )


@contextmanager
def as_at_start(adapted: Any) -> Iterator[None]:
    """Compute with the adapter that training started from."""
    adapted.set_adapter(START, inference_mode=True)
    try:
        yield
    finally:
        adapted.set_adapter(TRAINED)


def merged(adapted: Any) -> Any:
    """A copy of the library's model with the trained adapter in its weights."""
    return copy.deepcopy(adapted).merge_and_unload(adapter_names=[TRAINED])


def save_adapter(adapted: Any, folder: str | Path) -> None:
    """Write the trained adapter as a folder that PEFT, vLLM and `lora.start` read.

    Args:
        adapted: a model of PEFT.
        folder: where to write `adapter_config.json` and `adapter_model.safetensors`.
    """
    trained = {name for name, each in adapted.named_parameters() if each.requires_grad}
    # Some quantized layers have texts among their tensors. Of divided ones these are put together.
    state = {
        name: whole(value) if name in trained else value
        for name, value in adapted.state_dict().items()
        if torch.is_tensor(value) and (name in trained or not isinstance(value, DTensor))
    }
    if rank():
        return
    on_host = dict(zip(state, to_host(list(state.values())), strict=True))
    adapted.save_pretrained(
        folder, selected_adapters=[TRAINED], save_embedding_layers=False, state_dict=on_host
    )


def refuse_adapter_folder(folder: Path) -> None:
    """Say how to start from an adapter where a model was asked for.

    Raises:
        ValueError: the folder holds an adapter and no model.
    """
    adapter_only = (folder / FILE).is_file() and not (folder / "config.json").is_file()
    require(
        not adapter_only,
        f"pretrained: {str(folder)!r} is an adapter in PEFT's format, not a model. Give the model "
        f"that it was made for as pretrained (its {FILE} says base_model_name_or_path), and "
        f"--model.lora.start {folder}.",
    )
