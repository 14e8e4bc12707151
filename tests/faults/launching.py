"""Processes of `cli.py`: new ones, or forks of this one, which has imported the libraries already.

Importing takes half of a short run. A fork is a process like any other: it can be killed, and only
its folder is left of it.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": f"src{os.pathsep}.",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
Preparation = Callable[[], None] | None


def in_a_new_process(
    words: list[str],
    timeout_s: float,
    prepare: Preparation,
    program: tuple[str, ...] = ("cli.py",),
) -> tuple[int, str]:
    """Exit code and output of `python cli.py`, or of what starts it, with these words."""
    done = subprocess.run(
        [sys.executable, *program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        check=False,
        timeout=timeout_s,
        preexec_fn=prepare,
    )
    return done.returncode, done.stdout


def in_a_fork(words: list[str], timeout_s: float, prepare: Preparation) -> tuple[int, str]:
    """The same, from a fork of this process."""
    preload()
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os._exit(_program(words, prepare))
    os.close(writer)
    said = _read_all(reader, child, time.monotonic() + timeout_s)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said


def preload() -> None:
    """Import what a run needs, on as many threads as a new process has: others round otherwise."""
    os.environ.update(ENVIRONMENT)
    import torch

    torch.set_num_threads(int(ENVIRONMENT["OMP_NUM_THREADS"]))
    import transformers.models.gemma2.modeling_gemma2  # noqa: F401

    import litgrpo.cli.lightning_cli  # noqa: F401


def _program(words: list[str], prepare: Preparation) -> int:
    from litgrpo.cli.main import main

    os.chdir(ROOT)
    os.environ.update(ENVIRONMENT)
    sys.argv = ["cli.py", *words]
    try:
        if prepare is not None:
            prepare()
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(5)
    return code


def _read_all(reader: int, child: int, until: float) -> str:
    parts = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            parts.append(b"\nkilled: it took too long\n")
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        parts.append(part)
    os.close(reader)
    return b"".join(parts).decode(errors="replace")
