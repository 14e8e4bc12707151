"""Model folders in Hugging Face format, read into shards and written from them.

No process ever holds the whole model: torch.distributed.checkpoint reads each process's part of
every tensor from the safetensors files, and puts the parts together on the disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from litgrpo.models.adapters import TRAINED
from litgrpo.models.weights import attention_of, model_class
from litgrpo.tensors import whole

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 5 * 2**30  # of a file that is written, at most
WRAPPED, BASE = "base_model.model.", ".base_layer."  # what PEFT adds to names
ADAPTER = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules be made without memory for their parameters; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def adapters_in_memory() -> Iterator[None]:
    """Let adapters be made in memory; PEFT would move them to the meta device of their layers."""
    move = nn.Module.to

    def stay(module: nn.Module, *where: Any, **how: Any) -> nn.Module:
        where = () if where[:1] == (torch.device("meta"),) else where
        return move(module, *where, **how) if where or how else module

    nn.Module.to = stay  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


def weight_files(folder: str) -> Path | None:
    """The local folder of a model whose weights are safetensors; None where they are not.

    Args:
        folder: or a hub id, whose files are fetched once.
    """
    here = Path(folder)
    if not here.is_dir():
        from huggingface_hub import snapshot_download

        here = Path(snapshot_download(folder, allow_patterns=["*.safetensors", "*.json"]))
    return here if (here / SINGLE).is_file() or (here / INDEX).is_file() else None


def names_in(folder: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors files."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    with safe_open(folder / SINGLE, framework="pt") as file:
        return set(file.keys())


def file_names(model: nn.Module) -> dict[str, str]:
    """{name of a parameter: its name in files}, each tensor once, adapters left out."""
    found = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix(WRAPPED).replace(BASE, ".")
        if parameter.is_meta:
            found[name] = plain
    return found


def fill_from(folder: Path, model: nn.Module, room: Callable[[Tensor], Tensor]) -> None:
    """Give divided parameters without memory theirs, and read them.

    Args:
        folder: with safetensors files.
        model: divided, its parameters on the meta device; others (adapters) are left as they are.
        room: for a process's shard of a parameter.

    Raises:
        ValueError: a file is damaged.
    """
    names = file_names(model)
    state = {names[n]: room(p) for n, p in model.named_parameters() if n in names}
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        said = str(next(iter(error.failures.values()))[0]).partition("\n")[0]
        raise ValueError(f"The weights of {str(folder)!r} cannot be read: {said}") from error
    filled: dict[int, nn.Parameter] = {}  # tied parameters stay one
    for name, parameter in model.named_parameters():
        if name in names:
            filled[id(parameter)] = nn.Parameter(state[names[name]], parameter.requires_grad)
    for part in model.modules():
        own = part._parameters
        own.update({name: filled.get(id(each), each) for name, each in own.items()})


def empty_model(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """A model without memory for its weights, all of which are in a folder's files; else None.

    Args:
        folder: with safetensors files.
        config: of the model.
        dtype: of the weights.
    """
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights

    kind = model_class(config)
    with parameters_on_meta(), no_init_weights():
        how = {"dtype": dtype, "attn_implementation": attention_of(config)}
        model = kind._from_config(config, **how).eval()
        model.tie_weights()
    if not set(file_names(model).values()) <= names_in(folder):
        return None  # the library renames weights of some types when it reads them
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


# --- writing ---


def exported(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """{name in files: divided tensor} with adapters merged, each tied tensor once.

    Args:
        model: of a policy, of the library or of PEFT.
        dtype: of floating point weights; None leaves them.
    """
    children = {name: dict(part.named_children()) for name, part in model.named_modules()}
    layers: dict[str, Any] = {
        n: model.get_submodule(n) for n, parts in children.items() if "base_layer" in parts
    }
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix(WRAPPED).replace(BASE, ".")
        owner, _, last = name.rpartition(".base_layer.")
        if any(f".{word}." in f".{name}" for word in ADAPTER):
            continue
        weight = parameter.detach()
        if owner in layers and last == "weight":
            weight = weight + layers[owner].get_delta_weight(TRAINED).detach().to(weight.dtype)
        found[plain] = weight if dtype is None else weight.to(dtype)
    return found


def write_model(state: dict[str, Tensor], folder: Path) -> None:
    """Write divided tensors as safetensors files; every process must take part.

    Args:
        state: {name: tensor}.
        folder: is made; what else it holds stays.

    Raises:
        OSError: the disk refuses.
    """
    places, sizes = {}, [0]
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        sizes = [*sizes, 0] if sizes[-1] and sizes[-1] + size > FILE_BYTES else sizes
        sizes[-1] += size
        places[name] = len(sizes)
    settings: Any = {"save_distributed": True, "enable_consolidation": True}
    writer = HuggingFaceStorageWriter(str(folder), places, **settings)
    try:
        dcp.save(dict(state), storage_writer=writer)
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0]).partition("\n")[0]) from error
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "sharded", ignore_errors=True)
        for file in folder.glob("model-00001-of-00001.safetensors"):
            file.rename(folder / SINGLE)
            (folder / INDEX).unlink(missing_ok=True)
    dist.barrier()


def full_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Whole weights one after another under their names in files, adapters merged.

    For whoever hands them to a server; every process must take part and gets each tensor.
    """
    for name, tensor in exported(model, None).items():
        yield name, whole(tensor)
