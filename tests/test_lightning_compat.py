"""If a test fails after an update of Lightning, lightning_compat.py must be adapted."""

from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning import LightningModule
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from litgrpo import lightning_compat
from litgrpo.lightning_compat import (
    find_trainer,
    find_training_loader,
    is_compiled,
    log_numbers,
    private,
    remove_stock_progress_bar,
    set_data_parallel_size,
    validate_now,
)
from tests.support.fitting import fit
from tests.support.raises import raises_for
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class FindsLoader(Callback):
    def setup(self, trainer, pl_module, stage):
        self.loader = find_training_loader(trainer)


def test_the_training_loader_is_known_before_the_trainer_sets_it_up(tmp_path):
    finds = FindsLoader()
    fit(tmp_path, finds, module=StandIn(1))
    assert len(list(finds.loader)) > 0


def test_the_number_of_ranks_of_a_sharded_strategy_is_set():
    strategy = ModelParallelStrategy()
    set_data_parallel_size(strategy, 4)
    assert strategy._data_parallel_size == 4


class Validates(Callback):
    def on_train_end(self, trainer, pl_module):
        before = pl_module.evaluations
        validate_now(trainer)
        assert pl_module.evaluations == before + 1
        assert trainer.training


def test_a_validation_may_run_after_the_training_has_ended(tmp_path):
    fit(tmp_path, Validates(), module=StandIn(3))


class Remembers(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step):
        if "every" in metrics:
            self.rows.append(metrics)


class Logs(Callback):
    """Logs a number of every iteration, one of every second, and one of the epoch."""

    def __init__(self, log):
        self.log_with = log

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        n = torch.tensor(float(pl_module.iteration))
        odd = {"odd": n} if pl_module.iteration % 2 else {}
        self.log_with(pl_module, {"every": n, **odd, f"epoch {trainer.current_epoch}": n})


def test_log_numbers_equals_log_dict_but_does_not_repeat_earlier_numbers(tmp_path):
    def collect(log):
        logger = Remembers()
        fit(tmp_path, Logs(log), module=StandIn(7), limit_train_batches=2, logger=logger)
        return [{n: x for n, x in row.items() if "/" not in n} for row in logger.rows]

    found = collect(log_numbers)
    expected = collect(lambda module, numbers: module.log_dict(numbers))
    assert expected[1].pop("odd") == 1  # Lightning's own logs it again in the second iteration
    for each in expected[3::2]:
        each.pop("odd", None)
    assert found == expected
    assert ["odd" in each for each in found] == [True, False] * 3 + [True]
    assert [each["every"] for each in found] == list(range(1, 8))
    assert "epoch 0" in found[1]
    assert "epoch 0" not in found[2]


def test_a_missing_private_attribute_names_the_tested_version():
    with raises_for("Trainer._renamed", lightning_compat.TESTED, error=RuntimeError):
        private(Trainer(logger=False, accelerator="cpu"), "_renamed")


def test_the_installed_version_is_the_tested_one():
    assert lightning.__version__ == lightning_compat.TESTED


def test_a_module_without_a_trainer_has_none():
    assert find_trainer(LightningModule()) is None
    module = fit_nothing()
    assert find_trainer(module) is module.trainer


def fit_nothing():
    module = LightningModule()
    module.trainer = Trainer(logger=False, accelerator="cpu")
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_a_compiled_module_is_recognized():
    module = LightningModule()
    assert not is_compiled(module)
    from lightning.pytorch.utilities.compile import from_compiled

    assert is_compiled(from_compiled(torch.compile(module)))


def test_only_lightnings_own_bars_are_removed():
    class Mine(TQDMProgressBar):
        """A bar of the user's."""

    mine = Mine()
    trainer = SimpleNamespace(callbacks=[TQDMProgressBar(), mine, RichProgressBar()])
    assert remove_stock_progress_bar(trainer)
    assert trainer.callbacks == [mine]
    assert not remove_stock_progress_bar(trainer)
