"""Name of this program in commands that messages show."""

import os
import shutil
import sys
from pathlib import Path


def program_name() -> str:
    """Return how the user started this program: `litgrpo`, or `python cli.py` in a clone."""
    return "python cli.py" if Path(sys.argv[0]).suffix == ".py" else "litgrpo"


def program_in_shell() -> str:
    """Return `program_name`, with the path of the interpreter if `python` is another one."""
    folder, python = os.path.dirname(sys.executable), shutil.which("python")
    name = program_name()
    if name == "litgrpo" or (python is not None and os.path.dirname(python) == folder):
        return name
    path = os.path.relpath(sys.executable)
    return f"{sys.executable if path.startswith(os.pardir) else path} cli.py"
