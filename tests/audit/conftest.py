"""Audits score in this process, unless a test asks for worker processes."""

import pytest

from litgrpo.rewards import Runner


@pytest.fixture(autouse=True)
def audits_run_in_this_process(monkeypatch):
    """Start no workers, which import torch and the module of a test's reward."""

    def runner(*, num_workers=1, **settings):
        return Runner(num_workers=0, **settings)

    monkeypatch.setattr("litgrpo.audit.score.Runner", runner)


@pytest.fixture
def worker_processes(monkeypatch, audits_run_in_this_process):
    """Score in worker processes, as a user's audit does."""
    monkeypatch.setattr("litgrpo.audit.score.Runner", Runner)
