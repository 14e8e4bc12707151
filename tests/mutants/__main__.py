"""`python -m tests.mutants [--package NAME] [--limit N] [--seed S]`: do the tests notice a change?

Each mutant is one small change of the source: a comparison, a constant, an operator, a dropped
statement, or one of the list in `tests/mutants/picked.yaml`. It runs in a copy of the repository
against the tests of its module, of the modules that import it, and of its package, until one fails.
Prints which test fails for each mutant, or that it survived, and the kill rate of each package
without those that are listed as equivalent.
"""

import argparse
import importlib
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.mutants.changes import ROOT, SOURCE, Mutant, automatic, files

PACKAGES = [
    *("algorithms", "learning", "modules", "rollout", "rewards", "evaluation", "models", "data"),
    *("checkpointing", "callbacks", "metrics", "tensor_files", "tensors", "types"),
]
LISTED = yaml.safe_load(Path(__file__).with_name("picked.yaml").read_text(encoding="utf-8"))
MEMORY = 16 * 2**30  # a mutant may allocate without end


def mutants(package: str) -> list[Mutant]:
    """All mutants of a package: the listed ones, then the automatic ones."""
    found = []
    for file in files(package):
        text = (SOURCE / file).read_text(encoding="utf-8")
        for old, new in LISTED["picked"].get(file, []):
            if text.count(old) == 1:
                found.append(Mutant(file, text.index(old), old, new))
            else:
                print(f"picked.yaml: {file} contains {text.count(old)} times, expected 1: {old}")
        found += automatic(file)
    return found


def is_equivalent(mutant: Mutant) -> bool:
    """True if the change is listed as one without an effect."""
    listed = LISTED["equivalent"].get(mutant.file, [])
    return any(mutant.lines() == (before, after) for before, after, _ in listed)


def tests_of(file: str) -> list[str]:
    """Test paths of a source file: its own, its docstring, its importers, its package."""
    path = Path(file)
    module = ".".join(("litgrpo", *path.with_suffix("").parts))
    own = Path("tests", path).with_name(f"test_{path.name}")
    wide = Path("tests", path.parts[0])
    every = sorted((ROOT / wide).rglob("test_*.py")) if len(path.parts) > 1 else []
    named = [test for test in every if test.stem.startswith(f"test_{path.stem}")]
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    callers = {f"test_{each.stem}.py" for each in SOURCE.rglob("*.py") if imports(each, module)}
    users = [each for each in tests if imports(each, module) or each.name in callers]
    near = [each for each in users if each in every]
    ordered = [ROOT / own, ROOT / "src" / "litgrpo" / file, *named, *near, *every, *users]
    return list(dict.fromkeys(str(p.relative_to(ROOT)) for p in ordered if p.exists()))


def imports(file: Path, module: str) -> bool:
    """True if a source or a test of the plain suite imports from a module."""
    special = {"cuda_device", "xla", "vllm", "hosts", "real", "foreign"} & {*file.parts}
    return not special and f"from {module} import" in file.read_text(encoding="utf-8")


