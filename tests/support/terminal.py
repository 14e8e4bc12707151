"""A program in a terminal, and what is on the screen at the end."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path


def run_in_terminal(script: str, folder: Path, columns: int, **variables: str) -> list[str]:
    """Return the lines on the screen after a Python script ran in a terminal."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    environment = os.environ | {"PYTHONPATH": paths, "TERM": "xterm"} | variables
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, env=environment, start_new_session=True, **ends
    )
    os.close(terminal)
    written = b""
    while part := read_some(controller):
        written += part
    os.close(controller)
    assert child.wait() == 0, written.decode()
    return screen(written.decode(), columns or 80)


def read_some(controller: int) -> bytes:
    """Return what was written; nothing when the program has ended."""
    try:
        return os.read(controller, 65536)
    except OSError:
        return b""


def screen(text: str, columns: int) -> list[str]:
    """Return the lines that a terminal shows: text, line breaks and carriage returns."""
    lines: list[list[str]] = [[]]
    column = 0
    for character in text:
        if character == "\r":
            column = 0
        elif character == "\n" or column == columns:
            lines.append([])
            column = 0
        if character not in "\r\n":
            row = lines[-1]
            row.extend(" " * (column + 1 - len(row)))
            row[column] = character
            column += 1
    return ["".join(row).rstrip() for row in lines]
