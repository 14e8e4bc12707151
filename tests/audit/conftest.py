"""Audits score in this process, unless a test asks for worker processes."""

from dataclasses import replace

import pytest

from litgrpo.rewards.runner import Runner


@pytest.fixture(autouse=True)
def audits_run_in_this_process(monkeypatch):
    """Start no workers, which import torch and the module of a test's reward."""

    def runner(scoring):
        return Runner(replace(scoring, num_workers=0))

    monkeypatch.setattr("litgrpo.rewards.scorer.Runner", runner)


@pytest.fixture
def worker_processes(monkeypatch, audits_run_in_this_process):
    """Score in worker processes, as a user's audit does."""
    monkeypatch.setattr("litgrpo.rewards.scorer.Runner", Runner)
