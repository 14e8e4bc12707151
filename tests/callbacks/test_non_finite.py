import pytest

from litgrpo.callbacks.non_finite import NonFinite
from litgrpo.types import StepReport
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*eval mode")


class Skips(StandIn):
    """Reports given steps, one list for each iteration."""

    def __init__(self, *iterations):
        super().__init__(len(iterations))
        self.skipped = iterations

    def training_step(self, batch, batch_idx):
        skipped = self.skipped[self.iteration]
        reports = [StepReport(lr=0.1, skipped=each) for each in skipped]
        return super().training_step(batch, batch_idx) | {"reports": reports}


@pytest.mark.filterwarnings("ignore:.*optimizer steps skipped, not finite")
def test_a_step_that_is_taken_ends_the_row(tmp_path):
    callback = NonFinite(stop_after=2)
    module = fit(tmp_path, callback, module=Skips([{}], [None, {}], [None]))
    assert module.trainer.logged_metrics["optim/skipped_steps"] == 2
    state = callback.state_dict()
    assert state == {"skipped": 2, "in_a_row": 0}
    other = NonFinite()
    other.load_state_dict(state)
    assert other.state_dict() == state


@pytest.mark.filterwarnings("ignore:.*optimizer steps skipped, not finite")
def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(ValueError, match="Stopped in iteration 2: 3 optimizer steps in a row were"):
        fit(tmp_path, NonFinite(stop_after=3), module=Skips([{}], [{}, {}], [None]))
    with pytest.raises(ValueError, match=r"non_finite.stop_after is 0; it must be at least 1"):
        NonFinite(stop_after=0)


def test_the_rows_behind_a_skipped_step_are_named_and_written(tmp_path):
    said = r"iteration 1: 1 of 2 optimizer steps skipped, not finite: loss of 1 rows; they are in "
    with pytest.warns(UserWarning, match=said):
        fit(tmp_path, NonFinite(), module=Skips([{2: "loss"}, None]))
    (line,) = (tmp_path / "non_finite/iteration-000001.jsonl").read_text().splitlines()
    assert '"not_finite": "loss"' in line
    assert '"prompt": "B"' in line
