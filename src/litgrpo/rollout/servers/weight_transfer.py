"""Send the policy's weights to vLLM servers: through a folder, as an adapter, or over NCCL."""

from __future__ import annotations

import json
import shutil
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import require
from litgrpo.distributed.collectives import all_gather_object, broadcast_object
from litgrpo.distributed.messages import rank
from litgrpo.models.adapters import TRAINED, save_adapter
from litgrpo.models.loading.export import export
from litgrpo.models.loading.sharded_weights import INDEX, gather_weights
from litgrpo.models.policy import Policy
from litgrpo.rollout.servers.vllm_client import InternalError, Server, ServerUnavailable
from litgrpo.temporary import TemporaryFolder

Dtype = Literal["float32", "bfloat16", "float16"]
# vLLM on a CPU multiplies with a packed copy of the output head, made when it loads this tensor. A
# folder with tied embeddings does not have the tensor, so the copy would keep the first weights.
# On a GPU the head is the tensor of the embeddings. Source: vLLM 0.32,
# `model_executor/layers/utils.py`, `dispatch_cpu_unquantized_gemm`.
HEAD = "lm_head.weight"
HEAD_FILE = "lm_head.safetensors"
# Adapters of earlier versions that stay on the disk; rows are at most as many iterations behind.
KEPT_ADAPTERS = 16


class WeightsRejected(ServerUnavailable):
    """A server that works could not load the weights; another attempt may succeed."""


class WeightSender(ABC):
    """Holds the current weights, and sends them to servers that need them.

    `location` is what the senders of other ranks need to know about the weights; rank 0 broadcasts
    it.
    """

    location: Any = None
    # True if servers have the weights as an adapter with the name of the version, beside others.
    is_adapter = False

    @abstractmethod
    def prepare(self, policy: Policy, version: str) -> None:
        """Collect the weights for later sends; every rank must call this, and rank 0 keeps them."""

    def update(self, server: Server, version: str, *, in_flight: bool) -> bool:
        """Send the weights to a server if it has others, and return True if it had.

        Args:
            server: has any weights.
            version: of the weights.
            in_flight: rows that are being sampled continue with the new weights.

        Raises:
            ServerUnavailable: the server cannot receive them now.
            WeightsRejected: it received them and reports an internal error.
        """
        if server.version == version:
            return False
        with server.updating_weights(version, in_flight=in_flight):
            self.send_checked(server)
        return True

    def send_checked(self, server: Server) -> None:
        """Send the weights; an error while loading them is distinguished from a lost server."""
        try:
            self.send(server)
        except InternalError as error:
            raise WeightsRejected(str(error)) from error

    @abstractmethod
    def send(self, server: Server) -> None:
        """Send the weights to a paused server.

        Raises:
            ServerUnavailable: the server cannot receive them now.
        """

    def finish_publish(self) -> None:  # noqa: B027 (optional)
        """Let the policy change: later sends are to servers that restart during an update."""


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
    """Exports weights in Hugging Face format to a folder, which servers then load.

    Args:
        settings: folder and dtype.
    """

    def __init__(self, settings: FolderTransfer) -> None:
        self.settings, self.location = settings, ""
        self.head_source: str | None = None
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
        self.head_source = find_head_source(policy)
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
        if self.head_source is not None and server.copies_head:
            write_head(Path(self.location), self.head_source)
        kwargs = {"weights_path": self.location}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def find_head_source(policy: Policy) -> str | None:
    """Return the name of the tensor that is also the output head; None if the head is not tied."""
    found: str | None = policy.bare_model.all_tied_weights_keys.get(HEAD)
    return found


