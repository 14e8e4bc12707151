"""A tool that runs Python programs in a sandbox."""

from __future__ import annotations

from litgrpo.arguments import require
from litgrpo.workers import sandbox

TIMEOUT_S, MEMORY_MIB, MAX_CHARS = 5.0, 256, 2_000


def run_python(code: str) -> str:
    """Run a Python program and read what it prints.

    It has the standard library, but neither network nor files.

    Args:
        code: The program; what it prints is the result.

    Returns:
        What it printed.
    """
    limits = sandbox.SandboxLimits(TIMEOUT_S, MEMORY_MIB, output_chars=MAX_CHARS)
    result = sandbox.run(code, limits)
    output = result.output
    if result.tail:
        output += f"\n[output cut off after {MAX_CHARS:,} characters]"
    if result.exceeded:
        return f"{output}\n[killed: exceeded the limit of {result.exceeded}]".strip()
    if result.code == 0:
        return output.strip()
    # The last line names the error; the lines before it differ between machines.
    lines = (result.tail or output).strip().splitlines()
    return lines[-1] if lines else f"[exit code {result.code}]"


def require_sandbox() -> None:
    """Raise ValueError, with the fix, if programs cannot be sandboxed on this machine."""
    reason = sandbox.unavailable_reason()
    require(not reason, f"The tool run_python needs a sandbox: {reason}")
