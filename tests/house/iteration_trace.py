"""A callback that notes which files of the package one iteration passes through.

It imports nothing of the project's tests, so that it can watch another checkout too.
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
    """Notes every function that is called from the start of an iteration to that of the next.

    Args:
        report: JSON file to write {"step" or "around": {file: [functions]}} to: what is called by
            `training_step`, and what before and after it.
    """

    def __init__(self, report: str) -> None:
        self.report = Path(report)
        self.before: Any = None
        self.place = "around"
        self.called: dict[str, set[CodeType]] = {"step": set(), "around": set()}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by Python for every call and return."""
        if event == "call":
            self.called[self.place].add(frame.f_code)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Begin, or write what was found."""
        if pl_module.iteration == TRACED:
            training_step = pl_module.training_step

            def traced_step(*args: Any) -> Any:
                self.place = "step"
                result = training_step(*args)
                self.place = "around"
                return result

            pl_module.training_step = traced_step
            self.before = sys.getprofile()
            threading.setprofile(self.note)
            sys.setprofile(self.note)
        elif pl_module.iteration > TRACED:
            sys.setprofile(self.before)
            threading.setprofile(None)
            del pl_module.training_step
            self.report.write_text(json.dumps({k: by_file(v) for k, v in self.called.items()}))


def by_file(called: set[CodeType]) -> dict[str, list[str]]:
    """The functions of the package among these, by file."""
    found: dict[str, list[str]] = {}
    for code in called:
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE) and code.co_name != "<module>":
            found.setdefault(path.relative_to(PACKAGE).as_posix(), []).append(code.co_qualname)
    return {name: sorted(functions) for name, functions in sorted(found.items())}
