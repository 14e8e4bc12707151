"""Run code in a sandbox that root or an ordinary user starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import litgrpo
from litgrpo.workers import sandbox
from litgrpo.workers.sandbox import SandboxLimits, SandboxResult

NOBODY = "65534"
SOURCES = str(Path(litgrpo.__file__).parents[1])
SERVER = """
import json, sys
from dataclasses import asdict
from litgrpo.workers import sandbox
print(json.dumps(sandbox.unavailable_reason()), flush=True)
for line in sys.stdin:
    code, limits, given = json.loads(line)
    ran = sandbox.run(code, sandbox.SandboxLimits(**limits), **given)
    print(json.dumps(asdict(ran)), flush=True)
"""


class Run(Protocol):
    """Function that runs code in a sandbox; keywords are limits, `given` those of `run`."""

    def __call__(
        self, code: str, given: dict[str, Any] | None = None, **limits: Any
    ) -> SandboxResult: ...


def run_as_this_user(
    code: str, given: dict[str, Any] | None = None, **limits: Any
) -> SandboxResult:
    """Run code in a sandbox that this process starts."""
    return sandbox.run(code, SandboxLimits(**{"seconds": 20.0} | limits), **given or {})


@contextmanager
def open_as_nobody() -> Iterator[Run | str]:
    """Give a function that runs code in a sandbox of an ordinary user, or why there is none."""
    python = find_python()
    if os.geteuid() != 0 or python is None:
        yield "needs root, setpriv and a Python that other users can start"
        return
    with subprocess.Popen(
        [*as_nobody(python), "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, replies = server.stdin, server.stdout
        reason = json.loads(replies.readline())

        def run(code: str, given: dict[str, Any] | None = None, **limits: Any) -> SandboxResult:
            request = [code, {"seconds": 20.0} | limits, given or {}]
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            return SandboxResult(**json.loads(replies.readline()))

        yield reason or run
        requests.close()


def find_python() -> str | None:
    """Return a Python that an ordinary user can start, such as the system's."""
    return next(filter(_starts_as_nobody, (sys.executable, "/usr/bin/python3")), None)


def as_nobody(python: str) -> list[str]:
    """Return the start of a command that runs Python as an ordinary user."""
    user = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
    path = os.environ.get("PATH", os.defpath)
    return [*user, "env", "-i", f"PATH={path}", f"PYTHONPATH={SOURCES}", python, "-B"]


def _starts_as_nobody(python: str) -> bool:
    if shutil.which("setpriv") is None:
        return False
    command = [
        *as_nobody(python),
        "-c",
        "import sys, litgrpo; sys.exit(sys.version_info < (3, 10))",
    ]
    return subprocess.run(command, capture_output=True, check=False, cwd="/").returncode == 0
