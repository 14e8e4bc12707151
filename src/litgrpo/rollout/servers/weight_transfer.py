"""Export the policy's weights for servers: as a model, as an adapter, or as tensors for NCCL."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import require
from litgrpo.distributed.collectives import all_gather_object, broadcast_object
from litgrpo.distributed.messages import rank
from litgrpo.models.adapters import TRAINED, save_adapter
from litgrpo.models.loading.export import export
from litgrpo.models.loading.sharded_weights import gather_weights
from litgrpo.models.policy import Policy
from litgrpo.rollout.servers.client import Weights
from litgrpo.temporary import TemporaryFolder

Dtype = Literal["float32", "bfloat16", "float16"]
HEAD = "lm_head.weight"  # output head of transformers' causal models
# Adapters of earlier versions that stay on the disk; rows are at most as many iterations behind.
KEPT_ADAPTERS = 16


class WeightSender(ABC):
    """Exports the weights of a run."""

    @abstractmethod
    def prepare(self, policy: Policy, version: str) -> Weights:
        """Export the policy's weights; every rank must call this.

        Only rank 0 sends what it returns, and then gives it to the other ranks.
        """


class WeightTransfer(ABC):
    """Settings of a way to send weights; creates the sender of a run."""

    @abstractmethod
    def sender(self) -> WeightSender:
        """Create the sender of a run."""


@check_field_types
@dataclass(frozen=True)
class FolderTransfer(WeightTransfer):
    """Transfer weights through a folder that trainer and servers see under the same path.

    Args:
        path: folder for the versions; each has a subfolder that is kept until the next version is
            loaded. None: a temporary folder, for servers on the same machine.
        dtype: of the weights in the files; None: as they are trained. Servers convert to their own.

    Example:
        >>> FolderTransfer("/shared/weights", dtype="bfloat16").dtype
        'bfloat16'
    """

    path: str | None = None
    dtype: Dtype | None = None

    def sender(self) -> WeightSender:
        """Create a `FolderSender`."""
        return FolderSender(self)


class FolderSender(WeightSender):
    """Exports weights in Hugging Face format to a folder, which servers then load."""

    def __init__(self, settings: FolderTransfer) -> None:
        self.settings = settings
        self.written: list[Path] = []  # versions that rank 0 has to remove later

    @cached_property
    def root(self) -> Path:
        """Folder of all versions; a temporary folder is removed together with this object."""
        if self.settings.path is None:
            self.temporary = TemporaryFolder("weights")
            self.temporary.path.chmod(0o755)  # the server may run as another user
            return self.temporary.path
        Path(self.settings.path).mkdir(parents=True, exist_ok=True)
        return Path(self.settings.path).resolve()

    def prepare(self, policy: Policy, version: str) -> Weights:
        """See `WeightSender.prepare`; ranks write their shards, so that none needs all weights."""
        if is_sharded(policy):
            folder = self._make_shared_folder(version)
        elif rank() == 0:
            folder = self.root / version
        else:
            return Weights(version)
        export(policy, folder, self.settings.dtype)
        for previous in self.written:
            shutil.rmtree(previous, ignore_errors=True)
        self.written = [folder] if rank() == 0 else []
        return Weights(version, folder=str(folder), tied_head=find_tied_head(policy))

    def _make_shared_folder(self, version: str) -> Path:
        """Create the folder of a version on rank 0, and check that all ranks see it."""
        created = None
        if rank() == 0:
            created = self.root / version
            created.mkdir(parents=True)
        folder: Any = broadcast_object(created)
        require(
            all(all_gather_object(folder.is_dir())),
            f"model.engine.weight_transfer writes to {folder}, which some ranks do not see. Set "
            "model.engine.weight_transfer.path to a folder that all machines share.",
        )
        return Path(folder)


def find_tied_head(policy: Policy) -> str | None:
    """Return the name of the tensor that is also the output head; None if the head is not tied."""
    source: str | None = policy.bare_model.all_tied_weights_keys.get(HEAD)
    return source


@check_field_types
@dataclass(frozen=True)
class AdapterTransfer(WeightTransfer):
    """Send the LoRA adapter alone, through a folder that trainer and servers see.

    Servers keep the base model that they were started with, which must be the policy's; the
    start-up checks compare the two. They need VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora,
    --max-lora-rank of at least `model.lora.rank` and --max-cpu-loras 2. The adapter of each version
    has its own name, which every request gives, so no row is sampled with another version. A row
    that runs during an update (`InFlight`) keeps its adapter.

    Args:
        path: folder for the versions; None: a temporary folder, for servers on the same machine.

    Example:
        >>> AdapterTransfer("/shared/adapters").path
        '/shared/adapters'
    """

    path: str | None = None

    def sender(self) -> WeightSender:
        """Create an `AdapterSender`."""
        return AdapterSender(FolderTransfer(self.path))


class AdapterSender(FolderSender):
    """Writes the trained adapter in PEFT's format, which servers load beside the base model."""

    def prepare(self, policy: Policy, version: str) -> Weights:
        check_adapter(policy)
        folder = self.root / version if rank() == 0 else Path()
        save_adapter(policy.model, folder)
        if rank() != 0:
            return Weights(version, is_adapter=True)
        for file in folder.iterdir():
            file.chmod(0o644)  # the server may run as another user
        # A row that is still being sampled may need the adapter of an earlier version.
        self.written.append(folder)
        for previous in self.written[:-KEPT_ADAPTERS]:
            shutil.rmtree(previous, ignore_errors=True)
        self.written = self.written[-KEPT_ADAPTERS:]
        return Weights(version, folder=str(folder), is_adapter=True)


