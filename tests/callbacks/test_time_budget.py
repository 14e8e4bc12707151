import time

import pytest

from litgrpo.callbacks.time_budget import TimeBudget
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Slow(StandIn):
    """An iteration takes a tenth of a second, a validation six."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        time.sleep(0.6)
        super().on_validation_epoch_end()


def test_a_run_stops_early_enough_for_the_last_validation(tmp_path):
    started = time.monotonic()
    module = fit(tmp_path, TimeBudget({"seconds": 3}), module=Slow(None))
    assert time.monotonic() - started < 3.5
    # One validation before and one after: about a second and a half is left for iterations.
    assert module.evaluations == 2
    assert 3 <= module.iteration <= 18


def test_the_duration_is_written_as_lightning_does():
    assert TimeBudget("00:01:00:30").limit_s == 3630
