"""Train and pack the corpus, and print the tables of docs/reference/doctor.md.

python -m tests.tools.doctor [FOLDER]
"""

import sys
import warnings
from pathlib import Path

import torch

from tests.tools.doctor.corpus import HALVES, make, pack
from tests.tools.doctor.measure import report

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(*sys.argv[1:2] or ["runs/doctor"])
    for half in HALVES:
        make(half, folder, seconds=float("inf"), only="")
        pack(half, folder)
    for half in HALVES:
        report(half)
