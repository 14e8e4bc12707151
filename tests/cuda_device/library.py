"""The compiled library, as the module `native`."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from tests.cuda_device.build import NAME

_path = os.environ["CUDA_DEVICE_LIBRARY"]
_spec = importlib.util.spec_from_file_location(NAME, _path)
assert _spec is not None
assert _spec.loader is not None
native: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


def index_of(device: Any = None) -> int:
    """Number of a device; the current one for None, -1 and "cuda"."""
    if isinstance(device, int):
        return device if device >= 0 else native.current_device()
    if device is None or torch.device(device).index is None:
        return native.current_device()
    return torch.device(device).index
