"""Shared by tests of xla.training."""

import math

LONGEST, LOOK_EVERY = 40, 16  # tokens of a completion; of the config override


def assert_steady(rows, warm_up=2):
    """Nothing is compiled after two iterations, and the host looks as rarely as it can.

    Two epochs have ended meanwhile, checkpoints were written and held-out prompts were answered.
    """
    compiled = [row["perf/compilations"] for row in rows]
    assert sum(compiled[warm_up:]) == 0, compiled
    most = math.ceil(LONGEST / LOOK_EVERY) + 2
    reads = [row["perf/host_reads"] for row in rows[warm_up:]]
    # What is read to write a checkpoint, or to validate, counts in the iteration that follows it.
    assert sorted(reads)[len(reads) // 2] <= most, reads
    assert all(row["perf/cpu_fallbacks"] == 0 for row in rows[warm_up:])
