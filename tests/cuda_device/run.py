"""Run tests and commands on the simulated device, each in a new process.

A process has the device from its first import of torch, or not at all, so tests of the ordinary
suite start one. They are marked `cuda` and run by `.ci/nightly cuda`, or by `pytest -m cuda`.

    @on_cuda(CUDA_DEVICE_LIMIT_MB=80)
    def test_something():  # in a process that has the device
        assert torch.zeros(1, device="cuda").is_cuda

    @needs_cuda
    def test_a_command(tmp_path):
        done = run_on_cuda("cli.py", "fit", "-c", "configs/quickstart.yaml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_device.build import build, reason_to_skip
from tests.support.own_process import own_process

ROOT = Path(__file__).parents[2]
Test = Callable[..., Any]


def environment(**settings: object) -> dict[str, str]:
    """Environment variables of a Python process that has the device; builds it if needed.

    Args:
        settings: further variables, such as CUDA_DEVICE_LIMIT_MB; see `tests.cuda_device`.
    """
    folders = [Path(__file__).parent / "startup", ROOT / "src", ROOT]
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*map(str, folders), *([before] if before else [])])
    variables = {"CUDA_DEVICE_LIBRARY": str(build()), "PYTHONPATH": path}
    return variables | {name: str(value) for name, value in settings.items()}


def run_on_cuda(
    *words: str | Path, cwd: Path = ROOT, timeout: float = 600, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run `python *words` on the device; return its exit code, output and errors.

    Args:
        words: a script and its arguments, or `-m module`, or `-c code`. A script that is a relative
            path is one of the repository.
        cwd: folder to run in.
        timeout: seconds, after which the process is killed and an error raised.
        settings: environment variables; see `environment`.
    """
    script, *arguments = map(str, words)
    script = script if script.startswith("-") else str(ROOT / script)
    return subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | environment(**settings),
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


def needs_cuda(test: Test) -> Test:
    """Mark a test that starts processes on the device; skip it if the device cannot be built."""
    reason = reason_to_skip()
    return pytest.mark.cuda(pytest.mark.skipif(reason is not None, reason=str(reason))(test))


def on_cuda(**settings: object) -> Callable[[Test], Test]:
    """Run a test in a new process that has the device.

    Args:
        settings: environment variables; see `environment`.
    """
    return lambda test: needs_cuda(own_process(lambda: environment(**settings))(test))
