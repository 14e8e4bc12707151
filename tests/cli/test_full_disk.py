"""A full disk costs the file that does not fit, and nothing else."""

import builtins
import errno
import io
import os
import shutil
import subprocess
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import pytest
from lightning.pytorch import Callback

pytestmark = pytest.mark.filterwarnings("ignore")
FIT = ("fit", "-c", "recipe.yaml", "--export.every_n_iterations", "2")
RUN = Path("runs/recipe")
# Files that a run writes beside its checkpoints: a pattern below the run folder.
FILES = (
    "metrics.csv",
    "events.out.tfevents.*",
    "hparams.yaml",
    "samples/*",
    "evaluation/*",
    "summary.json",
    "report.html",
    "checkpoints/complete.json",
    "model-*/*",
)
LIBRARIES = ("events.out.tfevents.*", "hparams.yaml")  # whose writers leave a part
RESULTS = ("checkpoints/last.ckpt", "checkpoints/iteration=000004.ckpt", "final_model/config.json")


def fill(monkeypatch, *patterns: str, where: str = "open") -> list[str]:
    """Fail to write files of the run folder that match a pattern; return the names of failures."""
    failed: list[str] = []
    opened = builtins.open

    def matches(path: object) -> bool:
        name = os.path.abspath(os.fsdecode(path)).removeprefix(os.path.abspath(RUN) + "/")
        plain = "/".join(part.removeprefix(".").removesuffix(".tmp") for part in name.split("/"))
        return any(fnmatch(plain, pattern) for pattern in patterns)

    class Full(io.FileIO):
        """Takes a part of what is written, as a disk does."""

        def write(self, data):
            super().write(bytes(data)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_limited(file, mode="r", *args, **kwargs):
        writes = any(letter in mode for letter in "wax+")
        if isinstance(file, int) or not writes or not matches(file):
            return opened(file, mode, *args, **kwargs)
        failed.append(str(file))
        if where == "open":
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        binary = io.BufferedWriter(Full(file, mode.replace("b", "").replace("t", "")))
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    monkeypatch.setattr("builtins.open", open_limited)
    monkeypatch.setattr("io.open", open_limited)
    return failed


@pytest.mark.parametrize(
    ("where", "lost"),
    [*(("write", (pattern,)) for pattern in FILES), ("open", FILES)],
    ids=[*FILES, "nothing can be opened"],
)
def test_a_file_that_does_not_fit_is_the_only_loss(cli, monkeypatch, where, lost, recwarn):
    with monkeypatch.context() as full:
        failed = fill(full, *lost, where=where)
        assert cli(*FIT)[0] == 0
    assert failed
    written = {str(path.relative_to(RUN)) for path in RUN.rglob("*") if path.is_file()}
    assert written >= {*RESULTS, "config.yaml"}
    others = [each for each in FILES if each not in lost and not {each, *lost} <= {*LIBRARIES}]
    missing = [each for each in others if not any(fnmatch(name, each) for name in written)]
    # Folders that transformers would load get their names when they are complete.
    assert missing == []
    assert not [name for name in written if ".tmp" in name]
    gone = [each for each in lost if where == "open" or each not in LIBRARIES]
    assert not [name for name in written for pattern in gone if fnmatch(name, pattern)]
    warnings = [str(each.message) for each in recwarn if "training continues" in str(each.message)]
    assert len(warnings) <= len(lost), "\n".join(warnings)
    # With free space, the same command writes what is missing.
    assert cli(*FIT, "--ckpt_path", "last", "--model.max_iterations", "6")[0] == 0
    written = {str(path.relative_to(RUN)) for path in RUN.rglob("*")}
    assert "checkpoints/iteration=000006.ckpt" in written
    assert all(any(fnmatch(name, pattern) for name in written) for pattern in lost)


def test_a_start_on_a_full_disk_leaves_nothing_and_can_be_repeated(cli, monkeypatch):
    for where in ("open", "write"):
        with monkeypatch.context() as full:
            assert fill(full, "config.yaml", where=where) == []
            code, _, err = cli(*FIT)
        assert (code, err.count("\n")) == (2, 1)
        assert "config.yaml" in err
        assert "--run_dir" in err
        assert not Path("runs").exists()
    assert cli(*FIT)[0] == 0


def test_a_config_that_cannot_be_replaced_keeps_the_run(cli, monkeypatch, finished_run):
    before = (RUN / "config.yaml").read_text()
    with monkeypatch.context() as full:
        fill(full, "config.yaml")
        assert cli(*FIT, "--ckpt_path", "last", "--model.max_iterations", "6")[0] == 0
    assert (RUN / "config.yaml").read_text() == before
    assert (RUN / "checkpoints/iteration=000006.ckpt").exists()


def test_predictions_that_do_not_fit_are_an_error_after_the_last_one(
    cli, monkeypatch, finished_run
):
    predict = ("predict", "-c", "recipe.yaml", "--ckpt_path", "last")
    for where in ("open", "write"):
        with monkeypatch.context() as full:
            fill(full, "predictions.jsonl", where=where)
            code, out, err = cli(*predict)
        assert "predictions" in str(err) + str(code)
        assert code != 0
        if where == "write":
            assert "answer" in out
    assert cli(*predict)[0] == 0
    assert (RUN / "predictions.jsonl").read_text().count("\n") > 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MiB, if this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m,nr_inodes=60", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_up(folder: Path) -> Path:
    with suppress(OSError), (folder / "filler").open("wb") as file:
        while True:
            file.write(b"0" * 4096)
            file.flush()
    return folder / "filler"


def use_up_inodes(folder: Path) -> None:
    with suppress(OSError):
        for n in range(1000):
            (folder / f"file-{n}").touch()


def test_a_start_with_no_bytes_or_no_inodes_leaves_nothing(cli, small_disk):
    words = (*FIT, "--run_dir", str(small_disk / "deep" / "run"))
    filler = fill_up(small_disk)
    code, _, err = cli(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert not (small_disk / "deep").exists()
    filler.unlink()
    use_up_inodes(small_disk)
    code, _, err = cli(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert not (small_disk / "deep").exists()
    for path in small_disk.iterdir():
        path.unlink()
    assert cli(*words)[0] == 0


def test_a_run_folder_that_disappears_is_written_anew(cli):
    words = ("--model.max_iterations", "8", "--checkpoint.every_n_iterations", "2")
    removal = '[{"class_path": "tests.cli.test_full_disk.Removal"}]'
    code, _, err = cli(*FIT, *words, "--trainer.callbacks", removal)
    assert code == 0
    assert "Traceback" not in err
    written = {str(path.relative_to(RUN)) for path in RUN.rglob("*") if path.is_file()}
    assert written >= {*RESULTS[2:], "config.yaml", "summary.json", "report.html", "metrics.csv"}
    assert "checkpoints/iteration=000008.ckpt" in written
    steps = [line.split(",")[0] for line in (RUN / "metrics.csv").read_text().splitlines()]
    assert steps[0] == "step"
    assert steps[-1] == "8"
    assert list(RUN.glob("events.out.tfevents.*"))
    assert cli(*FIT, "--ckpt_path", "last", "--model.max_iterations", "9")[0] == 0


class Removal(Callback):
    """Removes the run folder in the middle of the run."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        # A checkpoint may be written meanwhile.
        while pl_module.iteration == 4 and Path(trainer.default_root_dir).exists():
            shutil.rmtree(trainer.default_root_dir, ignore_errors=True)
