"""What the learner of a module is given, and what it does with it."""

import pytest

from litgrpo.training.learner import Learner
from litgrpo.types import StepReport


@pytest.fixture
def updates(monkeypatch):
    """(training_batch, reports) of each iteration."""
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
    """The training_batch of each iteration, which is not learned from."""
    seen = []

    def remember(self, training_batch, stepper):
        seen.append(training_batch)
        return [StepReport(0.0)]

    monkeypatch.setattr(Learner, "update", remember)
    return seen
