"""Fixtures that record the inputs and reports of a learner."""

import pytest

from litgrpo.learning.learner import Learner
from litgrpo.types import StepReport


@pytest.fixture
def updates(monkeypatch):
    """(training batch, reports) of each iteration."""
    seen = []
    update = Learner.update

    def remember(self, training_batch, stepper):
        reports = update(self, training_batch, stepper)
        seen.append((training_batch, reports))
        return reports

    monkeypatch.setattr(Learner, "update", remember)
    return seen


@pytest.fixture
def not_learned(monkeypatch):
    """Training batch of each iteration, without an update."""
    seen = []

    def remember(self, training_batch, stepper):
        seen.append(training_batch)
        return [StepReport(0.0)]

    monkeypatch.setattr(Learner, "update", remember)
    return seen
