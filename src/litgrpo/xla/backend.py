"""Device backends of torch-xla; imported when the first XLA device is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_xla import backends
from torch_xla.debug import metrics

from litgrpo.distributed.device import Backend, Function
from litgrpo.distributed.precision import matmul_precision

# Maximum number of programs of one function: bucket widths, group sizes, sampling settings.
MAX_GRAPHS = 64
# {torch's name for the precision of float32 products: torch-xla's}
MATMUL_PRECISION = {"highest": "highest", "high": "high", "medium": "default"}
# Reads of single values; torch-xla counts them like operators that fall back to the CPU.
READ = "aten::_local_scalar_dense"


class XlaBackend(Backend):
    """A device that compiles a program for each set of shapes."""

    static_shapes = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.shapes: dict[str, set[str]] = {}
        self.unread_shapes: list[str] = []

    def prepare(self) -> None:
        """See `Backend.prepare`."""
        if "torch.xla" not in sys.modules:
            # torch.utils.checkpoint looks up a module of this name first.
            torch._register_device_module("xla", ModuleType("torch.xla"))
        # By default torch-xla computes float32 products in bfloat16 on some chips. Its docs advise
        # against setting the precision more than once.
        wanted = MATMUL_PRECISION[matmul_precision()]
        if backends.get_mat_mul_precision() != wanted:
            backends.set_mat_mul_precision(wanted)

    def seed(self, number: int) -> None:
        """See `Backend.seed`."""
        torch_xla.manual_seed(number)

    def random_state(self) -> dict[str, Any]:
        """See `Backend.random_state`."""
        return {"xla": int(xm.get_rng_state())}

    def set_random_state(self, state: dict[str, Any]) -> None:
        """See `Backend.set_random_state`."""
        if "xla" in state:
            xm.set_rng_state(state["xla"])

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        torch_xla.sync(wait=True)

    def flush(self) -> None:
        """See `Backend.flush`; torch-xla calls it `mark_step`."""
        torch_xla.sync(wait=False)

    def compile(self, function: Function) -> Function:
        """See `Backend.compile`; one graph per set of shapes, with the weights as inputs."""
        return _compile(function)

    def optimization_barrier(self, hidden: Tensor) -> Tensor:
        """See `Backend.optimization_barrier`."""
        hidden = hidden.detach().clone().requires_grad_(hidden.requires_grad)
        xm.optimization_barrier_([hidden])
        return hidden

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """See `Backend.to_host`."""
        return torch_xla._XLAC._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])

    def number_to(self, number: Tensor) -> Tensor:
        """See `Backend.number_to`.

        Torch-xla caches scalars by value: equal scalars share a buffer, which changes the program
        and recompiles it. A vector of one element is not cached.
        """
        return number.view(1).to(self.device).view(())

    def note_shapes(self, program: str, **tensors: Tensor) -> None:
        """See `Backend.note_shapes`."""
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        known = self.shapes.setdefault(program, set())
        # Bounded, in case `new_shapes` is never called.
        if shapes not in known and len(self.unread_shapes) <= MAX_GRAPHS:
            known.add(shapes)
            self.unread_shapes.append(f"{program}: {shapes}")

    def new_shapes(self) -> list[str]:
        """See `Backend.new_shapes`."""
        found, self.unread_shapes = self.unread_shapes, []
        return found

    def counters(self) -> dict[str, int]:
        """See `Backend.counters`."""
        missing = {name for name in metrics.counter_names() if name.startswith("aten::")} - {READ}
        return {
            "compilations": _count("CompileTime"),
            "host_reads": _count("TransferFromDeviceTime"),
            "cpu_fallbacks": sum(int(metrics.counter_value(name) or 0) for name in missing),
        }


class SpmdBackend(XlaBackend):
    """Several chips driven by one process as one device; tensors of rows are sharded by rows.

    Args:
        device: the one device.
        num_chips: number of chips of the device.
        divide: marks a tensor of rows on the device as sharded.
    """

    def __init__(
        self, device: torch.device, num_chips: int, divide: Callable[[Tensor], None]
    ) -> None:
        super().__init__(device)
        self.num_chips, self.divide = num_chips, divide

    def rows_to(self, tensor: Tensor) -> Tensor:
        """See `Backend.rows_to`."""
        there = tensor.to(self.device)
        self.divide(there)
        return there

    def compile(self, function: Function) -> Function:
        """Run every call as one program, whose results are sharded by rows.

        The function is traced in every call: torch-xla 2.9 crashes if it is compiled ahead of time
        for several chips.
        """

        def call(*arguments: Any) -> Any:
            self.flush()  # ends the program before, so that this one contains only the call
            results = function(*arguments)
            # The compiler shards results like their inputs, but zeros have no inputs. Returned
            # arguments are skipped: marking them again would copy them to the host.
            given = set(map(id, tree_leaves(arguments)))
            for result in tree_leaves(results):
                if isinstance(result, Tensor) and id(result) not in given:
                    self.divide(result)
            self.flush()
            return results

        return call

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        """See `Backend.to_host`.

        Copies shard by shard: torch-xla would compile a gather program for each tensor.
        """
        tensors = [tensor.detach() for tensor in tensors]
        self.synchronize()
        shards = torch_xla._XLAC._get_local_shards(tensors)
        places = torch_xla._XLAC._get_local_shard_replica_and_indices(tensors)
        return list(map(_assemble_shards, tensors, shards, places))


def _assemble_shards(tensor: Tensor, shards: list, places: list) -> Tensor:
    """Return a sharded tensor on the host."""
    if shards[0][0].shape == tensor.shape:  # replicated
        return shards[0][0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (shard, _), (_, place) in zip(shards, places, strict=True):
        whole[place] = shard
    return whole


@cache
def _compile(function: Function) -> Function:
    # Torch's compiler raises beyond its limit, which is 8 by default.
    limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    torch._dynamo.config.recompile_limit = limit
    return torch.compile(function, backend="openxla", dynamic=False, fullgraph=True)


def _count(metric: str) -> int:
    """Return the number of events of a torch-xla metric so far."""
    data = metrics.metric_data(metric)
    return 0 if data is None else int(data[0])