def write_head(folder: Path, source: str) -> None:
    """Write the tied output head of an exported model as a separate tensor.

    Args:
        folder: exported model.
        source: name of the tensor that is the head.
    """
    if (folder / HEAD_FILE).exists():
        return
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if source not in set(opened.keys()):
                continue
            head = opened.get_tensor(source)
        partial = folder / f"{uuid.uuid4().hex}.partial"  # servers are updated in parallel
        save_file({HEAD: head}, partial, {"format": "pt"})
        index = folder / INDEX
        if index.exists():  # vLLM reads the files that it names
            content = json.loads(index.read_text())
            content["weight_map"][HEAD] = HEAD_FILE
            partial_index = partial.with_suffix(".json")
            partial_index.write_text(json.dumps(content))
            partial_index.replace(index)
        partial.chmod(file.stat().st_mode)
        partial.replace(folder / HEAD_FILE)
        return


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
    """Writes the trained adapter in PEFT's format, which servers load beside the base model.

    Args:
        settings: folder.
    """

    is_adapter = True

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`.

        Raises:
            ValueError: vLLM has no adapters of this kind.
        """
        check_adapter(policy)
        folder = self.root / version if rank() == 0 else Path()
        save_adapter(policy.model, folder)
        if rank() != 0:
            return
        for file in folder.iterdir():
            file.chmod(0o644)  # the server may run as another user
        # A row that is still being sampled may need the adapter of an earlier version.
        self.written.append(folder)
        for previous in self.written[:-KEPT_ADAPTERS]:
            shutil.rmtree(previous, ignore_errors=True)
        self.written, self.location = self.written[-KEPT_ADAPTERS:], str(folder)

    def update(self, server: Server, version: str, *, in_flight: bool) -> bool:
        """See `WeightSender.update`; the server does not pause."""
        names = server.list_models()
        if version in names:
            return False
        self.send_checked(server)
        run = version.rpartition("-")[2]
        for name in (name for name in names if name.rpartition("-")[2] == run):
            server.post("/v1/unload_lora_adapter", {"lora_name": name})
        return True

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        body = {"lora_name": Path(self.location).name, "lora_path": self.location}
        server.post("/v1/load_lora_adapter", body)


def check_adapter(policy: Policy) -> None:
    """Check that vLLM can load the policy's adapter.

    Raises:
        ValueError: there is none, or it is of a kind that vLLM does not have.
    """
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
            "litgrpo.rollout.servers.weight_transfer.FolderTransfer.",
        )
        self.settings, self.trainers = settings, dict[str, Any]()
        self.host: dict[str, Tensor] = {}
        self.device: dict[str, Tensor] = {}  # the policy's tensors, until it may change

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`; also copies the weights to pinned memory, without waiting."""
        own = {parameter.data_ptr() for parameter in policy.parameters()}
        # Every rank must iterate to the end: each sharded tensor is gathered by a collective.
        for name, whole in gather_weights(policy.model):
            if rank() == 0:
                weight = whole.detach()
                if name not in self.host:
                    self.host[name] = torch.empty_like(weight, device="cpu", pin_memory=True)
                self.host[name].copy_(weight, non_blocking=True)
                if weight.data_ptr() in own:  # neither gathered nor merged with an adapter
                    self.device[name] = weight

    def finish_publish(self) -> None:
        """Send from the host from now on, with the copies complete."""
        self.device.clear()
        torch.cuda.synchronize()

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        if rank() != 0:
            raise ServerUnavailable(f"{server.url} (rank 0 has to send its weights)")
        # A restarted server has lost its group; it reports the version "default".
        if server.url not in self.trainers or server.version == "default":
            self.trainers[server.url] = self._join_group(server)
        self.trainers[server.url].send_weights()

    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the last `prepare`, each on the GPU that sends it."""
        for name, copied in self.host.items():
            yield name, self.device.get(name, copied).cuda()

    def _join_group(self, server: Server) -> Any:
        """Create the NCCL group with a server, and return vLLM's sender for it."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        workers = server.read_field(int, "GET", "/get_world_size", "world_size")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = self.settings.master_address or socket.gethostbyname(socket.gethostname())
        info = NCCLTrainerInitInfo(address, port, workers + 1, rank=0)
        client = HTTPVLLMWeightSyncClient(server.url, server.timeout_s)
        return NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=make_weight_source(self)
        )


def make_weight_source(sender: NcclSender) -> Any:
    """Wrap the weights of a sender as vLLM's source of weights, sent one tensor at a time."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Weights(WeightSource):
        """The weights of the last `NcclSender.prepare`."""

        def metadata(self) -> list[Any]:
            """Return names, types and shapes."""
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in sender.host.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            """Yield each tensor on the GPU that sends it."""
            return sender.iterate_weights()

    return Weights()
