"""A long run through XLA: `python -m tests.xla.soak 200` in an environment with torch_xla."""

import os
import sys

from tests.support.training_support import assert_steady
from tests.xla.fitting import SMALL, fit
from tests.xla.own_process import ENVIRONMENT


def main(iterations: int) -> None:
    """Ragged prompts and completions, epochs of seven iterations, validations and checkpoints."""
    rows = fit("xla", iterations, SMALL).rows
    assert_steady(rows)
    compiled = [int(row["perf/compilations"]) for row in rows]
    reads = sorted(int(row["perf/host_reads"]) for row in rows)
    rewards = [row["reward/mean"] for row in rows]
    print(f"{len(rows)} iterations, {sum(compiled[2:])} programs compiled after the second")
    print(f"first two: {compiled[:2]}; host reads: median {reads[len(reads) // 2]}")
    tenth = max(1, len(rows) // 10)
    print(f"reward {sum(rewards[:tenth]) / tenth:.2f} -> {sum(rewards[-tenth:]) / tenth:.2f}")


if __name__ == "__main__":
    if os.environ.get("PJRT_DEVICE") is None:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.xla.soak", *sys.argv[1:]],
            os.environ | ENVIRONMENT,
        )
    main(int(sys.argv[1]))
