"""Tests on torch_xla's CPU backend, each in a separate process; skipped without torch_xla."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.own_process import Test
from tests.support.own_process import own_process as in_own_process

ROOT = Path(__file__).parents[2]
# The second pair keeps torch_xla from asking the network for a TPU; the flags spare compile time.
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "OMP_NUM_THREADS": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
}
installed = importlib.util.find_spec("torch_xla") is not None


def own_process(**environment: str) -> Callable[[Test], Test]:
    """Run a test in a new process with these environment variables."""
    mark = pytest.mark.skipif(not installed, reason="torch_xla is not installed")
    return lambda test: mark(in_own_process(lambda: ENVIRONMENT | environment)(test))
