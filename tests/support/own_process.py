"""Run a test in a separate process: `python -m tests.support.own_process MODULE TEST ARGUMENTS`.

Devices and their number are properties of a process, so tests cannot share one.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Test = Callable[..., None]


def own_process(environment: Callable[[], Mapping[str, str]]) -> Callable[[Test], Test]:
    """Run a test in a new process.

    Paths among the test's arguments become text; its output is shown when it fails.

    Args:
        environment: returns further environment variables; called when the test runs.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def outside(**arguments: Any) -> None:
            command = [sys.executable, "-m", __name__, test.__module__, test.__name__]
            done = subprocess.run(
                [*command, json.dumps(arguments, default=str)],
                env=os.environ | environment(),
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}", pytrace=False)

        outside.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        outside.inside = test  # type: ignore[attr-defined]
        return outside

    return decorate


if __name__ == "__main__":
    module, name, given = sys.argv[1:]
    getattr(importlib.import_module(module), name).inside(**json.loads(given))
    # Leave without Python's finalization: autograd's thread of a device may still be giving back
    # the last backward pass, and torch aborts when a thread asks for the interpreter after its end.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
