"""`python -m tests.mutants [--package NAME] [--limit N] [--seed S]`: do the tests notice a change?

Each mutant is one small change of the source: a comparison, a constant, an operator, a dropped
statement, or one of the list in `tests/mutants/picked.py`. It runs in a copy of the repository
against the tests of its package, those of its module first, until one fails. Prints each mutant
that no test notices and is not listed as equivalent, and the kill rate of each package.
"""

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tests.mutants.changes import ROOT, SOURCE, Mutant, automatic, files
from tests.mutants.picked import EQUIVALENT, PICKED

PACKAGES = [
    *("algorithms", "training", "rollout", "rewards", "evaluation", "models", "data"),
    *("checkpointing", "tensors", "types"),
]
MEMORY = 16 * 2**30  # a mutant may allocate without end


class Outcome(NamedTuple):
    """A mutant after its tests: `killed`, `survived` or `equivalent`."""

    mutant: Mutant
    verdict: str


def mutants(package: str) -> list[Mutant]:
    """All mutants of a package: the listed ones, then the automatic ones."""
    found = []
    for file in files(package):
        text = (SOURCE / file).read_text(encoding="utf-8")
        for name, old, new in PICKED:
            if name == file and text.count(old) == 1:
                found.append(Mutant(file, text.index(old), old, new))
            elif name == file:
                print(f"picked.py: {file} contains {text.count(old)} times, expected 1: {old}")
        found += automatic(file)
    return found


def is_equivalent(mutant: Mutant) -> bool:
    """True if the changed line is in the list of changes without an effect."""
    line = mutant.text().splitlines()[mutant.line() - 1].strip()
    return any((mutant.file, line) == (file, changed) for file, changed, _ in EQUIVALENT)


def tests_of(file: str) -> list[str]:
    """Test paths of a source file: its own tests, its docstring, the rest of its package."""
    path = Path(file)
    own = Path("tests", path).with_name(f"test_{path.name}")
    wide = Path("tests", path.parts[0])
    every = sorted((ROOT / wide).rglob("test_*.py")) if len(path.parts) > 1 else []
    named = [test for test in every if test.stem.startswith(f"test_{path.stem}")]
    ordered = [ROOT / own, ROOT / "src" / "litgrpo" / file, *named, *every]
    return list(dict.fromkeys(str(p.relative_to(ROOT)) for p in ordered if p.exists()))


def copy_repository(to: Path) -> Path:
    """Copy the files that git lists or does not ignore to the folder `to`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def run_tests(folder: Path, paths: list[str], limit: float) -> int | None:
    """Exit code of pytest in a copy, or None if it took longer than `limit` seconds."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestWarning"]
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder.parent)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Tests start processes of their own; those of a mutant may not end.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(chosen: list[Mutant], num_workers: int) -> list[Outcome]:
    """Run mutants, `num_workers` at a time; print the survivors as they are found."""
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(num_workers) as pool:
        copies: Queue[Path] = Queue()
        for number in range(num_workers):
            copies.put(copy_repository(Path(root, str(number), "repository")))
        unchanged: dict[str, float] = {}
        for mutant in chosen:
            if mutant.file not in unchanged:
                unchanged[mutant.file] = check_unchanged(copies, mutant.file)

        def judge(mutant: Mutant) -> Outcome:
            if is_equivalent(mutant):
                return Outcome(mutant, "equivalent")
            copy = copies.get()
            path = copy / "src" / "litgrpo" / mutant.file
            original = path.read_text(encoding="utf-8")
            try:
                path.write_text(mutant.text(), encoding="utf-8")
                code = run_tests(copy, tests_of(mutant.file), 3 * unchanged[mutant.file] + 60)
            finally:
                path.write_text(original, encoding="utf-8")
                copies.put(copy)
            if code == 0:
                print(f"survived: {mutant}", flush=True)
            return Outcome(mutant, "survived" if code == 0 else "killed")

        return list(pool.map(judge, chosen))


def check_unchanged(copies: "Queue[Path]", file: str) -> float:
    """Seconds that the tests of a file take without a change; exit if they fail."""
    copy, started = copies.get(), time.monotonic()
    if run_tests(copy, tests_of(file), limit=3600) != 0:
        sys.exit(f"The tests of {file} fail without a change: pytest {' '.join(tests_of(file))}")
    copies.put(copy)
    return time.monotonic() - started


def main() -> int:
    """Run a sample, or all mutants, of the packages; exit code 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="default: all")
    parser.add_argument("--file", default="", help="only files whose path contains this")
    parser.add_argument("--picked", action="store_true", help="only those of picked.py")
    parser.add_argument("--limit", type=int, help="at most N mutants of each package, sampled")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run side by side")
    parser.add_argument("--list", action="store_true", help="print the mutants, run none")
    given = parser.parse_args()
    rows, survivors = [], 0
    for package in given.package or PACKAGES:
        chosen = [mutant for mutant in mutants(package) if given.file in mutant.file]
        if given.picked:
            listed = {each[:3] for each in PICKED}
            chosen = [each for each in chosen if (each.file, each.old, each.new) in listed]
        if given.limit is not None and given.limit < len(chosen):
            chosen = random.Random(given.seed).sample(chosen, given.limit)
        if given.list:
            print("\n".join(map(str, chosen)))
            continue
        verdicts = [outcome.verdict for outcome in run(chosen, given.workers)]
        killed, of = verdicts.count("killed"), len(verdicts) - verdicts.count("equivalent")
        survivors += verdicts.count("survived")
        rows.append(f"| {package} | {killed} | {of} | {verdicts.count('equivalent')} |")
        print(rows[-1], flush=True)
    if rows:
        print("\n| package | killed | of | equivalent |\n|---|---|---|---|", *rows, sep="\n")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
