"""If one fails after an update of Lightning, callbacks/lightning_internals.py needs one, too."""

import pytest
from lightning.pytorch import Callback

from litgrpo.callbacks.lightning_internals import numbers_to_log, validate_now, validation_is_due
from tests.callbacks.fitting import fit
from tests.standin import StandIn

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
