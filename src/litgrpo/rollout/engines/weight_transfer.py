"""Send the policy's weights to vLLM servers: through a folder, or over NCCL."""

from __future__ import annotations

import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import require
from litgrpo.distributed.collectives import all_gather_object, broadcast_object
from litgrpo.distributed.messages import rank
from litgrpo.models.adapters import merge_adapter
from litgrpo.models.export import export
from litgrpo.models.policy import Policy
from litgrpo.models.sharded_weights import gather_weights
from litgrpo.rollout.engines.vllm_client import Server, ServerUnavailable
from litgrpo.temporary import TemporaryFolder

Dtype = Literal["float32", "bfloat16", "float16"]


class WeightSender(ABC):
    """Holds the current weights, and sends them to servers that need them.

    `location` is what the senders of other ranks need to know about the weights; rank 0 broadcasts
    it.
    """

    location: Any = None

    @abstractmethod
    def prepare(self, policy: Policy, version: str) -> None:
        """Collect the weights for later sends; every rank must call this, and rank 0 keeps them."""

    @abstractmethod
    def send(self, server: Server) -> None:
        """Send the weights to a paused server.

        Raises:
            ServerUnavailable: the server cannot receive them now.
        """


class WeightTransfer(ABC):
    """Settings of a way to send weights; creates the sender of a run."""

    @abstractmethod
    def sender(self) -> WeightSender:
        """Create the sender of a run."""


@dataclass(frozen=True)
@check_field_types
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
    """Exports weights in Hugging Face format to a folder, which servers then load.

    Args:
        settings: folder and dtype.
    """

    def __init__(self, settings: FolderTransfer) -> None:
        self.settings, self.location = settings, ""
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

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`.

        Every rank writes its own shard of sharded weights, so that no rank needs all of them.

        Raises:
            ValueError: a rank that has to write a shard does not see the folder.
        """
        if is_sharded(policy):
            folder = self._make_shared_folder(version)
            export(policy, folder, self.settings.dtype)
        elif rank() != 0:
            return
        else:
            folder = self.root / version
            export(policy, folder, self.settings.dtype)
        for previous in self.written:
            shutil.rmtree(previous, ignore_errors=True)
        self.written, self.location = [folder] if rank() == 0 else [], str(folder)

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

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        kwargs = {"weights_path": self.location}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def is_sharded(policy: Policy) -> bool:
    """Return True if ranks hold shards of the policy.

    This reads the module types and not the weights, which may be gathered at the moment.
    """
    return any(isinstance(part, FSDPModule) for part in policy.modules())


def gather_to_host(policy: Policy) -> dict[str, Tensor] | None:
    """Gather sharded weights in rank 0's host memory.

    Other ranks hold one whole tensor at a time. Adapters are merged.

    Returns:
        {name: whole tensor} on rank 0, {} on other ranks; None if the policy is not sharded.
    """
    if not is_sharded(policy):
        return None
    is_first = rank() == 0
    # Every rank must iterate to the end: each tensor is gathered by a collective.
    weights = gather_weights(policy.model)
    return {name: each.detach().cpu() for name, each in weights if is_first}


@dataclass(frozen=True)
@check_field_types
class NcclTransfer(WeightTransfer):
    """Send weights from GPU to GPU with vLLM's own transfer classes, over NCCL.

    Needs vLLM in the trainer's environment, and servers that were started with
    `--weight-transfer-config '{"backend": "nccl"}'`. Built against vLLM 0.32, whose
    classes do the transfer; NCCL was not run.

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
    """Sends weights in one NCCL group per server, in which the trainer's first rank is rank 0.

    Args:
        settings: address of the trainer.
    """

    def __init__(self, settings: NcclTransfer) -> None:
        require(
            torch.cuda.is_available(),
            "model.engine.weight_transfer is NcclTransfer, which needs a CUDA GPU; found none. Use "
            "litgrpo.rollout.engines.weight_transfer.FolderTransfer.",
        )
        self.settings, self.trainers = settings, dict[str, Any]()
        self.state: dict[str, Tensor] = {}

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`."""
        state = gather_to_host(policy)
        if state is None and rank() == 0:
            model = merge_adapter(policy.model) if policy.has_adapter else policy.model
            state = {name: each.detach().cpu() for name, each in model.state_dict().items()}
        self.state = drop_tied_head(state or {}, policy)

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        if rank() != 0:
            raise ServerUnavailable(f"{server.url} (rank 0 has to send its weights)")
        # A restarted server has lost its group; it reports the version "default".
        if server.url not in self.trainers or server.version == "default":
            self.trainers[server.url] = self._join_group(server)
        self.trainers[server.url].source.state = self.state
        self.trainers[server.url].send_weights()

    def _join_group(self, server: Server) -> Any:
        """Create the NCCL group with a server, and return vLLM's sender for it."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        workers = server.read("GET", "/get_world_size", "world_size", kind=int)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = self.settings.master_address or socket.gethostbyname(socket.gethostname())
        info = NCCLTrainerInitInfo(address, port, workers + 1, rank=0)
        client = HTTPVLLMWeightSyncClient(server.url, server.timeout_s)
        return NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=make_weight_source(self.state)
        )


def make_weight_source(state: dict[str, Tensor]) -> Any:
    """Wrap {name: tensor on the host} as vLLM's source of weights, sent one tensor at a time."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class HostWeights(WeightSource):
        """Weights in host memory; `state` may be replaced between two transfers."""

        def __init__(self) -> None:
            self.state = state

        def metadata(self) -> list[Any]:
            """Return names, types and shapes."""
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.state.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            """Yield each tensor on the GPU that sends it."""
            return ((name, tensor.cuda()) for name, tensor in self.state.items())

    return HostWeights()


def drop_tied_head(state: dict[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """Remove the output head if it is tied to the embedding; servers tie it themselves."""
    tied = policy.bare_model.config.tie_word_embeddings
    return {name: each for name, each in state.items() if not (tied and name == "lm_head.weight")}
