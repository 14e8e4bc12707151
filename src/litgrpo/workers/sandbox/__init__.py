"""Run untrusted Python code without network or files, or raise if no sandbox is available."""

from litgrpo.workers.sandbox.bubblewrap import available, run, start, unavailable_reason
from litgrpo.workers.sandbox.running import RunningSandbox, SandboxLimits, SandboxResult

__all__ = [
    "RunningSandbox",
    "SandboxLimits",
    "SandboxResult",
    "available",
    "run",
    "start",
    "unavailable_reason",
]
