from pathlib import Path

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from litgrpo.callbacks.metrics_csv import MetricsCSV
from litgrpo.checkpointing import logger_state as journal
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.logger_state import LoggerState, never_failing
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def run(folder: Path, module: StandIn, resume: Path | None = None) -> None:
    board = TensorBoardLogger(folder, name="", version="", default_hp_metric=False)
    callbacks = (IterationCheckpoint(2, keep_last=9), LoggerState(folder))
    loggers = [board, MetricsCSV(folder)]
    fit(folder, *callbacks, module=module, resume=resume, logger=loggers, val_check_interval=3)


def seen(folder: Path) -> tuple[list[str], dict[str, list[int]]]:
    """The lines of metrics.csv, and the steps of every curve, without purging."""
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("checkpoint/")]
    curves = {tag: [event.step for event in events.Scalars(tag)] for tag in tags}
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [line.split(",")[0] for line in lines], curves


@pytest.mark.parametrize("cut", [2, 4])
def test_after_a_resume_no_iteration_is_there_twice_and_none_is_missing(tmp_path, cut):
    run(tmp_path / "whole", StandIn(7))
    run(tmp_path / "parts", StandIn(5))
    resume = tmp_path / f"parts/checkpoints/iteration=00000{cut}.ckpt"
    again = StandIn(7)
    again.evaluations = 1 + cut // 3
    run(tmp_path / "parts", again, resume)
    whole, parts = seen(tmp_path / "whole"), seen(tmp_path / "parts")
    assert parts == whole
    assert whole[0] == ["step", "1", "2", "3", "3", "4", "5", "6", "6", "7", "7"]


def test_a_run_that_starts_cuts_nothing(tmp_path):
    run(tmp_path, StandIn(2))
    first = seen(tmp_path)[0]
    run(tmp_path, StandIn(2))
    assert seen(tmp_path)[0] == [*first, *first[1:]]


class Broken(Logger):
    """Works once."""

    name = version = "broken"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log_hyperparams(self, *args, **kwargs) -> None:
        """Works."""

    def log_metrics(self, metrics, step=None) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError(28, "No space left on device")


def test_a_logger_that_fails_is_warned_of_once_and_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_warned", set())
    logger = Broken()
    said = r"logger Broken failed \(OSError: \[Errno 28\] No space left.* training goes on without"
    with pytest.warns(UserWarning, match=said) as warned:
        module = fit(tmp_path, module=StandIn(4), logger=never_failing(logger))
    assert module.iteration == 4
    assert logger.calls > 3
    assert len([each for each in warned if "Broken" in str(each.message)]) == 1
