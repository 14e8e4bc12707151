"""Run untrusted Python code without network or files, or raise if no sandbox is available."""

from litgrpo.workers.sandbox.bubblewrap import (
    RunningSandbox,
    SandboxLimits,
    SandboxResult,
    available,
    run,
    start,
    unavailable_reason,
)

__all__ = [
    "RunningSandbox",
    "SandboxLimits",
    "SandboxResult",
    "available",
    "run",
    "start",
    "unavailable_reason",
]
