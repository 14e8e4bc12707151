"""Commands of users, run inside worker processes, which end them if they hang."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence

MAX_OUTPUT = 1_000_000  # bytes that a command may print to stdout


def run_command(command: Sequence[str], text: str) -> str:
    """Run a command and return what it printed.

    It stays in the worker's process group, so it is killed together with the worker. What it prints
    to stderr becomes output of the worker.

    Args:
        command: program and arguments.
        text: its stdin.

    Raises:
        RuntimeError: it could not be started, printed too much, or exited with an error.

    Example:
        >>> run_command(["cat"], "hello")
        'hello'
    """
    # A file as stdin: a pipe would block if the command reads nothing and prints much.
    with tempfile.TemporaryFile() as given:
        given.write(text.encode("utf-8", "replace"))
        given.seek(0)
        try:
            process = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE)
        except OSError as error:
            raise RuntimeError(f"{command[0]}: {error.strerror or error}") from error
        with process:
            assert process.stdout is not None
            printed = process.stdout.read(MAX_OUTPUT + 1)
            if len(printed) > MAX_OUTPUT:
                process.kill()
                raise RuntimeError(f"{command[0]} printed more than {MAX_OUTPUT:,} bytes")
            code = process.wait()
    if code:
        how = f"died of signal {-code}" if code < 0 else f"exited with {code}"
        raise RuntimeError(f"{command[0]} {how}")
    return printed.decode("utf-8", "replace")
