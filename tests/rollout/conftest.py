"""Fixtures of tests with vLLM servers."""

import pytest

from tests.support.vllm_stand_in import StandIn


@pytest.fixture
def server(folder):
    """A stand-in that serves the model in `folder`, a fixture of the test's module."""
    with StandIn(folder) as running:
        yield running


@pytest.fixture
def quick(monkeypatch):
    """Short pauses between attempts."""
    monkeypatch.setattr("litgrpo.rollout.servers.pool.PAUSE_S", 0.02)
    monkeypatch.setattr("litgrpo.rollout.servers.pool.UNAVAILABLE_S", 0.2)
