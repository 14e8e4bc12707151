"""What the learner of a module is given, and what it does with it."""

import pytest

from litgrpo.training.learner import Learner
from litgrpo.types import StepReport


@pytest.fixture
def updates(monkeypatch):
    """(experience, reports) of each iteration."""
    seen = []
    update = Learner.update

    def remember(self, experience, stepper):
        reports = update(self, experience, stepper)
        seen.append((experience, reports))
        return reports

    monkeypatch.setattr(Learner, "update", remember)
    return seen


@pytest.fixture
def not_learned(monkeypatch):
    """The experience of each iteration, which is not learned from."""
    seen = []

    def remember(self, experience, stepper):
        seen.append(experience)
        return [StepReport(0.0)]

    monkeypatch.setattr(Learner, "update", remember)
    return seen
