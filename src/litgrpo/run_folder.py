"""The run folder: its files, the configuration and versions that made them, and its lock."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning.pytorch import Callback, Trainer

from litgrpo import __version__
from litgrpo.arguments import require
from litgrpo.distributed.messages import rank_zero_info, warn_once_on_failure
from litgrpo.files import read_text, write_text
from litgrpo.text.program import program_name
from litgrpo.text.secrets import mask_known

CONFIG = "config.yaml"
HEADER = "# The whole configuration of this run, written by litgrpo.\n"
COMMAND = "# Started by: "
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
REST = "rest.pt"  # in a checkpoint that is a folder, of sharded weights
LAST, BEST = "last.ckpt", "best.ckpt"
LOCK = ".lock"
ROLLOUTS = "rollouts"
FINAL_MODEL, FINAL_ADAPTER = "final_model", "final_adapter"
NAME = re.compile(r"iteration=(\d+)\.ckpt")
# A run that failed before its first iteration leaves none of these.
RESULTS = (f"{CHECKPOINTS}/last.ckpt", "metrics.csv", "summary.json")
# Everything that a run writes.
RUN_FILES = (
    CONFIG,
    CHECKPOINTS,
    "evaluation",
    "events.out.tfevents.*",
    FINAL_ADAPTER,
    FINAL_MODEL,
    "hparams.yaml",
    "metrics.csv",
    "model-*",
    "non_finite",
    REPORT,
    ROLLOUTS,
    "samples",
    "summary.json",
)


class NotSaved(SystemExit):
    """The result of a run could not be written; the program prints the message and exits with 1."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}")


def check_is_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise before the files of two runs mix; with `overwrite` an earlier run may be set aside."""
    config, files = folder / CONFIG, find_run_files(folder)
    is_run = read_text(config).startswith(HEADER)
    if files and not is_run:
        raise ValueError(
            f"{folder} holds {files[0].name}, which was not written by litgrpo: choose another "
            "folder with --run_dir."
        )
    results = [name for name in RESULTS if (folder / name).exists()]
    if results and not overwrite:
        resume = ": resume it with --ckpt_path last,"
        if find_newest_checkpoint(folder) is None:
            resume = " without a checkpoint:"
        raise ValueError(
            f"{folder} already holds a run ({results[0]}){resume} choose another folder with "
            "--run_dir, or move it aside with --overwrite true."
        )


def check_links(folder: Path) -> None:
    """Reject links below a run folder that a run would write through, to files of other folders.

    The run folder may be a link. Those in `checkpoints/`, such as `last.ckpt`, are replaced, never
    written through.
    """
    names = (*RUN_FILES, LOCK)
    paths = [path for path in _list(folder) if any(path.match(name) for name in names)]
    # Files of these are written in place; others get their names when they are complete.
    for name in (FINAL_MODEL, FINAL_ADAPTER):
        paths += _list(folder / name)
    for path in paths:
        require(
            not path.is_symlink(),
            f"{path} is a link to {os.path.realpath(path)}, and a run writes through no link below "
            "its folder: remove it, or choose another folder with --run_dir.",
        )


def _list(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def set_aside(folder: Path, files: Sequence[Path]) -> None:
    """Move the files of an earlier run to a new folder beside its own, such as `NAME.1`."""
    number = next(n for n in count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    aside.mkdir()
    for path in files:
        path.rename(aside / path.name)
    rank_zero_info(f"Overwriting: moved the earlier run to {aside}")


def claim_folder(folder: Path, config: str) -> None:
    """Write the configuration, unless the folder holds the results of a run to be replaced."""
    if not earlier_files(folder):
        write_config(folder, config)


def write_config(folder: Path, config: str) -> None:
    """Write the configuration of a run, by which `check_is_free` recognizes its folder."""
    try:
        write_text(folder / CONFIG, HEADER + command_comment() + config)
    except OSError as error:
        raise ValueError(
            f"run_dir is {folder}, to which {CONFIG} cannot be written ({error.strerror}): free "
            "space, or choose another folder with --run_dir."
        ) from error


def command_comment() -> str:
    """A YAML comment with the command line of a fit as it was typed; empty without one."""
    typed = sys.orig_argv
    if "fit" not in typed or sys.argv[1:2] != ["fit"]:
        return ""
    words = mask_known(shlex.join(typed[typed.index("fit") :]).replace("\n", " "))
    return f"{COMMAND}{program_name()} {words}\n"


def find_run_files(folder: Path) -> list[Path]:
    """Files and folders with names that a run uses."""
    return [path for name in RUN_FILES for path in folder.glob(name)]


def earlier_files(folder: Path) -> list[Path]:
    """Everything in a folder that holds results of a run; [] without any."""
    if not any((folder / name).exists() for name in RESULTS):
        return []
    return [path for path in folder.iterdir() if path.name != LOCK]


@contextmanager
def lock_run_folder(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Keep every other training out of a run folder.

    The kernel holds the lock and releases it when the process exits, even after SIGKILL; forks do
    not inherit it. At the end the lock file is removed, and the folder if nothing was written. A
    lock that another training holds is waited for, `patience_s` long, before the ValueError.
    """
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    lock = FileLock(folder / LOCK, timeout=patience_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another training is running in {folder}: wait for its end, or choose another folder "
            "with --run_dir ({seed} in its name is replaced by the seed)."
        ) from error
    except OSError as error:
        _remove_empty(new)
        raise ValueError(
            f"run_dir is {folder}, which is not writable ({error.strerror}): choose another "
            "folder with --run_dir."
        ) from error
    try:
        yield
    finally:
        # Before the release: a process that opened the file meanwhile sees that it lost its name.
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        _remove_empty(new)


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, inner ones first."""
    with suppress(OSError):  # not empty: something was written
        for folder in folders:
            folder.rmdir()


ADVICE = "omit --ckpt_path to start a new run, or pass a .ckpt file or a run folder"


def resolve_checkpoint(name: str, folder: Path | None = None, advice: str = ADVICE) -> Path:
    """Find the file of a checkpoint: `last` or `best` of a run folder, or a file.

    Of a run folder as `name`, it is the last one. A FileNotFoundError ends with the advice.
    """
    path = Path(name)
    if folder is not None and name == "last":
        path = _last_of(folder)
    elif folder is not None and name == "best":
        path = checkpoint_folder(folder) / BEST
        advice = f"it is linked after an evaluation, which needs a `val` of the data; {advice}"
    elif path.is_dir() and not (path / REST).exists():
        require(
            checkpoint_folder(path).is_dir() or not (path / "config.json").is_file(),
            f"{path} is a model, not a checkpoint: pass it as --model.pretrained {path}, without "
            "--ckpt_path.",
        )
        path = _last_of(path)
    if not path.exists():
        raise FileNotFoundError(f"ckpt_path: {path} does not exist: {advice}.")
    return path


def _last_of(folder: Path) -> Path:
    """Return the newest checkpoint of a run, by its link, or the name that it would have."""
    link = checkpoint_folder(folder) / LAST
    return link if link.exists() else find_newest_checkpoint(folder) or link


def checkpoint_folder(folder: str | Path) -> Path:
    """Folder of a run's checkpoints."""
    return Path(folder) / CHECKPOINTS


