"""XLA under Lightning: the CPU as an XLA device, and one process that drives many chips.

Nothing here imports torch_xla before one of the classes is used.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators.xla import XLAAccelerator
from lightning.pytorch.strategies import SingleDeviceXLAStrategy, XLAStrategy
from torch import Tensor

from litgrpo.parallel import device
from litgrpo.parallel.xla.sharding import MIN_SHARD_SIZE, shard_dim

AXIS = "fsdp"
# Torch-xla looks for a TPU by asking the cloud's metadata server, without a time limit.
NO_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}


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
                "chips set CPU_NUM_DEVICES and take litgrpo.parallel.xla.strategy.XLASPMDStrategy."
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


class XLASPMDStrategy(SingleDeviceXLAStrategy):
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
        try:
            import torch_xla.runtime as xr
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "XLASPMDStrategy needs torch-xla: pip install 'litgrpo[tpu]'."
            ) from error
        import numpy as np
        import torch_xla.distributed.spmd as xs

        if min_shard_size < 1:
            raise ValueError(f"min_shard_size is {min_shard_size}; it must be at least 1.")
        xr.use_spmd()
        super().__init__(device=torch.device("xla", 0), **kwargs)
        self.num_chips = int(xr.global_runtime_device_count())
        self.min_shard_size = min_shard_size
        self.mesh = xs.Mesh(np.arange(self.num_chips), (self.num_chips,), (AXIS,))
        device.use_chips(self.num_chips, self.spread_rows)

    def spec(self, tensor: Tensor) -> tuple[str | None, ...]:
        """How a parameter is cut: by `shard_dim`, or not at all."""
        cut = shard_dim(tensor.shape, self.num_chips, self.min_shard_size)
        return tuple(AXIS if dim == cut else None for dim in range(tensor.ndim))

    def _mark(self, tensor: Tensor, spec: tuple[str | None, ...]) -> None:
        import torch_xla.distributed.spmd as xs

        xs.mark_sharding(tensor, self.mesh, spec)

    def spread_rows(self, tensor: Tensor) -> None:
        """Cut a tensor of rows by rows, if that can be done evenly."""
        rows = tensor.ndim > 0 and tensor.shape[0] % self.num_chips == 0
        first = AXIS if rows else None
        self._mark(tensor, (first, *(None,) * (tensor.ndim - 1)) if tensor.ndim else ())

    def model_to_device(self) -> None:
        """Move the module and cut its parameters."""
        super().model_to_device()
        assert self.model is not None
        for parameter in self.model.parameters():
            self._mark(parameter, self.spec(parameter))

    def post_backward(self, closure_loss: Tensor) -> None:
        """Cut gradients as their parameters, before a program ends: else each chip holds all."""
        super().post_backward(closure_loss)
        assert self.model is not None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._mark(parameter.grad, self.spec(parameter))

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Cut what the optimizers keep of each parameter as the parameter is."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            for parameter, kept in optimizer.state.items():
                for value in kept.values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        self._mark(value, self.spec(parameter))

    def teardown(self) -> None:
        """Bring everything to the host by one wait; one by one, each tensor would be compiled."""
        assert self.model is not None
        parts = [value for kept in self._kept() for value in kept.values()]
        held = [*self.model.parameters(), *self.model.buffers()]
        held += [each for each in parts if isinstance(each, Tensor)]
        far = [each.data for each in held if each.device.type == "xla"]
        names = [id(each) for each in held if each.device.type == "xla"]
        here = dict(zip(names, device.to_host(far), strict=True))
        for kept in self._kept():
            for name, value in kept.items():
                kept[name] = here.get(id(value), value)
        self.model._apply(lambda tensor: here.get(id(tensor), tensor))
        super().teardown()

    def _kept(self) -> list[dict[str, Any]]:
        """What the optimizers keep of each parameter."""
        return [kept for optimizer in self.optimizers for kept in optimizer.state.values()]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Not by name: recipes give the class path."""


class XLAReplicas(XLAStrategy):
    """Lightning's `strategy: xla`, one process per chip, without its wrapper around data loaders.

    That wrapper would hide the loader's position in the data from checkpoints, and the number of
    the epoch from the loader. Batches are moved like on any other device.
    """

    def process_dataloader(self, dataloader: object) -> Any:
        """The loader itself."""
        return dataloader

    def reduce(self, output: Any, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Also the largest of all processes."""
        if reduce_op != "max":
            return super().reduce(output, group, reduce_op)
        import torch_xla.core.xla_model as xm

        return xm.mesh_reduce("max", output, lambda each: torch.stack(each).amax(0))
