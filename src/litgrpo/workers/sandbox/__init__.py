"""Python code of others, run where it has neither network nor files; or refused."""

from litgrpo.workers.sandbox.bubblewrap import Limits, Ran, Running, available, run, start, why_not

__all__ = ["Limits", "Ran", "Running", "available", "run", "start", "why_not"]
