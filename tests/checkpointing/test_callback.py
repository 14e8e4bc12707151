import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from litgrpo.checkpointing import io as checkpoint_io
from litgrpo.checkpointing.callback import IterationCheckpoint, best_iterations, score_report
from litgrpo.checkpointing.resume import RngState
from litgrpo.run_folder import (
    LAST,
    RunFolder,
    find_newest_checkpoint,
    resolve_checkpoint,
    sort_checkpoints,
)
from litgrpo.tensor_files import DamagedCheckpoint, read_file
from tests.support.checkpoints import digest_parts
from tests.support.fitting import fit
from tests.support.raises import raises_for
from tests.support.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def names(folder: Path) -> list[str]:
    """Names of the checkpoints and links, and of unfinished files."""
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


def test_the_smallest_loss_is_best(tmp_path):
    checkpoint = IterationCheckpoint()
    assert score_report({"loss": 2.0}, checkpoint.monitor, checkpoint.mode) == [-2.0]
    assert score_report({"avg@4": 0.0, "reward": 0.7}, None, None) == [0.0, 0.7]
    # Without a scored completion the first number is no accuracy.
    assert score_report({"unscored_frac": 1.0, "len_mean": 9.0}, None, None) == []
    partly = {"easy/unscored_frac": 1.0, "hard/avg@4": 0.25, "hard/unscored_frac": 0.0}
    assert score_report(partly, None, None) == [0.25]
    assert best_iterations({10: [0.0], 20: []}, 1) == [10]
    sets = {"easy/avg@4": 0.5, "easy/reward": 0.75, "hard/avg@4": 0.25, "hard/reward": 0.25}
    assert score_report(sets, None, None) == [0.375, 0.5]
    assert score_report(sets, "hard/reward", None) == [0.25]
    assert score_report({"avg@4": 0.5, "loss": 2.0}, checkpoint.monitor, checkpoint.mode) == [0.5]


def test_an_unknown_monitor_is_named(tmp_path):
    with raises_for("checkpoint.monitor", "acc", "avg@2"):
        fit(tmp_path, IterationCheckpoint(monitor="acc"))


