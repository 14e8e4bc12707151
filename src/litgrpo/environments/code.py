"""A tool that runs Python; asked for by name, it is refused where there is no sandbox."""

from __future__ import annotations

from typing import Any

from litgrpo.arguments import require
from litgrpo.workers import sandbox

SECONDS, MEMORY_MIB, CHARS = 5.0, 256, 2_000


def _run_python(code: str) -> str:
    """Run a Python program and read what it prints.

    It has the standard library, but neither network nor files.

    Args:
        code: The program; what it prints is the result.

    Returns:
        What it printed.
    """
    ran = sandbox.run(code, sandbox.Limits(SECONDS, MEMORY_MIB, output_chars=CHARS))
    last = ran.output.strip().splitlines()[-1:]
    if ran.ended:
        return f"{ran.output}\n[ended: more than the limit of {ran.ended}]".strip()
    # The last line names the error; lines before it differ between machines.
    return ran.output.strip() if ran.code == 0 else "".join(last) or f"[exit code {ran.code}]"


_run_python.__name__ = _run_python.__qualname__ = "run_python"


def __getattr__(name: str) -> Any:
    """`run_python`, where code can be run.

    Raises:
        ValueError: there is no sandbox here; a recipe that names the tool stops at its start.
    """
    if name != "run_python":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = sandbox.why_not()
    require(not reason, f"the tool run_python runs code in a sandbox only, and {reason}")
    return _run_python
