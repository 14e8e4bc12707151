"""`python -m tests.environments.foreign NAME`: an adapter's test against the real package.

Makes a throw-away environment, which sees the packages of this one, installs the package there,
and runs the test. Nothing is installed here. `python -m tests.environments.foreign all` runs all.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
# {name: (what pip installs, its test)}
FOREIGN = {
    "trl": (["trl==1.16.*", "jmespath"], "tests/environments/test_trl.py"),
}


def main() -> int:
    """Install and run; the exit code of pytest."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.environments.foreign", description=__doc__
    )
    parser.add_argument("name", choices=[*FOREIGN, "all"])
    name = parser.parse_args().name
    return max(run(each) for each in (FOREIGN if name == "all" else [name]))


def run(name: str) -> int:
    """The exit code of the tests of one package."""
    packages, test = FOREIGN[name]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        (own,) = Path(folder).glob("lib/python*/site-packages")
        (own / "packages_of_this_environment.pth").write_text(sysconfig.get_path("purelib"))
        pip = [python, "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(pip, check=True)
        pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-ra", test]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        return subprocess.run(pytest, check=False, cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