class FailsToSave(StandIn):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        if self.iteration >= 4:
            # Fails before the file is written: no later run could load it.
            checkpoint["broken"] = lambda: None


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path):
    with (
        raises_for("function", error=TypeError),
        pytest.warns(UserWarning, match="checkpoint not saved"),  # of iteration 6
    ):
        fit(tmp_path, IterationCheckpoint(2, keep_best=0), module=FailsToSave(6))
    kept = [name for name in names(tmp_path) if not name.startswith(".")]
    assert kept == ["iteration=000002.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["iteration"] == 2


def test_incomplete_files_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.iteration=000002.ckpt.tmp").write_text("half")
    fit(tmp_path, IterationCheckpoint(0, keep_best=0), module=StandIn(1))
    assert names(tmp_path) == ["iteration=000001.ckpt", "last.ckpt"]


AGES = {
    "as written": lambda n: 1e9 + n,
    "copied in another order": lambda n: 1e9 - n,
    "all at once": lambda n: 1e9,
    "in the future": lambda n: 4e9 - n,
}


def set_times(folder, age):
    for path in folder.glob("iteration=*.ckpt"):
        seconds = age(int(path.stem.partition("=")[2]))
        os.utime(path, (seconds, seconds))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that was resumed from an older checkpoint: 5 is not the newest any more."""
    run = tmp_path_factory.mktemp("resumed")
    fit(run, IterationCheckpoint(1, keep_last=3, keep_best=0), module=StandIn(5))
    older = run / "checkpoints" / "iteration=000003.ckpt"
    fit(run, IterationCheckpoint(1, keep_last=3, keep_best=0), module=StandIn(4), resume=older)
    return run


@pytest.mark.parametrize("link", ["kept", "missing", "dangling", "a copy"])
def test_the_newest_is_what_was_last_saved_whatever_the_times_of_files_are(resumed, tmp_path, link):
    copy = Path(shutil.copytree(resumed, tmp_path / "copy", symlinks=link != "a copy"))
    last = copy / "checkpoints" / LAST
    if link in ("missing", "dangling"):
        last.unlink()
    if link == "dangling":
        last.symlink_to("iteration=000009.ckpt")
    # Without the link, the one of the latest iteration counts.
    newest = 5 if link in ("missing", "dangling") else 4
    for age in AGES.values():
        set_times(copy / "checkpoints", age)
        order = list(sort_checkpoints(copy / "checkpoints"))
        assert order == ([4, 3, 5] if link == "kept" else [5, 4, 3])
        for source in (resolve_checkpoint("last", copy), find_newest_checkpoint(copy)):
            assert torch.load(source, weights_only=True)["iteration"] == newest
    checkpoint = IterationCheckpoint(1, keep_last=2, keep_best=0)
    fit(copy, checkpoint, module=StandIn(6), resume=resolve_checkpoint("last", copy))
    assert names(copy) == ["iteration=000005.ckpt", "iteration=000006.ckpt", "last.ckpt"]
    assert last.readlink() == Path("iteration=000006.ckpt")


@pytest.mark.parametrize("target", [LAST, "nowhere", "/etc/passwd", "/dev/zero"])
def test_links_that_lead_to_no_checkpoint_do_not_matter(tmp_path, target):
    fit(tmp_path, IterationCheckpoint(1, keep_last=3, keep_best=0), module=StandIn(3))
    folder = tmp_path / "checkpoints"
    (folder / LAST).unlink()
    (folder / LAST).symlink_to(target)
    assert list(sort_checkpoints(folder)) == [3, 2, 1]
    with suppress(DamagedCheckpoint):  # a link to another file is read, and rejected
        assert read_file(find_newest_checkpoint(tmp_path))["iteration"] == 3


def test_the_file_just_written_is_never_removed(tmp_path):
    fit(tmp_path, IterationCheckpoint(1, keep_last=2, keep_best=0), module=StandIn(2))
    folder = tmp_path / "checkpoints"
    for n in (900, 901, 902):  # copied here
        shutil.copy(folder / LAST, folder / f"iteration=000{n}.ckpt")
    checkpoint = IterationCheckpoint(1, keep_last=1, keep_best=0)
    fit(tmp_path, checkpoint, module=StandIn(4), resume=folder / LAST)
    assert names(tmp_path) == ["iteration=000004.ckpt", "last.ckpt"]


def test_a_file_system_without_links_resumes_by_the_numbers(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    fit(tmp_path, IterationCheckpoint(1, keep_last=2, keep_best=0), module=StandIn(3))
    assert names(tmp_path) == ["iteration=000002.ckpt", "iteration=000003.ckpt"]
    last = resolve_checkpoint("last", tmp_path)
    assert last.name == "iteration=000003.ckpt"


def test_a_disk_that_holds_no_weights_is_rejected_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with raises_for("checkpoints", "MiB", "--run_dir"):
        fit(tmp_path, IterationCheckpoint(1))


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
    assert checkpoint.scores == {2: [0.5], 3: [0.4], 4: [0.2], 6: [0.2], 7: [0.2]}
    assert (tmp_path / "checkpoints/best.ckpt").readlink() == Path("iteration=000002.ckpt")


class Signalled(StandIn):
    """Asks its own process to stop: in a rollout, in an update, or in a validation."""

    at = 1  # iteration of a signal in a rollout

    def __init__(self, during: str, signum: int = 15, times: int = 1):
        super().__init__(6)
        self.during, self.signum, self.times = during, signum, times

    def _here(self, here: str, iteration: int) -> None:
        if (self.during, self.iteration) == (here, iteration):
            times, self.times = self.times, 0
            for _ in range(times):
                os.kill(os.getpid(), self.signum)

    def training_step(self, batch, batch_idx):
        self._here("rollout", self.at)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self._here("update", 1)

    def validation_step(self, batch, batch_idx):
        self._here("validation", 2)
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("during", "saved", "signum", "code"),
    [("rollout", 1, 15, 143), ("update", 2, 2, 130), ("validation", 2, 1, 129)],
)
def test_a_signal_drops_or_finishes_the_iteration(tmp_path, during, saved, signum, code):
    with pytest.raises(SystemExit) as stop:
        fit(
            tmp_path,
            IterationCheckpoint(50),
            module=Signalled(during, signum),
            val_check_interval=2,
        )
    assert stop.value.code == code
    last = tmp_path / "checkpoints/last.ckpt"
    assert torch.load(last, weights_only=True)["iteration"] == saved
    module = fit(
        tmp_path, IterationCheckpoint(50), module=StandIn(6), resume=last, val_check_interval=2
    )
    # The validations after 2, 4 and 6; an interrupted one is repeated as a whole.
    assert (module.iteration, module.evaluations) == (6, 3)


class DrawsInValidation(Signalled):
    """Its validation draws a random number, as a reward may; the next rollout is dropped."""

    at = 2

    def validation_step(self, batch, batch_idx):
        torch.rand(1)
        self.after = torch.get_rng_state()
        return super().validation_step(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        torch.rand(1)
        return super().training_step(batch, batch_idx)


def test_a_dropped_iteration_leaves_the_random_state_of_the_validation_before_it(tmp_path):
    module = DrawsInValidation("rollout")
    with pytest.raises(SystemExit):
        fit(tmp_path, IterationCheckpoint(50), module=module, val_check_interval=2)
    assert torch.equal(torch.get_rng_state(), module.after)


@pytest.mark.parametrize(
    ("weights_only", "hint"),
    [(False, "resume with `--ckpt_path last`"), (True, "a run cannot resume from them")],
)
def test_a_stopped_run_tells_whether_it_can_be_resumed(tmp_path, caplog, weights_only, hint):
    caplog.set_level("INFO")
    checkpoint = IterationCheckpoint(50, save_weights_only=weights_only)
    with pytest.raises(SystemExit):
        fit(tmp_path, checkpoint, module=Signalled("update"))
    (line,) = [line for line in caplog.messages if line.startswith("Stopped after iteration 2: ")]
    assert hint in line


def test_a_second_signal_exits_at_once(tmp_path):
    if (child := os.fork()) == 0:
        fit(tmp_path, IterationCheckpoint(50), module=Signalled("update", times=2))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert not (tmp_path / "checkpoints/last.ckpt").exists()


def test_training_continues_while_a_file_is_written(tmp_path, monkeypatch):
    done = []
    release = threading.Event()
    inner = checkpoint_io.write_file

    def slow(checkpoint, path):
        release.wait(30)
        inner(checkpoint, path)

    monkeypatch.setattr(checkpoint_io, "write_file", slow)

    class Watched(StandIn):
        def on_train_batch_end(self, *_):
            done.append(self.iteration)
            if self.iteration == 3:
                release.set()  # the file of iteration 2 is written only now

    fit(tmp_path, IterationCheckpoint(2, keep_best=0), module=Watched(4))
    assert done == [1, 2, 3, 4]
    saved = torch.load(tmp_path / "checkpoints/iteration=000002.ckpt", weights_only=True)
    assert (saved["iteration"], saved["global_step"]) == (2, 6)


def test_size_and_time_of_a_save_are_logged(tmp_path):
    started = time.perf_counter()
    module = fit(tmp_path, IterationCheckpoint(1), module=StandIn(9))
    elapsed = time.perf_counter() - started
    logged = {k: float(v) for k, v in module.trainer.logged_metrics.items() if "checkpoint" in k}
    size = (tmp_path / "checkpoints/last.ckpt").stat().st_size / 2**20
    assert logged["checkpoint/size_mib"] == pytest.approx(size, rel=0.01)
    assert 0 < logged["checkpoint/wait_s"] <= elapsed
    assert 0 < logged["checkpoint/write_s"] <= elapsed


def test_the_configuration_is_inside(tmp_path):
    fit(tmp_path, IterationCheckpoint(0), RunFolder("model: {a: 1}\n"), module=StandIn(1))
    last = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert last["callbacks"]["RunFolder"]["config"] == "model: {a: 1}\n"
    assert (tmp_path / "config.yaml").read_text().endswith("model: {a: 1}\n")


def test_of_equal_scores_the_later_iteration_is_best():
    assert best_iterations({10: [0.5], 20: [0.5], 30: [0.4]}, 2) == [20, 10]
    assert best_iterations({20: [0.5], 10: [0.5]}, 1) == [20]


class LosesItsFolder(StandIn):
    """The folder of its checkpoints cannot be written to while iterations 2 and 3 are saved."""

    folder = Path()

    def training_step(self, batch, batch_idx):
        folder, aside = self.folder / "checkpoints", self.folder / "aside"
        pending = self.trainer.strategy.checkpoint_io
        if self.iteration == 1:
            pending.wait()
            folder.rename(aside)
            folder.write_text("not a folder")
        result = super().training_step(batch, batch_idx)
        if self.iteration == 4:
            with suppress(OSError):  # of iteration 3
                pending.wait()
            folder.unlink()
            aside.rename(folder)
        return result


def test_a_write_that_failed_is_logged_and_a_later_one_succeeds(tmp_path):
    module = LosesItsFolder(5)
    module.folder = tmp_path
    with pytest.warns(UserWarning, match="checkpoint not saved: .*; training continues"):
        fit(tmp_path, IterationCheckpoint(1, keep_last=9, keep_best=0), module=module)
    assert module.iteration == 5
    saved = [name for name in names(tmp_path) if name.startswith("iteration")]
    assert saved == [f"iteration=00000{number}.ckpt" for number in (1, 4, 5)]


class Draws(Signalled):
    """Draws random numbers in iterations and in validations."""

    def training_step(self, batch, batch_idx):
        torch.rand(3)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        torch.rand(2)
        return super().validation_step(batch, batch_idx)


def test_an_iteration_dropped_after_a_validation_saves_the_random_state_after_it(tmp_path):
    states = []
    for name, every, module in (("whole", 2, Draws("never")), ("stopped", 50, Draws("rollout"))):
        torch.manual_seed(0)
        module.at = 2
        folder = tmp_path / name
        with suppress(SystemExit):
            callbacks = RngState(), IterationCheckpoint(every, keep_last=9)
            fit(folder, *callbacks, module=module, val_check_interval=2)
        path = folder / "checkpoints/iteration=000002.ckpt"
        states.append(digest_parts(path)["random_state"])
    assert states[0] == states[1]


def test_the_mean_reward_breaks_ties():
    scores = {10: [0.0, 0.2], 20: [0.0, 0.9], 30: [0.0, 0.4]}
    assert best_iterations(scores, 2) == [20, 30]
    assert best_iterations(scores | {40: [0.25, 0.1]}, 1) == [40]  # a success counts first


def test_the_file_that_is_due_is_written_if_the_next_prompts_cannot_be_read(tmp_path):
    class Fails(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if pl_module.iteration == 3:
                raise OSError("no row")

    with raises_for("no row", error=OSError):
        fit(tmp_path, Fails(), IterationCheckpoint(1), module=StandIn(5))
    assert find_newest_checkpoint(tmp_path).name == "iteration=000003.ckpt"


class FailsAt(Signalled):
    """Raises where `Signalled` sends a signal."""

    def _here(self, here: str, iteration: int) -> None:
        if (self.during, self.iteration) == (here, iteration):
            raise ArithmeticError("a bug in a reward")


@pytest.mark.parametrize(
    ("during", "at", "saved"),
    [("rollout", 3, 3), ("validation", 2, 2), ("update", 1, None), ("rollout", 0, None)],
)
def test_an_error_before_the_optimizer_step_saves_the_iteration_before(
    tmp_path, during, at, saved, caplog
):
    caplog.set_level("INFO")
    module = FailsAt(during)
    module.at = at
    with raises_for("a bug in a reward", error=ArithmeticError):
        fit(tmp_path, IterationCheckpoint(50), module=module, val_check_interval=2)
    newest = find_newest_checkpoint(tmp_path)
    assert (newest and torch.load(newest, weights_only=True)["iteration"]) == saved
    is_logged = f"Saved the state after iteration {saved}." in caplog.messages
    assert is_logged == (saved is not None)


def test_a_failed_save_does_not_hide_the_error_that_ended_the_run(tmp_path):
    module = FailsAt("rollout")
    (tmp_path / "checkpoints").write_text("not a folder")
    with (
        raises_for("a bug in a reward", error=ArithmeticError),
        pytest.warns(UserWarning, match="checkpoint not saved"),
    ):
        fit(tmp_path, IterationCheckpoint(50, keep_best=0), module=module)
