"""XLA under Lightning: the CPU as an XLA device, and one process that drives many chips.

Nothing here imports torch_xla before one of the classes is used.
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
from litgrpo.distributed.device import install, to_host
from litgrpo.distributed.sharding import MIN_SHARD_SIZE, DividesWeights, shard_dim
from litgrpo.xla.preflight import NO_TPU

AXIS = "fsdp"


class XLACPUAccelerator(XLAAccelerator):
    """The CPU through XLA: what a TPU compiles and runs, on a machine without one.

    With CPU_NUM_DEVICES=4 in the environment the process has four virtual chips, for
    `XLASPMDStrategy`; PJRT_DEVICE=CPU is set if nothing is.
    """

    def __init__(self) -> None:
        """Choose torch-xla's CPU client before torch-xla chooses.

        Raises:
            ValueError: the environment asks for another one.
        """
        chosen = os.environ.setdefault("PJRT_DEVICE", "CPU")
        if chosen.upper() != "CPU":
            raise ValueError(
                f"XLACPUAccelerator computes on the CPU, but PJRT_DEVICE is {chosen!r}. Unset it "
                "or set PJRT_DEVICE=CPU; for a TPU take configs/hardware/tpu.yaml."
            )
        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
        super().__init__()

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        """Virtual chips of this process."""
        return int(os.environ.get("CPU_NUM_DEVICES", "1"))

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        """Whether torch-xla has its CPU client; `__init__` sees to it."""
        return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> int:
        """One; several virtual chips belong to one process.

        Raises:
            ValueError: another number: XLA's CPU client has no collectives between processes.
        """
        if devices not in (1, "1", "auto", -1):
            raise ValueError(
                f"trainer.devices is {devices!r}; on the CPU it must be 1. For several virtual "
                "chips set CPU_NUM_DEVICES and take litgrpo.xla.strategy.XLASPMDStrategy."
            )
        return 1

    @staticmethod
    def get_parallel_devices(devices: int | list[int]) -> list[torch.device]:
        """The one XLA device that Lightning sees."""
        return [torch.device("xla", 0)]

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The client reports no memory."""
        return {}

    @staticmethod
    def name() -> str:
        """Another one than the TPU's."""
        return "xla_cpu"


class XLASPMDStrategy(SingleDeviceXLAStrategy, DividesWeights):
    """One process drives all chips: weights, moments, batches and caches are divided among them.

    Every large enough parameter is cut along one dimension into as many pieces as there are chips
    (as fully sharded data parallelism does), what the optimizer keeps of it likewise, and tensors
    of rows are cut by rows. To Lightning it is a single device: `trainer.devices` is 1, and so is
    the number of processes. The compiler adds the communication, so results are those of one chip
    up to the order of sums, and gradients are whole when they are clipped.

    Args:
        min_shard_size: parameters of fewer numbers are kept whole on every chip.
    """

    strategy_name = "xla_spmd"

    def __init__(self, min_shard_size: int = MIN_SHARD_SIZE, **kwargs: Any) -> None:
        """Tell torch-xla before it makes its first tensor.

        Raises:
            ModuleNotFoundError: torch-xla is not installed.
        """
        at_least("min_shard_size", min_shard_size, 1)
        try:
            import torch_xla.runtime as xr
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "XLASPMDStrategy needs torch-xla: pip install 'litgrpo[tpu]'."
            ) from error
        import numpy as np
        import torch_xla.distributed.spmd as xs

        from litgrpo.xla.backend import SpmdBackend

        xr.use_spmd()
        super().__init__(device=torch.device("xla", 0), **kwargs)
        self.num_chips = int(xr.global_runtime_device_count())
        self.min_shard_size = min_shard_size
        self.mesh = xs.Mesh(np.arange(self.num_chips), (self.num_chips,), (AXIS,))
        install(SpmdBackend(self.root_device, self.num_chips, self.divide_rows))

    def divide(self, tensor: Tensor, cut: int | None) -> None:
        """Mark a tensor on the device: cut along this dimension, or whole on every chip."""
        import torch_xla.distributed.spmd as xs

        axes = (AXIS if dim == cut else None for dim in range(tensor.ndim))
        xs.mark_sharding(tensor, self.mesh, tuple(axes))

    def divide_weight(self, tensor: Tensor) -> None:
        """Cut a parameter, or what belongs to one and has its shape, by `shard_dim`."""
        self.divide(tensor, shard_dim(tensor.shape, self.num_chips, self.min_shard_size))

    def divide_rows(self, tensor: Tensor) -> None:
        """Cut a tensor of rows by rows, if that can be done evenly."""
        self.divide(tensor, shard_dim(tensor.shape[:1], self.num_chips, min_size=0))

    def model_to_device(self) -> None:
        """Move the module and cut its parameters."""
        super().model_to_device()
        assert self.model is not None
        for parameter in self.model.parameters():
            self.divide_weight(parameter)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Cut gradients as their parameters, before a program ends: else each chip holds all."""
        super().post_backward(closure_loss)
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.divide_weight(parameter.grad)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Cut what the optimizers keep of each parameter as the parameter is."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for value in _tensors(state.values()):
                    if value.shape == parameter.shape:
                        self.divide_weight(value)

    def teardown(self) -> None:
        """Bring everything to the host by one wait; one by one, each tensor would be compiled."""
        assert self.model is not None
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        of_optimizers = [value for state in states for value in _tensors(state.values())]
        held = [*self.model.parameters(), *self.model.buffers(), *of_optimizers]
        far = {id(each): each.data for each in held if each.device == self.root_device}
        near = dict(zip(far, to_host(list(far.values())), strict=True))
        for state in states:
            state.update({name: near.get(id(value), value) for name, value in state.items()})
        self.model._apply(lambda tensor: near.get(id(tensor), tensor))
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Not by name: recipes give the class path."""


class XLADataParallelStrategy(XLAStrategy):
    """Lightning's `strategy: xla`, one process per chip, without its wrapper around data loaders.

    That wrapper would hide the loader's position in the data from checkpoints, and the number of
    the epoch from the loader. Batches are moved like on any other device.
    """

    def setup_distributed(self) -> None:
        """Note the rank where messages look for it: torch-xla's launcher does not."""
        super().setup_distributed()
        os.environ["RANK"] = str(self.global_rank)

    def process_dataloader(self, dataloader: object) -> Any:
        """The loader itself."""
        return dataloader

    def reduce(self, output: Any, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Also the largest of all processes."""
        if reduce_op != "max":
            return super().reduce(output, group, reduce_op)
        import torch_xla.core.xla_model as xm

        return xm.mesh_reduce("max", output, lambda each: torch.stack(each).amax(0))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