def sort_checkpoints(folder: Path) -> dict[int, Path]:
    """{iteration: checkpoint} of a folder, the newest first.

    Newest is the one that `last.ckpt` links to. Those of later iterations come last: they were left
    behind by a run that resumed from an older checkpoint. Times of files do not count: they change
    when files are copied or the clock is set.
    """
    matches = [(NAME.fullmatch(path.name), path) for path in folder.glob("*.ckpt")]
    numbered = {int(name[1]): path for name, path in matches if name}
    newest = NAME.fullmatch(_name_of_link(folder / LAST))
    newest_number = int(newest[1]) if newest else max(numbered, default=0)
    order = sorted(numbered, key=lambda number: (number <= newest_number, number), reverse=True)
    return {number: numbered[number] for number in order}


def _name_of_link(link: Path) -> str:
    """Return the name of the file that a link leads to; `resolve` raises for a cycle of links."""
    return os.path.basename(os.path.realpath(link))


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run that was saved last, verified or not; None if there is none.

    The one that `last.ckpt` links to, or `last.ckpt` if the link was copied as a file.
    """
    checkpoints = checkpoint_folder(folder)
    link = checkpoints / LAST
    if link.exists():
        target = checkpoints / _name_of_link(link)
        return target if target.exists() else link
    return next(iter(sort_checkpoints(checkpoints).values()), None)


def run_folder(trainer: Trainer) -> Path:
    """The folder that a run writes to."""
    return Path(trainer.default_root_dir)


def writes_files(trainer: Any) -> bool:
    """Return True on rank 0, which writes the files; in a `fast_dev_run` no rank does."""
    return bool(trainer.is_global_zero and not trainer.fast_dev_run)


def versions() -> dict[str, str]:
    """Versions of Python, litgrpo and the libraries that determine the numbers of a run."""
    packages = {name: metadata.version(name) for name in ("torch", "lightning", "transformers")}
    return {"python": platform.python_version(), "litgrpo": __version__, **packages}


class RunFolder(Callback):
    """Writes the configuration to the run folder and into every checkpoint.

    A resumed run writes it after its checkpoint was accepted; until then the folder keeps the
    configuration of the run that wrote the checkpoints.
    """

    # The `replaced` files of an earlier run are set aside after the model was loaded, the data were
    # read and the start-up checks passed.

    def __init__(self, config: str, replaced: Sequence[Path] = ()) -> None:
        self.config = config
        self.replaced = replaced

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        # The evaluation before training writes the first files.
        if self.replaced and writes_files(trainer):
            set_aside(run_folder(trainer), self.replaced)
            write_config(run_folder(trainer), self.config)
        self.replaced = ()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # Checkpoint and settings have been accepted.
        self.on_sanity_check_start(trainer, pl_module)  # not called without validation
        self._write_config(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        # Somebody may have removed the run folder.
        if not (run_folder(trainer) / CONFIG).exists():
            self._write_config(trainer)

    def _write_config(self, trainer: Trainer) -> None:
        if writes_files(trainer):
            with warn_once_on_failure(f"writing {CONFIG}"):
                write_config(run_folder(trainer), self.config)

    def state_dict(self) -> dict[str, Any]:
        # Plain text, so that checkpoints load with `weights_only`.
        return {"config": self.config}
