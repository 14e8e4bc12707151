"""XLA under Lightning: the CPU as an XLA device, SPMD sharding, and data parallelism.

torch_xla is imported only when one of the classes is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.accelerators.xla import XLAAccelerator
from lightning.pytorch.strategies import SingleDeviceXLAStrategy, XLAStrategy
from torch import Tensor

from litgrpo.arguments import at_least
from litgrpo.distributed.device import set_backend, to_host
from litgrpo.distributed.sharding import MIN_SHARD_SIZE, DividesWeights, shard_dim
from litgrpo.xla.preflight import NO_TPU

AXIS = "fsdp"


class XLACPUAccelerator(XLAAccelerator):
    """The CPU through XLA: compiles and runs the same programs as a TPU.

    With CPU_NUM_DEVICES=4 in the environment the process has four virtual chips, for
    `XLASPMDStrategy`. PJRT_DEVICE defaults to CPU.
    """

    def __init__(self) -> None:
        """Select torch-xla's CPU client before it is initialized.

        Raises:
            ValueError: PJRT_DEVICE selects another one.
        """
        chosen = os.environ.setdefault("PJRT_DEVICE", "CPU")
        if chosen.upper() != "CPU":
            raise ValueError(
                f"XLACPUAccelerator computes on the CPU, but PJRT_DEVICE is {chosen!r}. Unset it "
                "or set PJRT_DEVICE=CPU; for a TPU use configs/hardware/tpu.yaml."
            )
        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
        super().__init__()

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        """Return the number of virtual chips of this process."""
        return int(os.environ.get("CPU_NUM_DEVICES", "1"))

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        """Check that torch-xla uses its CPU client, which `__init__` selects."""
        return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """Return 1; several virtual chips belong to one process.

        Raises:
            ValueError: another number; XLA's CPU client has no collectives between processes.
        """
        if devices not in (1, "1", "auto", -1):
            raise ValueError(
                f"trainer.devices is {devices!r}; on the CPU it must be 1. For several virtual "
                "chips set CPU_NUM_DEVICES and use litgrpo.xla.strategy.XLASPMDStrategy."
            )
        return 1

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """Return the one XLA device that Lightning sees."""
        return [torch.device("xla", 0)]

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return nothing; the CPU client reports no memory."""
        return {}

    @staticmethod
    def name() -> str:
        """Return a name that differs from the TPU's."""
        return "xla_cpu"


class XLASPMDStrategy(SingleDeviceXLAStrategy, DividesWeights):
    """SPMD: one process drives all chips and shards weights, optimizer state, batches and caches.

    Every large parameter and its optimizer state are sharded along one dimension (as in fully
    sharded data parallelism), tensors of rows by rows. Lightning sees a single device:
    `trainer.devices` and the number of processes are 1. The compiler adds the communication, so
    results equal those of one chip up to the order of sums.

    Args:
        min_shard_size: parameters of fewer elements are replicated on every chip.
    """

    strategy_name = "xla_spmd"

    def __init__(self, min_shard_size: int = MIN_SHARD_SIZE, **kwargs: Any) -> None:
        """Enable SPMD, which must happen before torch-xla's first tensor.

        Raises:
            ModuleNotFoundError: torch-xla is not installed.
        """
        at_least("min_shard_size", min_shard_size, 1)
        try:
            import torch_xla.runtime as xr
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "XLASPMDStrategy needs torch-xla: pip install torch==2.9.0 torch-xla==2.9.0."
            ) from error
        import numpy as np
        import torch_xla.distributed.spmd as xs

        from litgrpo.xla.backend import SpmdBackend

        xr.use_spmd()
        super().__init__(device=torch.device("xla", 0), **kwargs)
        self.num_chips = int(xr.global_runtime_device_count())
        self.min_shard_size = min_shard_size
        self.mesh = xs.Mesh(np.arange(self.num_chips), (self.num_chips,), (AXIS,))
        set_backend(SpmdBackend(self.root_device, self.num_chips, self.divide_rows))

    def divide(self, tensor: Tensor, cut: int | None) -> None:
        """Mark a tensor as sharded along dimension `cut`, or as replicated if it is None."""
        import torch_xla.distributed.spmd as xs

        axes = (AXIS if dim == cut else None for dim in range(tensor.ndim))
        xs.mark_sharding(tensor, self.mesh, tuple(axes))

    def divide_weight(self, tensor: Tensor) -> None:
        """Shard a parameter, or its gradient or optimizer state, along `shard_dim`."""
        self.divide(tensor, shard_dim(tensor.shape, self.num_chips, self.min_shard_size))

    def divide_rows(self, tensor: Tensor) -> None:
        """Shard a tensor of rows by rows, if its number is a multiple of the number of chips."""
        self.divide(tensor, shard_dim(tensor.shape[:1], self.num_chips, min_size=0))

    def model_to_device(self) -> None:
        """Move the module, shard its parameters and replicate its buffers."""
        super().model_to_device()
        assert self.model is not None
        for parameter in self.model.parameters():
            self.divide_weight(parameter)
        for buffer in self.model.buffers():
            self.divide(buffer, None)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Shard gradients like parameters before the program ends, or each chip holds them all."""
        super().post_backward(closure_loss)
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.divide_weight(parameter.grad)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Shard the optimizer state like the parameters."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for value in _tensors(state.values()):
                    if value.shape == parameter.shape:
                        self.divide_weight(value)

    def teardown(self) -> None:
        """Copy all tensors to the host in one step; separate copies would each be compiled."""
        assert self.model is not None
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        of_optimizers = [value for state in states for value in _tensors(state.values())]
        held = [*self.model.parameters(), *self.model.buffers(), *of_optimizers]
        far = {id(each): each.data for each in held if each.device == self.root_device}
        near = dict(zip(far, to_host(list(far.values())), strict=True))
        for state in states:
            state.update({name: near.get(id(value), value) for name, value in state.items()})
        # `Module.to` would copy tensor by tensor; `_apply` replaces them by the copies above.
        self.model._apply(lambda tensor: near.get(id(tensor), tensor))
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing; configs give the class path."""


class XLADataParallelStrategy(XLAStrategy):
    """Lightning's `strategy: xla` (one process per chip) without its wrapper around data loaders.

    The wrapper hides the loader's state from checkpoints and the epoch number from the loader.
    Batches are moved to the device as on any other.
    """

    def setup_distributed(self) -> None:
        """Set RANK, which litgrpo's messages read and torch-xla's launcher does not set."""
        super().setup_distributed()
        os.environ["RANK"] = str(self.global_rank)

    def process_dataloader(self, dataloader: object) -> Any:
        """Return the loader unchanged."""
        return dataloader

    def reduce(self, output: Any, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduce as the base class, or by the maximum over processes."""
        if reduce_op != "max":
            return super().reduce(output, group, reduce_op)
        import torch_xla.core.xla_model as xm

        return xm.mesh_reduce("max", output, lambda each: torch.stack(each).amax(0))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
