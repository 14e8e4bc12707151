"""Modules that can be imported only on the device hold no doctests."""

import os
from pathlib import Path

if "CUDA_DEVICE_LIBRARY" not in os.environ:
    own = Path(__file__).parent.glob("[!_]*.py")
    collect_ignore = [path.name for path in own if not path.name.startswith(("test_", "conftest"))]
