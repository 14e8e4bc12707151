"""Audits score in this process, unless a test asks for worker processes."""

import pytest

from litgrpo.rewards import ProcessRunner
from litgrpo.rewards.runner import InProcessRunner

MODULES = ("run", "open_text", "episode_command")


@pytest.fixture(autouse=True)
def audits_run_in_this_process(monkeypatch):
    """Start no workers, which import torch and the module of a test's reward."""

    def runner(*, num_workers=1, **settings):
        return InProcessRunner(**settings)

    for module in MODULES:
        monkeypatch.setattr(f"litgrpo.audit.{module}.ProcessRunner", runner)


@pytest.fixture
def worker_processes(monkeypatch, audits_run_in_this_process):
    """Score in worker processes, as a user's audit does."""
    for module in MODULES:
        monkeypatch.setattr(f"litgrpo.audit.{module}.ProcessRunner", ProcessRunner)
