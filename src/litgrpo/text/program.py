"""Name of this program in commands that messages show."""

import os
import shutil
import sys
from pathlib import Path


def program_name() -> str:
    """Return the first words of a command that starts this program again in the same shell.

    Returns:
        `litgrpo` if installed; in a clone `python cli.py`, or with the path of the interpreter if
        `python` is another one.
    """
    if Path(sys.argv[0]).suffix != ".py":
        return "litgrpo"
    folder, found = os.path.dirname(sys.executable), shutil.which("python")
    if found is not None and os.path.dirname(found) == folder:
        return "python cli.py"
    path = os.path.relpath(sys.executable)
    return f"{sys.executable if path.startswith(os.pardir) else path} cli.py"
