"""A callback that records the functions that one iteration calls, and its depth.

It imports nothing from tests, so that it can trace another checkout as well.
"""

import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lightning.pytorch import Callback

import litgrpo

PACKAGE = Path(litgrpo.__file__).parent
TRACED = 1  # the second iteration; the first also prepares


class IterationTrace(Callback):
    """Record every function that is called from the start of an iteration to the next one.

    Args:
        report: JSON file to write: {"step", "around": {file: [functions]}, "depth": frames}. "step"
            has the functions below `training_step`, "around" all others; "depth" is the most
            frames of the package on the stack below `training_step`.
    """

    def __init__(self, report: str) -> None:
        self.report = Path(report)
        self.before: Any = None
        self.place = "around"
        self.depth = 0
        self.called: dict[str, set[CodeType]] = {"step": set(), "around": set()}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; Python calls this for every call and return."""
        if event != "call":
            return
        code = frame.f_code
        if self.place == "step" and code not in self.called["step"] and _in_package(code):
            self.depth = max(self.depth, _count_frames(frame))
        self.called[self.place].add(code)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Start recording, or write the report."""
        if pl_module.iteration == TRACED:
            training_step = pl_module.training_step

            def record_step(*args: Any) -> Any:
                self.place = "step"
                result = training_step(*args)
                self.place = "around"
                return result

            pl_module.training_step = record_step
            self.before = sys.getprofile()
            threading.setprofile(self.note)
            sys.setprofile(self.note)
        elif pl_module.iteration > TRACED:
            sys.setprofile(self.before)
            threading.setprofile(None)
            del pl_module.training_step
            found = {place: by_file(called) for place, called in self.called.items()}
            self.report.write_text(json.dumps(found | {"depth": self.depth}))


def by_file(called: set[CodeType]) -> dict[str, list[str]]:
    """Group the functions of the package by file."""
    found: dict[str, list[str]] = {}
    for code in called:
        path = Path(code.co_filename)
        if _in_package(code) and code.co_name != "<module>":
            found.setdefault(path.relative_to(PACKAGE).as_posix(), []).append(code.co_qualname)
    return {name: sorted(functions) for name, functions in sorted(found.items())}


def _in_package(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(PACKAGE)


def _count_frames(frame: FrameType | None) -> int:
    """Count the frames of the package up to `training_step`."""
    count = 0
    while frame is not None and frame.f_code.co_name != "record_step":
        count += _in_package(frame.f_code)
        frame = frame.f_back
    return count
