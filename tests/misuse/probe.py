"""One misuse: what a user typed, and what must be said.

A file of this folder holds the probes of one topic as `PROBES: list[Probe]`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A training of seconds; what a probe adds overrides it.
QUICK = (
    "fit -c {recipe} --run_dir {folder}/run --model.max_iterations 1 --data.batch_size 2"
    " --model.group_size 2 --model.max_completion_length 8 --trainer.num_sanity_val_steps 0"
    " --data.val null --trainer.enable_progress_bar false --trainer.accelerator cpu"
)
RECIPE = ROOT / "configs" / "quickstart.yaml"
TIME_LIMIT = 240  # s; a probe that takes longer has failed


@dataclass(frozen=True)
class Probe:
    """A command line, or a Python script, and how it must end.

    Args:
        name: the mistake, in words.
        words: arguments of `python cli.py`; {folder} is an empty folder, which is also the working
            folder, {recipe} the quickstart's recipe. `QUICK` is a short training.
        says: texts that must be printed, on standard output or error; case does not matter.
        code: the exit code.
        files: files in the folder before the start, by name.
        script: Python code to run in place of a command line.
        before: called with the folder before the start.
        after: called with the folder at the end; returns the faults, or "".
        never: texts that must not be printed.
        quick: True if the test suite runs it.
    """

    name: str
    words: str = ""
    says: tuple[str, ...] = ()
    code: int = 2
    files: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    before: Callable[[Path], None] | None = None
    after: Callable[[Path], str] | None = None
    never: tuple[str, ...] = ("Traceback (most recent call last)",)
    quick: bool = False


@dataclass(frozen=True)
class Seen:
    """Result of a probe.

    Args:
        code: the exit code; -1 if the time limit was reached.
        text: everything printed.
        seconds: duration.
        faults: What is wrong with it; nothing where it is met well.
    """

    code: int
    text: str
    seconds: float
    faults: tuple[str, ...]


def play(probe: Probe) -> Seen:
    """Run a probe in a separate process and an empty folder, and check its result."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "work"
        folder.mkdir()
        for path, content in probe.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content)
        if probe.before is not None:
            probe.before(folder)
        code, text = in_child(probe, folder, Path(name) / "printed.txt")
        faults = [f"exit code {code}, not {probe.code}"] * (code != probe.code)
        faults += [f"does not say {t!r}" for t in probe.says if t.lower() not in text.lower()]
        faults += [f"prints {t!r}" for t in probe.never if t in text]
        if probe.after is not None and not faults:
            faults += filter(None, [probe.after(folder)])
    return Seen(code, text, time.monotonic() - began, tuple(faults))


def in_child(probe: Probe, folder: Path, printed: Path) -> tuple[int, str]:
    """Exit code and output of the probe, run by a fork of this process: imports cost nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        code = 1
        try:
            with printed.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            os.chdir(folder)
            code = start(probe, folder)
        except SystemExit as stop:
            code = exit_code(stop)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return wait_for(child), printed.read_text(errors="replace") if printed.exists() else ""


def start(probe: Probe, folder: Path) -> int:
    """Run the command or the script in the child process."""
    if probe.script:
        exec(compile(probe.script, "script.py", "exec"), {"__name__": "__main__"})
        return 0
    from litgrpo.cli.main import main

    words = probe.words.replace("{folder}", str(folder)).replace("{recipe}", str(RECIPE))
    sys.argv = ["cli.py", *split(words)]
    return main()


def split(words: str) -> list[str]:
    """Split a command line into words, with quotes as in a shell."""
    import shlex

    return shlex.split(words)


def exit_code(stop: SystemExit) -> int:
    """Return the exit code that a shell would see."""
    if isinstance(stop.code, int):
        return stop.code
    if stop.code is not None:
        print(stop.code, file=sys.stderr)
    return int(stop.code is not None)


def wait_for(child: int) -> int:
    """Return the child's exit code, 128 + its signal if killed, or -1 after the time limit."""
    end = time.monotonic() + TIME_LIMIT
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
