"""Time quickstart iterations on a quiet and on a busy machine, for several OpenMP wait policies.

    python -m tests.benchmarks.busy [--settings default,GOMP_SPINCOUNT=20000,...] [--turns 3]

Each run is the command of the quickstart in a separate process. Busy: as many processes as `--busy`
count without a pause meanwhile. Printed: the median of `time/step_s` after the warm-up, in seconds,
as the median of the turns, and the busy one divided by the quiet one.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
SETTINGS = "default,GOMP_SPINCOUNT=0,GOMP_SPINCOUNT=1000,GOMP_SPINCOUNT=20000,OMP_NUM_THREADS=1"
WARMUP = 3


def measure_step_s(setting: str, iterations: int) -> float:
    """Return the median seconds of an iteration of the quickstart in a new process."""
    environment = {name: value for name, value in os.environ.items() if name not in POLICIES}
    if setting != "default":
        name, value = setting.split("=")
        environment[name] = value
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "cli.py", "fit", "-c", "configs/quickstart.yaml"]
        command += ["--run_dir", str(run), "--trainer.limit_val_batches", "0"]
        command += ["--model.init_args.max_iterations", str(iterations)]
        finished = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise RuntimeError(f"{setting}: {finished.stderr[-2000:]}")
        with (run / "metrics.csv").open(encoding="utf-8") as file:
            seconds = [
                float(row["time/step_s"]) for row in csv.DictReader(file) if row["time/step_s"]
            ]
    return median(seconds[WARMUP:])


def measure_beside(setting: str, iterations: int, busy: int) -> float:
    """Return the median seconds of an iteration beside processes that never wait."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        return measure_step_s(setting, iterations)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default=SETTINGS, help="separated by commas")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--busy", type=int, default=1, help="number of busy processes")
    args = parser.parse_args()
    settings = args.settings.split(",")
    quiet: dict[str, list[float]] = {setting: [] for setting in settings}
    busy: dict[str, list[float]] = {setting: [] for setting in settings}
    for _ in range(args.turns):
        for setting in settings:
            quiet[setting].append(measure_step_s(setting, args.iterations + WARMUP))
            busy[setting].append(measure_beside(setting, args.iterations + WARMUP, args.busy))
    for setting in settings:
        alone, beside = median(quiet[setting]), median(busy[setting])
        print(f"{setting:24} quiet {alone:.3f} s  busy {beside:.3f} s  {beside / alone:.2f} times")


if __name__ == "__main__":
    main()
