"""NCCL of the simulated device: collectives of CUDA tensors, computed by gloo on copies.

As NCCL it takes only tensors on the current device of its process, and no CPU tensors: the process
group is made for the device type cuda only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d

BACKEND = "simulated_nccl"


class SimulatedNCCL(dist.ProcessGroup):
    """A process group whose collectives are finished when they return."""

    # FSDP2 reads both.
    _device_types: ClassVar = [torch.device("cuda")]
    bound_device_id = None

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore(BACKEND, store), rank, size, timeout)

    @property
    def group_name(self) -> str:
        return distributed_c10d._world.pg_names[self]

    @property
    def group_desc(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None: ...
    def _set_group_desc(self, name: str) -> None: ...

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "nccl"

    def _reduce(self, tensors: list[Tensor], opts: Any) -> list[Tensor]:
        """Reduced copies on the host. Gloo has no mean."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        mean = op == dist.ReduceOp.AVG
        for each in tensors:
            self.gloo.allreduce([each], dist.ReduceOp.SUM if mean else op).wait()
            if mean:
                each.div_(self._size)
        return tensors

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self._size)]
        self.gloo.allgather([found], [tensor]).wait()
        return found

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        _to_device(tensors, self._reduce(_to_host(tensors), opts))
        return _finish(tensors)

    allreduce_coalesced = allreduce
    reduce = allreduce  # the root's result is defined, the others' is not

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        host = _to_host(tensors)
        for each in host:
            self.gloo.broadcast(each, 0 if opts is None else opts.rootRank).wait()
        _to_device(tensors, host)
        return _finish(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, each in zip(outputs, _to_host(inputs), strict=True):
            _to_device(output, self._gather(each))
        return _finish(outputs)

    def _allgather_base(self, output: Tensor, each: Tensor, opts: Any = None) -> Any:
        (host,) = _to_host([each])
        parts = [part.flatten() for part in self._gather(host)]
        _to_device([output], [torch.cat(parts).view_as(output)])
        return _finish(output)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, each in zip(outputs, inputs, strict=True):
            self._allgather_base(output, each)
        return _finish(outputs)

    def _reduce_scatter_base(self, output: Tensor, each: Tensor, opts: Any = None) -> Any:
        (host,) = self._reduce(_to_host([each]), opts)
        _to_device([output], [host.flatten().chunk(self._size)[self._rank].view_as(output)])
        return _finish(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, each in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, each, opts)
        return _finish(outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            host = self._reduce(_to_host(parts), opts)
            _to_device([output], [host[self._rank]])
        return _finish(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for number, each in enumerate(_to_host(inputs)):
            found = self._gather(each)
            if outputs:  # of the root
                _to_device(outputs[number], found)
        return _finish(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        host = [torch.empty_like(output, device="cpu") for output in outputs]
        given = [_to_host(parts) for parts in inputs] or [[] for _ in host]
        for each, parts in zip(host, given, strict=True):
            self.gloo.scatter(each, parts, 0 if opts is None else opts.rootRank).wait()
        _to_device(outputs, host)
        return _finish(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self.gloo.barrier().wait()
        return _finish()


def _finish(result: Any = None) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _to_host(tensors: list[Tensor]) -> list[Tensor]:
    current = torch.device("cuda", torch.cuda.current_device())
    for each in tensors:
        if each.device != current:
            raise RuntimeError(f"NCCL got a tensor on {each.device}, expected {current}")
    return [each.detach().cpu().contiguous() for each in tensors]


def _to_device(tensors: list[Tensor], host: list[Tensor]) -> None:
    with torch.no_grad():
        for each, value in zip(tensors, host, strict=True):
            each.detach().copy_(value)


def _create(store: Any, rank: int, size: int, timeout: Any) -> SimulatedNCCL:
    return SimulatedNCCL(store, rank, size, timeout)


def install() -> None:
    """Let torch.distributed use this where a program asks for NCCL."""
    if not dist.is_available():
        return
    from torch._C._distributed_c10d import Logger

    # DDP's logger takes times from a timer that only a CUDA build has.
    Logger.set_runtime_stats_and_log = lambda self: None
    dist.Backend.register_backend(BACKEND, _create, devices=["cuda"])
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend == "nccl":
            backend = f"cuda:{BACKEND}"
            kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)  # it would connect early, which gloo does anyway
        return init(backend, *args, **kwargs)

    def make_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        backend = f"cuda:{BACKEND}" if backend == "nccl" else backend
        return new_group(ranks, timeout, backend, *args, **kwargs)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
    dist.new_group = distributed_c10d.new_group = make_group
    dist.is_nccl_available = lambda: True
