"""FSDP2 under Lightning: who starts the processes is Lightning's, what they divide is ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_shards

from litgrpo.arguments import at_least, require
from litgrpo.distributed.fsdp.units import divide, gathered
from litgrpo.distributed.restarts import meet_anew
from litgrpo.training.lightning_compat import find_trainer


class FSDP2Strategy(ModelParallelStrategy):
    """Weights, gradients and moments are divided over processes (FSDP2, ZeRO-3).

    The numbers are those of one process up to the order of sums. Rollouts and evaluations gather
    the whole weights for as long as they last. `precision.autocast_dtype: bfloat16` gathers
    and computes in bfloat16, and reduces gradients in float32.

    Args:
        replicas: copies of the weights (HSDP): each is divided over processes / replicas, and
            gradients are averaged over copies. Give the number of nodes where these are slow to
            reach.
        reshard_after_forward: gather a layer again for its backward pass; false is faster and keeps
            all gathered layers of a micro-batch.
        timeout_minutes: how long a process waits for the others before it gives up.

    Source: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277.
    """

    def __init__(
        self, replicas: int = 1, reshard_after_forward: bool = True, timeout_minutes: int = 30
    ) -> None:
        at_least("replicas", replicas, 1)
        at_least("timeout_minutes", timeout_minutes, 1)
        waits = timedelta(minutes=timeout_minutes)
        super().__init__(tensor_parallel_size=1, timeout=waits)
        self.replicas, self.reshard_after_forward = replicas, reshard_after_forward
        self.shards: DeviceMesh | None = None
        self._evaluating = ExitStack()

    # Checkpoints are read before optimizers exist, as with every other strategy of ours.
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def setup_environment(self) -> None:
        """Start the process group and lay the processes out.

        Raises:
            ValueError: the processes cannot be divided into so many replicas.
        """
        self._data_parallel_size = self.num_nodes * self.num_processes
        meet_anew()
        super().setup_environment()
        each, rest = divmod(self.world_size, self.replicas)
        require(
            not rest and each > 1,
            f"replicas is {self.replicas}, and there are {self.world_size} processes: each replica "
            "needs the same number of them, 2 or more. For whole weights on every process take "
            "trainer.strategy ddp.",
        )
        shape, names = (self.replicas, each), ("replicas", "shards")
        both = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self.shards = both if self.replicas > 1 else both["shards"]

    def divide(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        entries: Iterable[str],
        compute: torch.dtype | None,
    ) -> None:
        """Divide a module over the processes; see `litgrpo.distributed.fsdp.units.divide`."""
        assert self.shards is not None
        reshard = self.reshard_after_forward
        divide(module, units, entries, self.shards, compute=compute, reshard_after_forward=reshard)

    def shards_for(self, tensor: Tensor) -> DTensor:
        """Room for this process's shard of a tensor: shape and dtype count, values do not."""
        assert self.shards is not None
        settings: Any = {"dtype": tensor.dtype, "device_mesh": self.shards}
        found: DTensor = empty_shards(*tensor.shape, placements=self._cut, **settings)
        return found

    @property
    def _cut(self) -> list[Any]:
        return [Replicate()] * (self.replicas > 1) + [Shard(0)]

    def _divided_like(self, parameter: Tensor | None, value: Any) -> Any:
        """A whole tensor of a parameter's shape, such as a file of one process holds, divided."""
        if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
            return value
        if isinstance(value, DTensor) or value.shape != parameter.shape:
            return value
        there = value.to(self.root_device)
        return distribute_tensor(there, self.shards, self._cut, src_data_rank=None)

    # --- what Lightning asks for ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Shards of all parameters by name."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state as torch writes it; moments are shards, as their parameters."""
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Hand the checkpoint to what writes it, on every process."""
        path = Path(self.broadcast(filepath))
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What is read, on every process."""
        path = Path(self.broadcast(checkpoint_path))
        return self.checkpoint_io.load_checkpoint(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the weights over, whether they come as shards or whole."""
        module = self.lightning_module
        assert module is not None
        ours, found = dict(module.named_parameters()), checkpoint["state_dict"]
        divided = {n: self._divided_like(ours.get(n), value) for n, value in found.items()}
        module.load_state_dict(divided, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the moments over, whether they come as shards or whole."""
        for optimizer, found in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                n: {name: self._divided_like(trained[n], value) for name, value in values.items()}
                for n, values in found["state"].items()
            }
            optimizer.load_state_dict({**found, "state": state})

    def _gather(self) -> None:
        """Processes may have unequal numbers of batches to evaluate: nothing is exchanged then."""
        self._evaluating.enter_context(gathered(self.lightning_module))

    def _divide_again(self) -> None:
        self._evaluating.close()

    on_validation_start = on_test_start = on_predict_start = _gather
    on_validation_end = on_test_end = on_predict_end = _divide_again


def strategy_of(module: Any) -> FSDP2Strategy | None:
    """The strategy that divides a LightningModule; None where none does."""
    trainer = find_trainer(module)
    strategy = None if trainer is None else trainer.strategy
    return strategy if isinstance(strategy, FSDP2Strategy) else None
