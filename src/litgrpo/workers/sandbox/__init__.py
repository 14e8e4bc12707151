"""Python code of others, run where it has neither network nor files; or refused."""

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