def check_adapter(policy: Policy) -> None:
    """Check that vLLM can load the policy's adapter."""
    name = "model.engine.weight_transfer is AdapterTransfer"
    remedy = "use litgrpo.rollout.servers.weight_transfer.FolderTransfer, which merges adapters."
    require(policy.has_adapter, f"{name}, but model.lora is not set. Set it, or {remedy}")
    settings = policy.model.peft_config[TRAINED]
    for option in ("use_dora", "modules_to_save"):
        require(
            not getattr(settings, option),
            f"{name}, but model.lora.{option} is {getattr(settings, option)}, which vLLM cannot "
            f"load as an adapter. Leave it out, or {remedy}",
        )


def is_sharded(policy: Policy) -> bool:
    """Return True if ranks hold shards of the policy.

    This reads the module types and not the weights, which may be gathered at the moment.
    """
    return any(isinstance(part, FSDPModule) for part in policy.modules())


@check_field_types
@dataclass(frozen=True)
class NcclTransfer(WeightTransfer):
    """Send weights from GPU to GPU with vLLM's own transfer classes, over NCCL.

    Needs vLLM in the trainer's environment, and servers that were started with
    `--weight-transfer-config '{"backend": "nccl"}'`. A server that restarts gets the weights with
    the next iteration. Built against vLLM 0.32, whose classes do the transfer; NCCL was not run.

    Args:
        master_address: address of this machine, as servers see it; None: its host name.

    Example:
        >>> NcclTransfer(master_address="10.0.0.1").master_address
        '10.0.0.1'
    """

    master_address: str | None = None

    def sender(self) -> WeightSender:
        """Create an `NcclSender`."""
        return NcclSender(self)


class NcclSender(WeightSender):
    """Hands out the policy's own tensors, of which only merged and gathered ones are copies."""

    def __init__(self, settings: NcclTransfer) -> None:
        require(
            torch.cuda.is_available(),
            "model.engine.weight_transfer is NcclTransfer, which needs a CUDA GPU; found none. Use "
            "litgrpo.rollout.servers.weight_transfer.FolderTransfer.",
        )
        self.settings = settings

    def prepare(self, policy: Policy, version: str) -> Weights:
        """See `WeightSender.prepare`; copies are on the host: the GPU may not have room."""
        parameters = {parameter.data_ptr() for parameter in policy.parameters()}
        tensors = {}
        # Every rank must iterate to the end: each sharded tensor is gathered by a collective.
        for name, weight in gather_weights(policy.model):
            if rank() == 0:
                is_copy = weight.data_ptr() not in parameters
                tensors[name] = weight.detach().cpu() if is_copy else weight.detach()
        return Weights(version, tensors=tensors, sender=self.settings.master_address or "")
