"""Record losses and gradient norms of the quickstart: `python -m tests.golden.quickstart`.

The command writes `quickstart.json` again. Run it only if a change is meant to alter the numerics,
and state the reason in the commit.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".json")
METRICS = ("policy/loss", "optim/grad_norm")
ITERATIONS = 10


def measure(folder: Path) -> dict[str, list[float]]:
    """Train the quickstart with one thread and return each metric's value per iteration.

    Args:
        folder: where the run folder is created.
    """
    command = [sys.executable, "cli.py", "fit", "-c", "configs/quickstart.yaml"]
    command += ["--run_dir", str(folder / "run"), "--trainer.limit_val_batches", "1"]
    command += ["--model.init_args.max_iterations", str(ITERATIONS)]
    # More threads sum in another order.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    with (folder / "run" / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["policy/loss"]]
    return {name: [float(row[name]) for row in rows] for name in METRICS}


def main() -> None:
    """Write the golden file."""
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
