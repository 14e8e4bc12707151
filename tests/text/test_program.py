import sys
from pathlib import Path

import pytest

from litgrpo.text.program import program_in_shell


@pytest.mark.parametrize(
    ("started", "interpreter", "shown"),
    [
        ("/usr/bin/litgrpo", "env/bin/python", "litgrpo"),
        ("cli.py", "env/bin/python3", "python cli.py"),
        ("cli.py", ".venv/bin/python", ".venv/bin/python cli.py"),
        ("cli.py", "/elsewhere/bin/python", "/elsewhere/bin/python cli.py"),
    ],
)
def test_commands_start_the_same_program_in_the_same_shell(
    tmp_path, monkeypatch, started, interpreter, shown
):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(sys, "executable", str(Path.cwd() / interpreter))
    assert program_in_shell() == shown
