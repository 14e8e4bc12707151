"""Test adapters against their packages: `python -m tests.environments.adapters.foreign gem`.

Makes a virtual environment for each package (in a temporary folder, or under --venvs), installs
the current release, runs its test file there, and prints a table; exit code 1 if a test failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
# Name: (what pip installs, distribution, files, what it runs). Add a row and a file for another.
PACKAGES = {
    "gymnasium": (
        ["gymnasium[toy-text,classic-control]"],
        "gymnasium",
        "check_gymnasium.py",
        "`Text`: FrozenLake, CliffWalking, Taxi, Blackjack; CartPole described; Pendulum rejected",
    ),
    "gem": (
        ["gem-llm"],
        "gem-llm",
        "check_gem.py",
        "`Text`: a number game won, a wrong format, seeds, unknown ids",
    ),
    "textarena": (
        ["textarena"],
        "textarena",
        "check_textarena.py",
        "`TextArena`: a number game won, 2048 beside another game, invalid moves, two players",
    ),
    "openenv": (
        ["openenv"],
        "openenv",
        "check_openenv.py",
        "`OpenEnv`: one environment in process and by WebSocket, wrong actions, no server",
    ),
    "skyrl": (
        ["skyrl-gym"],
        "skyrl-gym",
        "check_skyrl.py",
        "`SkyRL`: gsm8k_multi_turn over its turns, a missing column, unknown ids",
    ),
    "trl": (
        ["trl==1.16.*", "jmespath"],
        "trl",
        "../../test_trl.py",
        "`Tools`: classes of `environment_factory` and functions of `tools`, by both loops",
    ),
    "reasoning_gym": (
        ["reasoning-gym==0.1.25"],
        "reasoning-gym",
        "../../../rewards/builtin/test_reasoning_gym.py ../../../data/test_reasoning_gym.py",
        "`ReasoningGym` and its reward: every task made and scored as the package does",
    ),
    "mcp": (
        ["mcp>=2"],
        "mcp",
        "check_mcp.py",
        "`Tools`: servers by stdio and HTTP, one per episode; lost, hanging and incorrect servers",
    ),
    "verifiers": (
        ["verifiers==0.4.*", "uv"],
        "verifiers",
        "check_verifiers.py",
        "`Verifiers`: a taskset played by its `null` harness; other rows and incorrect settings",
    ),
    "openreward": (
        ["openreward"],
        "openreward",
        "check_openreward.py",
        "`OpenReward`: a server's rewards, ends and terminal tool; a lost one, unknown splits",
    ),
}
VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(PACKAGES)}")
    parser.add_argument("--venvs", type=Path, help="folder to keep the virtual environments in")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if name not in PACKAGES]
    if unknown:
        parser.error(f"{unknown[0]} is no package of: {', '.join(PACKAGES)}")
    print("| package | version | what was run | result |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="litgrpo-foreign-") as temporary:
        folder = asked.venvs or Path(temporary)
        passed = [row(name, folder / f"env_{name}") for name in asked.names or PACKAGES]
    return 0 if all(passed) else 1


def row(name: str, folder: Path) -> bool:
    """Print the row of a package; False if a test of it failed."""
    wanted, distribution, files, what = PACKAGES[name]
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    # Under the package is what this environment has: litgrpo imports torch, httpx2 and others.
    below = [path for path in sys.path if path.endswith("site-packages")]
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "packages_of_this_environment.pth").write_text("\n".join(below))
    asked = ["pip", "install", "-q", "--upgrade", "pytest", *wanted]
    installed = run(python, "-m", *asked)
    if installed.returncode:
        reason = (installed.stderr.strip().splitlines() or ["pip failed"])[-1]
        print(f"| {distribution} | | {what} | not installable: {reason} |", flush=True)
        return True
    version = run(python, "-c", VERSION, distribution).stdout.strip()
    paths = [HERE / file for file in files.split()]
    ran = run(python, "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, *paths)
    last = (ran.stdout.strip().splitlines() or ["pytest did not start"])[-1]
    print(f"| {distribution} | {version} | {what} | {last.partition(' in ')[0]} |", flush=True)
    if ran.returncode:
        print(ran.stdout, ran.stderr, file=sys.stderr, flush=True)
    return ran.returncode == 0


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    texts = [str(each) for each in command]
    return subprocess.run(
        texts, check=False, env=environment, capture_output=True, text=True, cwd=ROOT
    )


if __name__ == "__main__":
    sys.exit(main())
