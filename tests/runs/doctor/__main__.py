"""Train and pack the corpus, and print the tables of docs/reference/tools.md.

python -m tests.runs.doctor                          # trains what is missing below runs/doctor
python -m tests.runs.doctor --only slow_rewards      # trains the runs of one kind, no more
python -m tests.runs.doctor --measure                # the tables of the packed runs, no training
"""

import argparse
import warnings
from pathlib import Path

import torch

from tests.runs.doctor.corpus import HALVES, make, pack
from tests.runs.doctor.measure import report


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/doctor"), help="of the runs")
    parser.add_argument("--only", default="", help="part of the names of the runs to train")
    parser.add_argument("--measure", action="store_true", help="train nothing")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for half in HALVES:
        if not options.measure:
            make(half, options.folder, options.only)
        if not options.only:
            if not options.measure:
                pack(half, options.folder)
            report(half)


if __name__ == "__main__":
    main()
