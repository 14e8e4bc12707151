"""The keys of a run that belong to no class: {key: (type, default, help)}."""

from __future__ import annotations

from typing import Any

RUN_KEYS: dict[str, tuple[Any, Any, str]] = {
    "run_dir": (
        str | None,
        None,
        "Folder of everything that a run writes (default: runs/<name of the first -c>); {seed} in "
        "it stands for the seed.",
    ),
    "overwrite": (bool, False, "Replace the run in run_dir."),
    "auto_resume": (
        bool,
        False,
        "Go on from the newest good checkpoint in run_dir; start if there is none.",
    ),
    "tensorboard": (bool, True, "Log to TensorBoard."),
    "csv": (bool, True, "Log to metrics.csv."),
    "html": (bool, True, "Write report.html to run_dir when the run has ended."),
}
