"""Tests on torch_xla's CPU backend, each in a separate process.

Devices, their number and SPMD are properties of a process, so tests cannot share one. Without
torch_xla the tests are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def own_process(**environment: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a new process with these environment variables.

    Paths among the test's arguments become text; its output is shown when it fails.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def outside(**arguments: Any) -> None:
            command = [sys.executable, "-m", __name__, test.__module__, test.__name__]
            done = subprocess.run(
                [*command, json.dumps(arguments, default=str)],
                env=os.environ | ENVIRONMENT | environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}", pytrace=False)

        outside.__name__, outside.__doc__ = test.__name__, test.__doc__
        outside.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        outside.inside = test  # type: ignore[attr-defined]
        return pytest.mark.skipif(not installed, reason="torch_xla is not installed")(outside)

    return decorate


if __name__ == "__main__":
    module, name, given = sys.argv[1:]
    getattr(importlib.import_module(module), name).inside(**json.loads(given))
