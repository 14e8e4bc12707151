"""One folder per run: who may write into it, and the configuration that made it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

CONFIG = "config.yaml"
HEADER = "# The whole configuration of this run, written by litgrpo.\n"
CHECKPOINTS = "checkpoints"
TRAINING_STATE = "training_state.ckpt"  # beside the policy in checkpoint-100/
LAST, BEST = "last.ckpt", "best.ckpt"
NAME = re.compile(r"iteration=(\d+)\.ckpt")
# What shows that a run got somewhere; one that failed before its first iteration leaves none.
RESULTS = (f"{CHECKPOINTS}/last.ckpt", "metrics.csv", "summary.json")
# Everything that a run writes.
WRITTEN = (
    CONFIG,
    CHECKPOINTS,
    "events.out.tfevents.*",
    "checkpoint-*",
    "final_model",
    "hparams.yaml",
    "metrics.csv",
    "non_finite",
    "samples",
    "summary.json",
)


def refuse_if_taken(folder: Path, *, overwrite: bool = False) -> None:
    """Stop before two runs mix, or before anything else is deleted.

    Args:
        folder: where everything of a new run shall go.
        overwrite: whether an earlier run may be deleted.

    Raises:
        ValueError: the folder holds the results of another run, or files that look like a run's but
            are somebody else's.
    """
    config, found = folder / CONFIG, _written(folder)
    ours = config.exists() and config.read_text(encoding="utf-8").startswith(HEADER)
    if found and not ours:
        raise ValueError(
            f"{folder} holds {found[0].name}, which no run of this program wrote: choose another "
            "folder with --run_dir."
        )
    results = [name for name in RESULTS if (folder / name).exists()]
    if results and not overwrite:
        raise ValueError(
            f"{folder} already holds a run ({results[0]}): continue it with --ckpt_path last, "
            "choose another folder with --run_dir, or replace it with --overwrite true."
        )


def begin(folder: Path, config: str) -> None:
    """Delete what an earlier run wrote, and nothing else; write the configuration.

    Args:
        folder: the run folder, after `refuse_if_taken`.
        config: the configuration as YAML text.
    """
    for path in _written(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    write_config(folder, config)


def write_config(folder: Path, config: str) -> None:
    """Write the configuration of a run to its folder; it marks the folder as ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(HEADER + config, encoding="utf-8")


def _written(folder: Path) -> list[Path]:
    return [path for name in WRITTEN for path in folder.glob(name)]


def checkpoint_file(given: str, folder: Path | None = None) -> Path:
    """The file behind what a user calls a checkpoint.

    Args:
        given: `last`, `best`, a file, a folder such as `checkpoint-100`, or a run folder, of which
            the last checkpoint is taken.
        folder: the run folder in which `last` and `best` are looked up.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(given)
    if folder is not None and given in ("last", "best"):
        path = checkpoints_of(folder) / f"{given}.ckpt"
    elif checkpoints_of(path).is_dir():
        path = checkpoints_of(path) / LAST
    elif path.is_dir():
        path = path / TRAINING_STATE
    if not path.exists():
        raise FileNotFoundError(
            f"There is no checkpoint {path}: leave --ckpt_path out to start anew, or give it "
            "a .ckpt file or a run folder."
        )
    return path


def checkpoints_of(folder: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(folder) / CHECKPOINTS


def by_age(folder: Path) -> dict[int, Path]:
    """The numbered checkpoints in a folder, the newest first.

    By time, not by number: a run may resume from an older checkpoint.
    """
    named = [(NAME.fullmatch(path.name), path) for path in folder.glob("*.ckpt")]
    found = [(int(name[1]), path) for name, path in named if name]
    found.sort(key=lambda each: (each[1].stat().st_mtime_ns, each[0]), reverse=True)
    return dict(found)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run that was written last, whether it is good or not, if there is one."""
    return next(iter(by_age(checkpoints_of(folder)).values()), None)


def run_folder(trainer: Trainer) -> Path:
    """The folder that a run writes to."""
    return Path(trainer.default_root_dir)


def may_write(trainer: Any) -> bool:
    """Whether files are written here: by the first process, and not in a rehearsal."""
    return bool(trainer.is_global_zero and not trainer.fast_dev_run)


def saved_config(checkpoint: dict[str, Any]) -> str:
    """The configuration (YAML) that a loaded checkpoint was made with.

    Raises:
        ValueError: the checkpoint was not written by `cli.py`.
    """
    state = checkpoint.get("callbacks", {}).get(RunFolder.__qualname__)
    if state is None:
        raise ValueError("This checkpoint holds no configuration: it was not written by cli.py.")
    return str(state["config"])


class RunFolder(Callback):
    """Writes the configuration to the run folder and into every checkpoint.

    Args:
        config: the resolved configuration as YAML text.
    """

    def __init__(self, config: str) -> None:
        """Hold the text."""
        self.config = config

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Write `config.yaml` before anything else can fail."""
        if stage == "fit" and may_write(trainer):
            write_config(run_folder(trainer), self.config)

    def state_dict(self) -> dict[str, Any]:
        """The configuration as plain text, so that checkpoints load with `weights_only`."""
        return {"config": self.config}
