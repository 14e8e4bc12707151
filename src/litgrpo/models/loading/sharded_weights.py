"""Sharded policies: load, train and export without the whole model in one process's memory.

FSDP2 shards the layers of a policy. torch.distributed.checkpoint reads each rank's part of every
tensor from the safetensors files of a Hugging Face folder, and writes the parts of an export.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PretrainedConfig, PreTrainedModel

from litgrpo.distributed.fsdp.units import is_sharded
from litgrpo.models.adapters import TRAINED, LoRA, Quantization
from litgrpo.models.architectures import ARCHITECTURES
from litgrpo.models.kernels.linear import LinearKernels
from litgrpo.models.policy import Policy
from litgrpo.models.transformers_compat import find_unsplit_modules
from litgrpo.models.weights import choose_attention, choose_auto_class
from litgrpo.tensors import full_tensor, local

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5 * 2**30
WRAPPED, BASE = "base_model.model.", ".base_layer."  # inserted into names by PEFT
ADAPTER = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# Methods that compute with a policy's weights; each gathers those outside of the layers.
ENTRIES = (
    *("logprobs", "hidden_states", "target_hidden_states", "dense_logits"),
    *("prefill", "decode_step"),
)


# --- sharding a policy ---


def find_fsdp_units(policy: Policy) -> list[nn.Module]:
    """Return the layers of a policy: each is gathered as a unit.

    Embedding and head belong to the policy itself. The head is called once per chunk, whose number
    differs between ranks; gathering it per call would deadlock.
    """
    class_names = find_unsplit_modules(policy.bare_model)
    return [module for module in policy.modules() if type(module).__name__ in class_names]


class ShardingStrategy(Protocol):
    """Trainer strategy that can shard modules, such as `FSDP2Strategy`."""

    def divide(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        entries: Iterable[str],
        compute: torch.dtype | None,
    ) -> None:
        """Shard a module; see `litgrpo.distributed.fsdp.units.divide`."""

    def shards_for(self, tensor: Tensor) -> Tensor:
        """Allocate this rank's shard of a tensor."""


class PolicySharding:
    """Shards policies over the ranks of a trainer's strategy."""

    def __init__(self, strategy: ShardingStrategy) -> None:
        self.strategy = strategy

    def check(self, quantization: Quantization | None, lora: LoRA | None) -> None:
        """Reject 4-bit weights, DoRA, and modules that are trained beside adapters."""
        unsupported = []
        if quantization is not None:
            unsupported.append("model.precision.quantization")
        if lora is not None and lora.use_dora:
            unsupported.append("model.lora.use_dora")
        if lora is not None and lora.modules_to_save is not None:
            unsupported.append("model.lora.modules_to_save")
        if unsupported:
            raise ValueError(
                f"{', '.join(unsupported)} cannot be used with sharded weights (trainer.strategy). "
                "Leave it out, or set trainer.strategy to ddp."
            )

    def shard(self, policy: Policy) -> None:
        """Shard a policy's layers and the rest of it; does nothing if it is sharded already."""
        if is_sharded(policy):
            return
        # oneDNN's packed weights are copies, which would be stale after every gather.
        policy.set_linear_kernels(LinearKernels())
        units = find_fsdp_units(policy)
        self.strategy.divide(policy, units, ENTRIES, policy.autocast_dtype)

    def build_empty_model(
        self, folder: str, config: PretrainedConfig, dtype: torch.dtype
    ) -> PreTrainedModel | None:
        """Build a model without memory for its weights, which `load_shards` reads.

        None if whole weights must be loaded and sharded then: the files are not safetensors,
        transformers renames weights at load, or the type is probed before use.
        """
        files = find_weight_files(folder) if config.model_type in ARCHITECTURES else None
        return None if files is None else build_empty_model(files, config, dtype)

    def load_shards(self, policy: Policy, folder: str) -> None:
        """Read this rank's shards of an empty model that was sharded."""
        files = find_weight_files(folder)
        assert files is not None
        load_shards(files, policy.model, self.strategy.shards_for)
        # FSDP2 caches its parameters; `Module.to` makes it read the new ones.
        policy.to(next(policy.parameters()).device)


# --- reading ---


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules without memory for their parameters; buffers are computed as usual.

    `torch.device("meta")` would drop the buffers as well (rotary frequencies), which no file has.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def adapters_in_memory() -> Iterator[None]:
    """Build adapters in memory; PEFT would move them to the meta device of their layers."""
    move = nn.Module.to

    def to_unless_meta(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if args[:1] == (torch.device("meta"),):
            args = ()
        return move(module, *args, **kwargs) if args or kwargs else module

    nn.Module.to = to_unless_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


def find_weight_files(folder: str) -> Path | None:
    """Return the folder of a model's safetensors files, None if it has none.

    Those of a hub id are downloaded once.
    """
    path = Path(folder)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(folder, allow_patterns=["*.safetensors", "*.json"]))
    return path if (path / SINGLE).is_file() or (path / INDEX).is_file() else None


