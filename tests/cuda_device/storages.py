"""Storages of the simulated device: what torch's CPU build cannot do with untyped memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import UntypedStorage
from torch.storage import _StorageBase

from tests.cuda_device.library import index_of, native


def install() -> None:
    """Replace the methods of storages that move, copy or resize memory of a device."""
    to, clone, resize = _StorageBase.to, _StorageBase.clone, UntypedStorage.resize_

    def move(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        """Copy to a device; a storage that is there already is returned."""
        device = torch.device(device)
        if device.type != "cuda" or self.device == device:
            return to(self, device=device, non_blocking=non_blocking)
        return _copy(self, device)

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        """Copy to a device."""
        return move(self, device=torch.device("cuda", index_of(device)))

    def duplicate(self: Any) -> Any:
        """Copy on the same device, for deepcopy."""
        return _copy(self, self.device) if self.device.type == "cuda" else clone(self)

    def change_size(self: Any, size: int) -> Any:
        """Resize, as FSDP does to free the weights of a layer."""
        if self.device.type != "cuda":
            return resize(self, size)
        native.resize_storage(self, size)
        return self

    _StorageBase.to, _StorageBase.cuda = move, cuda
    _StorageBase.clone = UntypedStorage.clone = duplicate
    UntypedStorage.resize_ = change_size


def _copy(storage: Any, device: torch.device) -> Any:
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    return made.copy_(storage)
