"""How weights get from the trainer to servers: by a folder, or from device to device."""

from __future__ import annotations

import shutil
import socket
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from litgrpo.arguments import require
from litgrpo.distributed.messages import rank
from litgrpo.distributed.together import from_all, from_first
from litgrpo.models.adapters import merged
from litgrpo.models.loading import export, export_shards
from litgrpo.models.policy import Policy
from litgrpo.models.shard_files import full_weights
from litgrpo.rollout.engines.vllm_server import Away, Server

Dtype = Literal["float32", "bfloat16", "float16"]


class WeightSender(ABC):
    """Holds the weights that servers have to have, until there are newer ones.

    `place`: what the senders of other processes need to know of them.
    """

    place: Any = None

    @abstractmethod
    def prepare(self, policy: Policy, version: str) -> None:
        """Put the weights together; every process takes part, and the first keeps them."""

    @abstractmethod
    def send(self, server: Server) -> None:
        """Let a server that does not sample take them.

        Raises:
            Away: it cannot now.
        """


class WeightTransfer(ABC):
    """A way for weights, as a recipe names it."""

    @abstractmethod
    def sender(self) -> WeightSender:
        """What sends them, for one run."""


@dataclass(frozen=True)
class FolderTransfer(WeightTransfer):
    """WeightTransfer by a folder that trainer and servers see under the same path.

    Args:
        path: where versions are written, each in a folder of its own that lives until the next is
            taken; None: a temporary folder, for servers on the same machine.
        dtype: of the weights in the files; None: as they are trained. Servers convert to their own.
    """

    path: str | None = None
    dtype: Dtype | None = None

    def sender(self) -> WeightSender:
        """Writes and names folders."""
        return FolderSender(self)


class FolderSender(WeightSender):
    """Writes a folder in Hugging Face's format, which servers read in place of their model's.

    Args:
        settings: where, and as what.
    """

    def __init__(self, settings: FolderTransfer) -> None:
        self.settings, self.place = settings, ""
        self.written: list[Path] = []

    @cached_property
    def root(self) -> Path:
        """Where versions go; a temporary folder goes with this object."""
        if self.settings.path is None:
            temporary = Path(tempfile.mkdtemp(prefix="litgrpo-weights-"))
            temporary.chmod(0o755)
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            return temporary
        Path(self.settings.path).mkdir(parents=True, exist_ok=True)
        return Path(self.settings.path).resolve()

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`.

        Divided weights are written by all processes, each its part; no process has them whole.

        Raises:
            ValueError: a process that should write its part does not see the folder.
        """
        if shared_out(policy):
            folder = self._seen_by_all(version)
            export_shards(policy, folder, self.settings.dtype)
        elif rank() != 0:
            return
        else:
            folder = self.root / version
            export(policy, folder, self.settings.dtype)
        for before in self.written:
            shutil.rmtree(before, ignore_errors=True)
        self.written, self.place = [folder] * (rank() == 0), str(folder)

    def _seen_by_all(self, version: str) -> Path:
        """The folder of a version, which the first process makes."""
        mine = None if rank() else self.root / version
        if mine is not None:
            mine.mkdir(parents=True)
        folder: Any = from_first(mine)
        require(
            all(from_all(folder.is_dir())),
            f"engine.weight_transfer writes {folder}, which not all processes see: give "
            f"engine.weight_transfer.path"
            " a folder that all machines share.",
        )
        return Path(folder)

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        kwargs = {"weights_path": self.place}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def shared_out(policy: Policy) -> bool:
    """Whether processes have parts of the policy, or of the one that it is a copy of.

    Its units tell, and not its weights: these may be gathered at the moment.
    """
    return any(isinstance(part, FSDPModule) for part in policy.modules())


def gathered(policy: Policy) -> dict[str, Tensor] | None:
    """{name: whole tensor} where processes hold shards, on the host of the first; else None.

    The others have one whole tensor at a time. Adapters are merged.
    """
    if not shared_out(policy):
        return None
    first = rank() == 0
    return {n: each.detach().cpu() for n, each in full_weights(policy.model) if first}


@dataclass(frozen=True)
class NcclTransfer(WeightTransfer):
    """Send weights from GPU to GPU with vLLM's own transfer classes, over NCCL.

    Needs vLLM in the trainer's environment, and servers that were started with
    `--weight-transfer-config '{"backend": "nccl"}'`. Built against vLLM 0.32, whose
    classes do the transfer; NCCL was not run.

    Args:
        master_address: address of this machine, as servers see it; None: its host name.
    """

    master_address: str | None = None

    def sender(self) -> WeightSender:
        """Sends by NCCL."""
        return NcclSender(self)


class NcclSender(WeightSender):
    """One transfer group for each server, in which the trainer's first process is rank 0.

    Args:
        settings: who is reached how.
    """

    def __init__(self, settings: NcclTransfer) -> None:
        require(
            torch.cuda.is_available(),
            "engine.weight_transfer is NcclTransfer, which sends by NCCL from a GPU, but there "
            "is none. Take "
            "litgrpo.rollout.engines.publishing.FolderTransfer.",
        )
        self.settings, self.trainers = settings, dict[str, Any]()
        self.state: dict[str, Tensor] = {}

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`."""
        state = gathered(policy)
        if state is None and rank() == 0:
            model = merged(policy.model) if policy.has_adapter else policy.model
            state = {name: each.detach().cpu() for name, each in model.state_dict().items()}
        self.state = once(state or {}, policy)

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        if rank() != 0:
            raise Away(f"{server.url} (it waits for the weights of the first process)")
        # One that began anew is without its group.
        if server.url not in self.trainers or server.version == "default":
            self.trainers[server.url] = self._joined(server)
        self.trainers[server.url].source.state = self.state
        self.trainers[server.url].send_weights()

    def _joined(self, server: Server) -> Any:
        """The sender to a server, by vLLM, which holds no weights yet."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        workers = server.call("GET", "/get_world_size")["world_size"]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = self.settings.master_address or socket.gethostbyname(socket.gethostname())
        info = NCCLTrainerInitInfo(address, port, workers + 1, rank=0)
        client = HTTPVLLMWeightSyncClient(server.url, server.timeout_s)
        return NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=source_of(self.state)
        )


def source_of(state: dict[str, Tensor]) -> Any:
    """For vLLM a view of {name: tensor on the host}: described first, then sent one by one."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class OnHost(WeightSource):
        """`state` may be replaced between two transfers."""

        def __init__(self) -> None:
            self.state = state

        def metadata(self) -> list[Any]:
            """Names, types and shapes."""
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.state.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            """Each on the device that sends."""
            return ((name, tensor.cuda()) for name, tensor in self.state.items())

    return OnHost()


def once(state: dict[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """Without the head where it is the embedding, which a server ties itself."""
    tied = policy.bare_model.config.tie_word_embeddings
    return {name: each for name, each in state.items() if not (tied and name == "lm_head.weight")}
