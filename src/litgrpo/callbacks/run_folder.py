"""One folder per run: what it holds, and the configuration and versions that made it."""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo import __version__
from litgrpo.arguments import require

CONFIG = "config.yaml"
HEADER = "# The whole configuration of this run, written by litgrpo.\n"
COMMAND = "# Started by: "
REPORT = "report.html"
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
    "evaluation",
    "events.out.tfevents.*",
    "checkpoint-*",
    "final_model",
    "hparams.yaml",
    "metrics.csv",
    "non_finite",
    REPORT,
    "samples",
    "summary.json",
)


class NotSaved(SystemExit):
    """What the run came to could not be written; the program ends with this line and code 1.

    Args:
        message: what, why, and what is left.
    """

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}")


def refuse_if_taken(folder: Path, *, overwrite: bool = False) -> None:
    """Stop before two runs mix, or before anything else is deleted.

    Args:
        folder: where everything of a new run shall go.
        overwrite: whether an earlier run may be deleted.

    Raises:
        ValueError: the folder holds the results of another run, or files that look like a run's but
            are somebody else's.
    """
    config, found = folder / CONFIG, written(folder)
    ours = config.exists() and config.read_text(encoding="utf-8").startswith(HEADER)
    first = next((path.name for path in found), "")
    require(
        ours or not first,
        f"{folder} holds {first}, which no run of this program wrote: choose another folder with "
        "--run_dir.",
    )
    result = next((name for name in RESULTS if (folder / name).exists()), "")
    require(
        overwrite or not result,
        f"{folder} already holds a run ({result}): continue it with --ckpt_path last, choose "
        "another folder with --run_dir, or replace it with --overwrite true.",
    )


def delete(paths: Sequence[Path]) -> None:
    """Delete what an earlier run wrote, see `written`; what is gone already is passed over."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def mark(folder: Path, config: str) -> None:
    """Write the configuration, unless the folder holds the results of a run that it would replace.

    Args:
        folder: the run folder, after `refuse_if_taken`.
        config: the configuration as YAML text.
    """
    if not any((folder / name).exists() for name in RESULTS):
        write_config(folder, config)


def write_config(folder: Path, config: str) -> None:
    """Write the configuration of a run to its folder; it marks the folder as ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(HEADER + started_by() + config, encoding="utf-8")


def started_by() -> str:
    """A line of comment with the command line of a fit as it was typed; nothing without one."""
    typed = sys.orig_argv
    if "fit" not in typed or sys.argv[1:2] != ["fit"]:
        return ""
    words = shlex.join(typed[typed.index("fit") :]).replace("\n", " ")
    program = "python cli.py" if sys.argv[0].endswith(".py") else "litgrpo"
    return f"{COMMAND}{program} {words}\n"


def written(folder: Path) -> list[Path]:
    """Everything in a folder that has a name which runs give."""
    return [path for name in WRITTEN for path in folder.glob(name)]


ADVICE = "leave --ckpt_path out to start anew, or give it a .ckpt file or a run folder"


def checkpoint_file(given: str, folder: Path | None = None, advice: str = ADVICE) -> Path:
    """The file behind what a user calls a checkpoint.

    Args:
        given: `last`, `best`, a file, a folder such as `checkpoint-100`, or a run folder, of which
            the last checkpoint is taken.
        folder: the run folder in which `last` and `best` are looked up.
        advice: what to do where there is none.

    Raises:
        FileNotFoundError: there is no such file.
    """
    named = {}
    if folder is not None:
        named = {"last": checkpoints_of(folder) / LAST, "best": checkpoints_of(folder) / BEST}
    path = named.get(given, Path(given))
    checkpoint_inside = (path / TRAINING_STATE).exists() or checkpoints_of(path).is_dir()
    require(
        checkpoint_inside or not (path / "config.json").is_file(),
        f"{path} is a model, not a checkpoint: give it as --model.pretrained {path}, and leave "
        "--ckpt_path out.",
    )
    if path.is_dir():
        of_run = checkpoints_of(path)
        path = of_run / LAST if of_run.is_dir() else path / TRAINING_STATE
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {path}: {advice}.")
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


def writes_files(trainer: Any) -> bool:
    """Whether this process writes files: the first one does, and none in a `fast_dev_run`."""
    return bool(trainer.is_global_zero and not trainer.fast_dev_run)


def saved_config(checkpoint: dict[str, Any]) -> str:
    """The configuration (YAML) that a loaded checkpoint was made with.

    Raises:
        ValueError: the checkpoint was not written by `cli.py`.
    """
    state = checkpoint.get("callbacks", {}).get(RunFolder.__qualname__, {})
    known = "config" in state
    require(known, "This checkpoint holds no configuration: it was not written by cli.py.")
    return str(state["config"])


def versions() -> dict[str, str]:
    """What the numbers of a run were made with."""
    packages = {name: metadata.version(name) for name in ("torch", "lightning", "transformers")}
    return {"python": platform.python_version(), "litgrpo": __version__, **packages}


class RunFolder(Callback):
    """Writes the configuration to the run folder and into every checkpoint.

    A start that goes on from a checkpoint writes it when that was accepted: of a refused one the
    folder keeps the configuration that its checkpoints were made with.

    Args:
        config: the resolved configuration as YAML text.
        replaced: what an earlier run wrote; it is there until the model has been loaded, the data
            have been read and the invariants hold.
    """

    def __init__(self, config: str, replaced: Sequence[Path] = ()) -> None:
        self.config, self.replaced = config, replaced

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Make room: the evaluation before training writes the first files."""
        if self.replaced and writes_files(trainer):
            delete(self.replaced)
            write_config(run_folder(trainer), self.config)
        self.replaced = ()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write `config.yaml`, now that nothing refuses the checkpoint or the settings."""
        self.on_sanity_check_start(trainer, pl_module)  # without validation nobody called it
        if writes_files(trainer):
            write_config(run_folder(trainer), self.config)

    def state_dict(self) -> dict[str, Any]:
        """The configuration as plain text, so that checkpoints load with `weights_only`."""
        return {"config": self.config}