def copy_repository(to: Path) -> Path:
    """Copy the files that git lists or does not ignore to the folder `to`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


class Running(NamedTuple):
    """A mutant whose tests run in a child process.

    Args:
        mutant: the change; None: the tests run without one.
        copy: folder of the changed repository.
        deadline: time at which the child is killed.
    """

    mutant: Mutant | None
    copy: Path
    deadline: float


def preload() -> None:
    """Import the large libraries once: children are forked and need not import them again."""
    for name in ("torch", "lightning", "transformers", "datasets", "hypothesis", "pytest"):
        importlib.import_module(name)


def start(copy: Path, paths: list[str]) -> int:
    """Start a child process that runs pytest on `paths` in a copy; return its process id.

    What it prints is in the file `output` beside the copy.
    """
    if (child := os.fork()) != 0:
        return child
    os.setsid()
    output = os.open(copy.with_name("output"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "litgrpo")]:
        del sys.modules[name]
    sys.path[:0] = [str(copy), str(copy / "src")]
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ |= {"TMPDIR": str(copy.parent), "OMP_NUM_THREADS": "1"}
    import pytest

    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider"]
    os._exit(int(pytest.main(["-x", "-q", *quiet, *paths])))


def wait(running: dict[int, Running]) -> tuple[Running, int | None]:
    """Wait for a child; return it and its exit code, None if it was killed at its deadline."""
    while True:
        for child, each in running.items():
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended or time.monotonic() > each.deadline:
                if not ended:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                return running.pop(child), os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.1)


def run(chosen: list[Mutant], num_workers: int, longest_s: float) -> list[Mutant]:
    """Run mutants, `num_workers` at a time; print what became of each; return the survivors.

    All their tests also run once without a change; if one fails, the program ends.
    """
    tests = {file: tests_of(file) for file in dict.fromkeys(each.file for each in chosen)}
    unchanged = list(dict.fromkeys(path for paths in tests.values() for path in paths))
    waiting: list[Mutant | None] = [None, *chosen]
    survivors, running = list[Mutant](), dict[int, Running]()
    with tempfile.TemporaryDirectory() as root:
        copies = [copy_repository(Path(root, str(n), "repository")) for n in range(num_workers)]
        while waiting or running:
            if waiting and copies:
                mutant, copy = waiting.pop(0), copies.pop()
                each = Running(mutant, copy, time.monotonic() + longest_s)
                if mutant is None:
                    running[start(copy, unchanged)] = each._replace(deadline=math.inf)
                    continue
                (copy / mutant.path).write_text(mutant.text(), encoding="utf-8")
                running[start(copy, tests[mutant.file])] = each
                continue
            ended, code = wait(running)
            copies.append(ended.copy)
            lines = ended.copy.with_name("output").read_text(encoding="utf-8").splitlines()
            if ended.mutant is None:
                if code != 0:
                    for child in running:
                        os.killpg(child, signal.SIGKILL)
                    sys.exit("\n".join(["Tests fail without a change:", *lines[-40:]]))
                continue
            shutil.copy2(ROOT / ended.mutant.path, ended.copy / ended.mutant.path)
            failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            if code == 0:
                survivors.append(ended.mutant)
                print(f"survived: {ended.mutant}", flush=True)
            elif code is None:
                print(f"killed after {longest_s:g} s: {ended.mutant}", flush=True)
            else:
                print(f"killed: {ended.mutant}\n  {'; '.join(failed)[:300]}", flush=True)
    return survivors


def choose(package: str, given: argparse.Namespace) -> list[Mutant]:
    """The mutants of a package that the options select."""
    chosen = [mutant for mutant in mutants(package) if given.file in mutant.file]
    if given.picked:
        listed = LISTED["picked"]
        chosen = [each for each in chosen if [each.old, each.new] in listed.get(each.file, [])]
    if given.limit is not None and given.limit < len(chosen):
        chosen = random.Random(given.seed).sample(chosen, given.limit)
    return chosen


def main() -> int:
    """Run all mutants of the packages, or a sample; exit code 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="default: all")
    parser.add_argument("--file", default="", help="only files whose path contains this")
    parser.add_argument("--picked", action="store_true", help="only those of picked.yaml")
    parser.add_argument("--limit", type=int, help="at most N mutants of each package, sampled")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run side by side")
    parser.add_argument(
        "--longest_s", type=float, default=900, help="a longer run counts as killed"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, run none")
    given = parser.parse_args()
    chosen = {package: choose(package, given) for package in given.package or PACKAGES}
    if given.list:
        print("\n".join(str(mutant) for each in chosen.values() for mutant in each))
        return 0
    preload()
    counted = {
        package: [mutant for mutant in each if not is_equivalent(mutant)]
        for package, each in chosen.items()
    }
    survivors = run([m for each in counted.values() for m in each], given.workers, given.longest_s)
    print("| package | killed | of | equivalent |\n|---|---|---|---|")
    for package, each in counted.items():
        killed, equivalent = len({*each} - {*survivors}), len(chosen[package]) - len(each)
        print(f"| {package} | {killed} | {len(each)} | {equivalent} |")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
