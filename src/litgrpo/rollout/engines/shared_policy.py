"""A policy whose weights lie in memory that other processes on this machine read, too."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from litgrpo.arguments import require
from litgrpo.models.policy import Policy

ALIGNED = 64  # bytes, as torch's own allocations
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the memory: its first byte, and what it is."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype
    is_parameter: bool

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.begin + self.shape.numel() * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The tensor in the memory, [bytes] uint8."""
        found = memory[self.begin : self.end].view(self.dtype).view(self.shape)
        return nn.Parameter(found, requires_grad=False) if self.is_parameter else found


class SharedPolicy:
    """One copy of a policy's tensors for all processes, and the rest of it pickled.

    The memory has no name in any file system: it is gone with the last process that has it open,
    however that ends. Pickled, this becomes the policy itself in the process that reads it, its
    tensors in the same memory; what `update` writes is seen there at once.

    Args:
        policy: on the CPU, its weights whole.

    Raises:
        ValueError: its tensors cannot be shared so, or the system has no such memory.
    """

    def __init__(self, policy: Policy) -> None:
        require(
            sys.platform == "linux",
            f"Rollout processes share weights as Linux does it; this is {sys.platform}. Give "
            "engine: {class_path: LocalEngine}.",
        )
        self.policy, self.kernels = policy, policy.kernels
        self.parts = tensors_of(policy)
        packer = _Packer()
        packer.dump(policy)
        self.pickled, self.tensors, self.places = packer.text, packer.tensors, packer.places
        self.file = os.memfd_create("litgrpo-weights")
        weakref.finalize(self, os.close, self.file)
        size = max([each.end for each in self.places], default=1)
        os.ftruncate(self.file, size)
        memory = mapped(self.file, size)
        self.shared = [each.of(memory) for each in self.places]
        self.update()

    def is_of(self, policy: Policy) -> bool:
        """Whether this is that policy as it is now, apart from the numbers in its tensors."""
        parts = tensors_of(policy)
        same = policy is self.policy and policy.kernels == self.kernels
        same = same and len(parts) == len(self.parts)
        return same and all(a is b for a, b in zip(parts, self.parts, strict=True))

    @torch.no_grad()
    def update(self) -> None:
        """Copy the policy's numbers into the memory; nobody may be sampling from it."""
        for here, tensor in zip(self.shared, self.tensors, strict=True):
            here.copy_(tensor)

    def __reduce__(self) -> Any:
        """The policy, where this is read by a process that was started by this one."""
        return opened, (self.pickled, self.places, os.getpid(), self.file)


def tensors_of(policy: Policy) -> list[Tensor]:
    """Weights and buffers."""
    return [*policy.parameters(), *policy.buffers()]


def mapped(file: int, size: int) -> Tensor:
    """[bytes] uint8: the memory of a file, shared with all that map it."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def opened(pickled: bytes, places: list[Place], owner: int, file: int) -> Policy:
    """The policy of a `SharedPolicy`, in another process.

    Args:
        pickled: the policy without its tensors.
        places: of these.
        owner: the process that has the memory open.
        file: as which.
    """
    handle = os.open(f"/proc/{owner}/fd/{file}", os.O_RDWR)
    memory = mapped(handle, os.fstat(handle).st_size)
    os.close(handle)
    reader = _Unpacker(io.BytesIO(pickled))
    reader.tensors = [each.of(memory) for each in places]
    policy: Policy = reader.load()
    return policy


class _Packer(cloudpickle.Pickler):
    """Pickles a policy, its tensors as their numbers, and lays these out one behind the other."""

    def __init__(self) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer)
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []
        self.known: dict[int, int] = {}

    @property
    def text(self) -> bytes:
        """What was pickled."""
        return self.buffer.getvalue()

    def persistent_id(self, obj: Any) -> int | None:
        """A tensor's number; the same where it is the same tensor, as with tied weights."""
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.known:
            require(
                type(obj) in PLAIN and obj.device.type == "cpu",
                f"Rollout processes read weights in this machine's memory, but there is a "
                f"{type(obj).__name__} on {obj.device}: divided, quantized or on a device. Give "
                "engine: {class_path: LocalEngine}.",
            )
            begin = self.places[-1].end if self.places else 0
            begin += -begin % ALIGNED
            is_parameter = isinstance(obj, nn.Parameter)
            self.known[id(obj)] = len(self.places)
            self.places.append(Place(begin, obj.shape, obj.dtype, is_parameter))
            self.tensors.append(obj)
        return self.known[id(obj)]


class _Unpacker(pickle.Unpickler):
    """Reads what `_Packer` wrote; `tensors` are those that it numbered."""

    tensors: list[Tensor]

    def persistent_load(self, number: int) -> Tensor:
        """The tensor of a number."""
        return self.tensors[number]
