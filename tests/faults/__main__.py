"""Kills real runs and compares what becomes of them: `python -m tests.faults --points 20`.

Prints one line per fault; exit code 1 if one failed. Processes compute on OMP_NUM_THREADS threads,
by default on one.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.cases import CASES, Bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20, help="of F1; half of them of F2")
    parser.add_argument("--seed", type=int, default=0, help="of the random points")
    parser.add_argument("--only", nargs="*", choices=CASES, help="faults, by their number")
    parser.add_argument("--keep", type=Path, help="folder to leave the runs in")
    asked = parser.parse_args()
    chosen = asked.only or list(CASES)
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="litgrpo-faults-"))
    bench = Bench(folder, asked.points, random.Random(asked.seed))
    print("| fault | what was done | passed | seconds |\n|---|---|---|---|", flush=True)
    all_passed = True
    for name in chosen:
        started = time.monotonic()
        found = CASES[name](bench)
        good = sum(not each for each in found.values())
        took = time.monotonic() - started
        print(f"| {name} | {CASES[name].__doc__} | {good}/{len(found)} | {took:.0f} |", flush=True)
        for point, wrong in found.items():
            if wrong:
                all_passed = False
                print(f"FAILED {name} {point}: {wrong}", file=sys.stderr, flush=True)
    if asked.keep is None:
        shutil.rmtree(folder)
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