def read_tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    with safe_open(folder / SINGLE, framework="pt") as file:
        return set(file.keys())


def map_file_names(model: nn.Module) -> dict[str, str]:
    """Return {parameter name: name in files} of parameters without memory, each tensor once."""
    return {
        name: _strip_peft(name) for name, parameter in model.named_parameters() if parameter.is_meta
    }


def _strip_peft(name: str) -> str:
    return name.removeprefix(WRAPPED).replace(BASE, ".")


def load_shards(folder: Path, model: nn.Module, allocate: Callable[[Tensor], Tensor]) -> None:
    """Allocate and read the shards of parameters without memory, from safetensors files.

    Parameters of the sharded model that are not on the meta device (adapters) stay as they are.
    """
    names = map_file_names(model)
    state = {
        names[name]: allocate(parameter)
        for name, parameter in model.named_parameters()
        if name in names
    }
    try:
        with silence_loader():
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0]).partition("\n")[0]
        raise ValueError(f"Could not read the weights of {str(folder)!r}: {reason}") from error
    loaded: dict[int, nn.Parameter] = {}  # by id, so that tied parameters stay one
    for name, parameter in model.named_parameters():
        if name in names:
            loaded[id(parameter)] = nn.Parameter(state[names[name]], parameter.requires_grad)
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in parameters.items():
            if id(parameter) in loaded:
                setattr(module, name, loaded[id(parameter)])


@contextmanager
def silence_loader() -> Iterator[None]:
    """Hide the traceback that torch logs, with raw bytes of the file, before its loader raises."""

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.module != "state_dict_loader"

    logger = logging.getLogger()  # the root itself: torch uses no logger of its own there
    logger.addFilter(is_of_others)
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def build_empty_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel | None:
    """Build a model without memory for its weights; None if a folder's files have other names."""
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights

    with parameters_on_meta(), no_init_weights():
        model: PreTrainedModel = choose_auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=choose_attention(config),
            trust_remote_code=False,
        )
        model.eval()
        model.tie_weights()
    if not set(map_file_names(model).values()) <= read_tensor_names(folder):
        return None  # transformers renames the weights of some types when it reads them
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


# --- writing ---


def collect_weights(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the weights of `iterate_weights` in this dtype; None leaves them unchanged."""
    weights = iterate_weights(model)
    return {name: weight if dtype is None else weight.to(dtype) for name, weight in weights}


def iterate_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under their names in files, sharded ones as they are, each tied tensor once.

    Adapters of a PEFT model are merged into one tensor at a time.
    """
    layers = {
        name: module for name, module in model.named_modules() if hasattr(module, "base_layer")
    }
    for name, parameter in model.named_parameters():
        layer_name, _, attribute = name.rpartition(".base_layer.")
        if any(f".{word}." in f".{name}" for word in ADAPTER):
            continue
        weight = parameter.detach()
        if layer_name in layers and attribute == "weight":
            delta = layers[layer_name].get_delta_weight(TRAINED).detach()
            weight = weight + delta.to(weight.dtype)
        yield _strip_peft(name), weight


def assign_files(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Return {name: number of its file, from 1}, for safetensors of at most `MAX_FILE_BYTES`.

    A file is built in memory, and must not hold the same memory twice, as tied weights do.
    """
    file_numbers: dict[str, int] = {}
    number, size, pointers = 1, 0, set[int]()
    for name, tensor in state.items():
        num_bytes, pointer = tensor.numel() * tensor.element_size(), local(tensor).data_ptr()
        if pointer in pointers or (size and size + num_bytes > MAX_FILE_BYTES):
            number, size, pointers = number + 1, 0, set()
        file_numbers[name] = number
        size += num_bytes
        pointers.add(pointer)
    return file_numbers


def write_weights(state: dict[str, Tensor], folder: Path) -> None:
    """Write sharded tensors as safetensors files; every rank must call this.

    The folder is created if missing, and keeps its other files. An OSError if writing fails.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), assign_files(state), save_distributed=True, enable_consolidation=True
    )
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


def gather_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights under their names in files, adapters merged, for a vLLM server.

    Every rank must iterate and receives every tensor.
    """
    for name, tensor in iterate_weights(model):
        yield name, full_tensor(tensor)
