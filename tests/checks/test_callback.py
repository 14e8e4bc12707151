"""The start-up checks run before training and leave no trace; tests/checks tests what they find."""

import random
from types import SimpleNamespace

import pytest
import torch
from lightning import Callback
from torch.utils.data import DataLoader

from litgrpo.checks import callback as invariant_checks
from litgrpo.checks.callback import InvariantChecks, first_batch
from litgrpo.checks.invariants import CheckResult, Invariant
from litgrpo.data.modules import PromptData
from tests.support.raises import raises_for
from tests.support.training import batches, module, train

FAILS = CheckResult(Invariant.GROUPS, 1.0, 0.0)
HOLDS = CheckResult(Invariant.GROUPS, 0.0, 0.0)


@pytest.fixture
def measured(monkeypatch):
    """Conditions that the checks were asked to measure under; they draw random numbers."""
    asked = []

    def measure(rollouter, learner, prompts, conditions):
        torch.rand(3), random.random()
        asked.append(conditions)
        return [HOLDS]

    monkeypatch.setattr(invariant_checks, "measure_invariants", measure)
    return asked


def test_a_failed_check_raises_before_the_first_iteration(monkeypatch):
    monkeypatch.setattr(invariant_checks, "measure_invariants", lambda *_: [FAILS])
    grpo = module()
    with raises_for("groups are contiguous"):
        train(grpo, batches("a", "b"))
    assert grpo.iteration == 0


def test_a_module_adds_the_checks_unless_disabled(measured):
    callback = module().configure_callbacks()[0]
    assert isinstance(callback, InvariantChecks)
    train(module(check_invariants=False), batches("a", "b"))
    assert not measured


def test_a_line_is_logged_before_the_checks_run(monkeypatch, caplog):
    def measure(*_):
        logged_before.append("Checking" in caplog.text and "checked in" not in caplog.text)
        return [HOLDS]

    logged_before = []
    caplog.set_level("INFO", logger="lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(invariant_checks, "measure_invariants", measure)
    train(module(), batches("a", "b"))
    assert logged_before == [True]
    caplog.clear()
    train(module(check_invariants=False), batches("a", "b"))
    assert "Checking" not in caplog.text


def test_checks_do_not_change_random_numbers(measured):
    class Draws(Callback):
        def on_train_start(self, *_):
            drawn.append((float(torch.rand(())), random.random()))

    drawn = []
    for check in (True, False):
        torch.manual_seed(1), random.seed(1)
        train(module(check_invariants=check), batches("a", "b"), callbacks=[Draws()])
    assert drawn[0] == drawn[1]
    assert len(measured) == 1


def test_a_resumed_run_has_no_fresh_reference(measured, tmp_path):
    train(module(), batches("a", "b")).save_checkpoint(tmp_path / "a.ckpt")
    train(module(max_iterations=2), batches("a", "b"), ckpt=tmp_path / "a.ckpt")
    assert [conditions.fresh_reference for conditions in measured] == [True, False]
    assert not any(conditions.dropout for conditions in measured)


def test_a_device_that_compiles_every_shape_skips_the_checks(measured, monkeypatch):
    compiles = SimpleNamespace(static_shapes=True)
    monkeypatch.setattr(invariant_checks, "backend", lambda device: compiles)
    train(module(), batches("a", "b"))
    assert not measured


class Source:
    """A trainer whose `fit` was given a loader."""

    datamodule = None

    def __init__(self, loader):
        self.train_dataloader = loader
        self.fit_loop = SimpleNamespace(
            _data_source=SimpleNamespace(dataloader=lambda: self.train_dataloader)
        )


def test_reading_the_first_batch_does_not_change_the_order_of_the_data():
    def make_loader():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(range(100), batch_size=4, shuffle=True, generator=generator)

    looked_at, plain = make_loader(), make_loader()
    first = first_batch(Source(looked_at))
    assert [b.tolist() for b in looked_at] == [b.tolist() for b in plain]
    assert first.tolist() == next(iter(make_loader())).tolist()


def test_an_empty_loader_has_no_first_batch():
    assert first_batch(Source([])) is None


def test_the_prompts_of_a_data_module_are_all_trained_on(measured):
    seen = []

    def alternate(prompts, completions):
        seen.extend(prompts)
        return [float(row % 2) for row in range(len(prompts))]

    train(
        module(reward=alternate, max_iterations=2), PromptData(["a", "b", "c", "d"], batch_size=2)
    )
    assert len(measured) == 1
    assert len(set(seen)) == 4
