"""Measure the start-up time of commands: the help page, an error, a fit.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.start -c configs/quickstart.yaml [--checkout CLONE]

Wall seconds from the call, medians of some calls: `--help` and a misspelled key to their end; a fit
to its first iteration, with and without the evaluation before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

ROOT = Path(__file__).parents[2]


class FirstIteration(Callback):
    """Ends the process when the first iteration is about to begin."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Now."""
        os._exit(0)


def seconds(words: list[str], checkout: Path) -> float:
    """From the call to the end of the process."""
    paths = os.pathsep.join((str(checkout), str(checkout / "src"), str(ROOT)))
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "cli.py", *words],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        check=False,
    )
    return time.perf_counter() - began


def main() -> None:
    """Print a line for each command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-c", dest="recipe", default="configs/quickstart.yaml")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="of another version")
    parser.add_argument("--calls", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fit = ["fit", "-c", args.recipe, "--run_dir", folder, "--overwrite", "true"]
        first = ["--trainer.callbacks+=tests.benchmarks.start.FirstIteration"]
        commands = {
            "--help": ["--help"],
            "an error": [*fit, "--model.group_sise", "8"],
            "a fit to its first iteration": [*fit, *first],
            "without the evaluation before": [*fit, *first, "--trainer.num_sanity_val_steps", "0"],
        }
        for name, words in commands.items():
            took = [seconds(words, args.checkout.absolute()) for _ in range(args.calls)]
            print(f"{name}: {statistics.median(took):.2f} s")


if __name__ == "__main__":
    main()
