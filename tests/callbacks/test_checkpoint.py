import os
import signal
from pathlib import Path

import pytest
import torch

from litgrpo.callbacks.checkpoint import IterationCheckpoint
from litgrpo.callbacks.run_folder import RunFolder, saved_config
from tests.callbacks.fitting import fit
from tests.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_saves_count_iterations_and_not_optimizer_steps(tmp_path):
    fit(tmp_path, IterationCheckpoint(2, keep_last=9, keep_best=0), module=StandIn(5))
    numbered = [f"iteration=00000{n}.ckpt" for n in (2, 4, 5)]
    assert names(tmp_path) == [*numbered, "last.ckpt"]
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert (last["iteration"], last["global_step"]) == (5, 15)


def test_the_newest_and_the_best_are_kept(tmp_path):
    # 0.1 is before training; validations follow iterations 2, 4, 6 and 8.
    module = StandIn(8, scores=[0.1, 0.5, 0.9, 0.6, 0.7])
    fit(tmp_path, IterationCheckpoint(1, keep_last=1), module=module, val_check_interval=2)
    expected = ["best.ckpt", "iteration=000004.ckpt", "iteration=000008.ckpt", "last.ckpt"]
    assert names(tmp_path) == expected
    assert (tmp_path / "checkpoints/best.ckpt").readlink() == Path("iteration=000004.ckpt")
    assert (tmp_path / "checkpoints/last.ckpt").readlink() == Path("iteration=000008.ckpt")


def test_of_a_loss_the_smallest_is_best(tmp_path):
    checkpoint = IterationCheckpoint()
    assert checkpoint._goodness({"loss": 2.0}) == -2.0
    assert checkpoint._goodness({"avg@4": 0.5, "loss": 2.0}) == 0.5


def test_an_unknown_monitor_is_named(tmp_path):
    message = r"checkpoint.monitor is 'acc'; the evaluation has \['avg@2', 'avg@2_low', "
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, IterationCheckpoint(monitor="acc"))


class FailsToSave(StandIn):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if self.iteration == 4:
            # Fails while the file is written: a lambda cannot be pickled.
            checkpoint["broken"] = lambda: None


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        fit(tmp_path, IterationCheckpoint(2, keep_best=0), module=FailsToSave(6))
    kept = [name for name in names(tmp_path) if not name.startswith(".")]
    assert kept == ["iteration=000002.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["iteration"] == 2


def test_what_a_killed_save_left_is_removed_at_the_next_start(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.iteration=000002.ckpt.tmp").write_text("half")
    fit(tmp_path, IterationCheckpoint(0, keep_best=0), module=StandIn(1))
    assert names(tmp_path) == ["iteration=000001.ckpt", "last.ckpt"]


def test_a_run_resumes_after_the_iteration_that_was_saved(tmp_path):
    scores = [0.1, 0.5, 0.4, 0.3]
    fit(tmp_path, IterationCheckpoint(3), module=StandIn(3, scores=scores), val_check_interval=2)
    last = tmp_path / "checkpoints/last.ckpt"
    checkpoint = IterationCheckpoint(3)
    module = StandIn(7, scores=[0.2, 0.2, 0.2])
    module = fit(tmp_path, checkpoint, module=module, resume=last, val_check_interval=2)
    assert module.iteration == 7
    assert module.trainer.global_step == 21
    # Validations after 4, 6 and 7; the best of the first run is still the best.
    assert module.evaluations == 3
    # (That of iteration 3 came after its file was written, and was not among the best.)
    assert checkpoint.scores == {2: 0.5, 4: 0.2, 6: 0.2, 7: 0.2}
    assert (tmp_path / "checkpoints/best.ckpt").readlink() == Path("iteration=000002.ckpt")


class Terminated(StandIn):
    """Asks its own process to stop, in a training step or in a validation after iteration 2."""

    def __init__(self, during: str):
        super().__init__(6)
        self.during = during

    def _terminate(self, here: str, iteration: int) -> None:
        if (self.during, self.iteration) == (here, iteration):
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch, batch_idx):
        self._terminate("training", 1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._terminate("validation", 2)
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("during", ["training", "validation"])
def test_a_run_that_is_told_to_stop_loses_no_iteration(tmp_path, during):
    with pytest.raises(SystemExit):
        fit(tmp_path, IterationCheckpoint(50), module=Terminated(during), val_check_interval=2)
    last = tmp_path / "checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["iteration"] == 2
    module = fit(
        tmp_path, IterationCheckpoint(50), module=StandIn(6), resume=last, val_check_interval=2
    )
    # The interrupted validation is left out, those after 4 and 6 are whole.
    assert (module.iteration, module.evaluations) == (6, 2)


def test_the_configuration_is_inside(tmp_path):
    fit(tmp_path, IterationCheckpoint(0), RunFolder("model: {a: 1}\n"), module=StandIn(1))
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert saved_config(last) == "model: {a: 1}\n"
    assert (tmp_path / "config.yaml").read_text().endswith("model: {a: 1}\n")
    with pytest.raises(ValueError, match="holds no configuration: it was not written by"):
        saved_config({"state_dict": {}})
