"""`make quickstart` and `make test` run the commands that README shows beside them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def plan_target(target: str, folder: Path) -> list[str]:
    """Return the commands of a target, without its environment; none of them runs."""
    command = ["make", "--dry-run", target, f"VENV={folder}"]
    # `make test` runs this test: its options and level would change what is printed here.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return done.stdout.replace(f"{folder}/bin/", "").splitlines()


def test_a_new_machine_installs_and_trains(tmp_path):
    check, venv, install, touch, train = plan_target("quickstart", tmp_path / "new")
    assert "(3, 11)" in check
    assert venv.startswith("python3 -m venv")
    assert touch.endswith("installed")
    assert install.removeprefix("python -m ").replace("--quiet ", "") in README
    assert train in README


def test_an_installed_environment_is_kept(tmp_path):
    (tmp_path / "installed").touch()
    assert plan_target("test", tmp_path) == ["python -m pytest"]


def test_no_source_or_test_reads_a_folder_beside_the_repository():
    # Spelled in two parts, so that this file does not match.
    beside = re.compile(r"\.\./sha" r"red|parents?\b.*/ \"sha" r"red\"")
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert not [file for file in files if beside.search(file.read_text(encoding="utf-8"))]
