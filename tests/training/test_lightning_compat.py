"""If one fails after an update of Lightning, training/lightning_compat.py needs one, too."""

import pytest
import torch
from lightning.pytorch import Callback

from litgrpo.training.lightning_compat import (
    log_numbers,
    numbers_to_log,
    validate_now,
    validation_is_due,
)
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Asks(Callback):
    def __init__(self):
        self.due, self.numbers = [], []

    def on_train_batch_end(self, trainer, *_):
        self.due.append(validation_is_due(trainer))
        self.numbers.append(numbers_to_log(trainer))

    def on_train_end(self, trainer, pl_module):
        before = pl_module.evaluations
        validate_now(trainer)
        assert pl_module.evaluations == before + 1
        assert trainer.training


def test_what_is_due_and_what_is_about_to_be_logged_are_known_when_an_iteration_ends(tmp_path):
    asks = Asks()
    fit(tmp_path, asks, module=StandIn(3), val_check_interval=2)
    assert asks.due == [False, True, True]  # the last one because the training stops
    assert [int(numbers["step"]) for numbers in asks.numbers] == [1, 2, 3]
    assert float(asks.numbers[0]["reward/mean"]) == 0.5


class Logs(Callback):
    """Logs a number of every iteration, one of every second, and one of the epoch."""

    def __init__(self, logged_by):
        self.logged_by = logged_by

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        n = torch.tensor(float(pl_module.iteration))
        odd = {"odd": n} if pl_module.iteration % 2 else {}
        self.logged_by(pl_module, {"every": n, **odd, f"epoch {trainer.current_epoch}": n})


def test_numbers_are_logged_as_lightning_logs_them(tmp_path):
    def logged(log):
        asks = Asks()
        fit(tmp_path, Logs(log), asks, module=StandIn(7), limit_train_batches=2)
        return [{n: float(x) for n, x in each.items() if "/" not in n} for each in asks.numbers]

    found = logged(log_numbers)
    assert found == logged(lambda module, numbers: module.log_dict(numbers))
    assert [each["every"] for each in found] == list(range(1, 8))
    assert "epoch 0" in found[1]
    assert "epoch 0" not in found[2]
