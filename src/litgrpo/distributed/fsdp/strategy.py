"""FSDP2 as a Lightning strategy: shards weights and optimizer state over ranks."""

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
from litgrpo.distributed.restarts import open_restart_store
from litgrpo.lightning_compat import find_trainer, set_data_parallel_size


class FSDP2Strategy(ModelParallelStrategy):
    """Shards weights, gradients and optimizer state over ranks (FSDP2, ZeRO-3).

    Results equal those of one process up to the order of sums. Rollouts and evaluations gather
    the full weights. `precision.autocast_dtype: bfloat16` gathers
    and computes in bfloat16, and reduces gradients in float32.

    Args:
        replicas: copies of the weights (HSDP). Each is sharded over ranks / replicas, and gradients
            are averaged over replicas. Set it to the number of nodes if their network is slow.
        reshard_after_forward: gather a layer again for its backward pass; false is faster and keeps
            all gathered layers of a micro-batch.
        timeout_minutes: time that a rank waits for the others before it raises.

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

    # Checkpoints are read before optimizers exist, as with all strategies that litgrpo supports.
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def setup_environment(self) -> None:
        set_data_parallel_size(self, self.num_nodes * self.num_processes)
        open_restart_store()
        super().setup_environment()
        ranks_per_replica, rest = divmod(self.world_size, self.replicas)
        require(
            not rest and ranks_per_replica > 1,
            f"replicas is {self.replicas} with {self.world_size} ranks; each replica needs an "
            "equal number of ranks, at least 2. To keep all weights on every rank, set "
            "trainer.strategy to ddp.",
        )
        shape, names = (self.replicas, ranks_per_replica), ("replicas", "shards")
        both = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self.shards = both if self.replicas > 1 else both["shards"]

    def divide(
        self,
        module: nn.Module,
        units: Iterable[nn.Module],
        entries: Iterable[str],
        compute: torch.dtype | None,
    ) -> None:
        """Shard a module over the ranks; see `litgrpo.distributed.fsdp.units.divide`."""
        assert self.shards is not None
        reshard = self.reshard_after_forward
        divide(module, units, entries, self.shards, compute=compute, reshard_after_forward=reshard)

    def shards_for(self, tensor: Tensor) -> DTensor:
        """Allocate the shard of this rank for a tensor of this shape and dtype."""
        assert self.shards is not None
        settings: Any = {"dtype": tensor.dtype, "device_mesh": self.shards}
        shards: DTensor = empty_shards(*tensor.shape, placements=self._placements, **settings)
        return shards

    @property
    def _placements(self) -> list[Any]:
        return [Replicate(), Shard(0)] if self.replicas > 1 else [Shard(0)]

    def _shard_like(self, parameter: Tensor | None, value: Any) -> Any:
        """Shard a full tensor like its parameter, as read from a single-process checkpoint."""
        if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
            return value
        if isinstance(value, DTensor) or value.shape != parameter.shape:
            return value
        on_device = value.to(self.root_device)
        return distribute_tensor(on_device, self.shards, self._placements, src_data_rank=None)

    # --- hooks of Lightning ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # The plugin writes on every rank.
        path = Path(self.broadcast(filepath))
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        return self.checkpoint_io.load_checkpoint(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        parameters, weights = dict(module.named_parameters()), checkpoint["state_dict"]
        sharded = {n: self._shard_like(parameters.get(n), value) for n, value in weights.items()}
        module.load_state_dict(sharded, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                n: {name: self._shard_like(trained[n], value) for name, value in values.items()}
                for n, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})

    def _gather(self) -> None:
        """Gather the weights: ranks may have unequal numbers of batches to evaluate."""
        self._evaluating.enter_context(gathered(self.lightning_module))

    def _reshard(self) -> None:
        self._evaluating.close()

    on_validation_start = on_test_start = on_predict_start = _gather
    on_validation_end = on_test_end = on_predict_end = _reshard


def strategy_of(module: Any) -> FSDP2Strategy | None:
    """Return the FSDP2 strategy of a LightningModule; None without one."""
    trainer = find_trainer(module)
    strategy = None if trainer is None else trainer.strategy
    return strategy if isinstance(strategy, FSDP2Strategy) else None
