"""Measure the overhead of a reward runner: 1,000 trivial samples, in this process and a worker.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.rewards

Prints Markdown: the median and the range of the time that the runner adds to calling the function
itself, over several repetitions, after one for warming up; and how long a hanging sample holds the
run up.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from collections.abc import Callable

from litgrpo.rewards import InProcessRunner, ProcessRunner, Reward, RewardRunner, Scorer
from tests.rewards.faulty import catastrophic_regex

SAMPLES, TOKENS, GROUP = 1000, 256, 8
TIMEOUT_S = 2.0


def trivial(prompts: list[str], completions: list[str], completion_ids: list[list[int]]):
    """The least that a function can do."""
    return [0.0] * len(completions)


def rows() -> tuple[list[str], list[str], dict[str, list]]:
    """Prompts, completions of about 256 tokens, and columns."""
    prompts = [f"How much is {n} + {n}? {'x' * 200}" for n in range(SAMPLES)]
    texts = [
        f"<reasoning>{'so ' * TOKENS}</reasoning><answer>{2 * n}</answer>" for n in range(SAMPLES)
    ]
    ids = [[(n * 31 + t) % 50_000 for t in range(TOKENS)] for n in range(SAMPLES)]
    return prompts, texts, {"completion_ids": ids}


def times(function: Callable, runner: RewardRunner, repetitions: int) -> list[float]:
    """Milliseconds of each repetition, less what the function itself takes."""
    prompts, texts, columns = rows()
    scorer = Scorer({"r": Reward(function)}, runner=runner)
    scorer(prompts, texts, columns, GROUP)
    found = []
    for _ in range(repetitions):
        start = time.perf_counter()
        scorer(prompts, texts, columns, GROUP)
        middle = time.perf_counter()
        function(prompts, texts, columns["completion_ids"])
        found.append(1000 * (2 * middle - start - time.perf_counter()))
    runner.close()
    return found


def hanging() -> list[float]:
    """Seconds that one sample in a catastrophic regular expression takes, of 16, five times."""
    runner = ProcessRunner(timeout_s=TIMEOUT_S)
    scorer = Scorer({"r": Reward(catastrophic_regex)}, runner=runner)
    texts = ["a"] * 15 + ["bad"]
    found = []
    for _ in range(5):
        start = time.perf_counter()
        table = scorer(["?"] * 16, texts, {}, 4)
        found.append(time.perf_counter() - start)
        assert table.valid.sum() == 15
    runner.close()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    count = parser.parse_args().repetitions
    cores = len(os.sched_getaffinity(0))
    logging.getLogger("litgrpo").setLevel(logging.ERROR)  # of the sample that hangs
    print(f"{SAMPLES} samples of {TOKENS} tokens, {count} repetitions, {cores} cores\n")
    print("| function | runner | median ms | lowest | highest |\n| --- | --- | --- | --- | --- |")
    cases: list[tuple[str, Callable, RewardRunner]] = [
        ("trivial", trivial, InProcessRunner()),
        ("trivial", trivial, ProcessRunner()),
    ]
    for name, function, runner in cases:
        ms = times(function, runner, count)
        numbers = (statistics.median(ms), min(ms), max(ms))
        kind = type(runner).__name__
        print(f"| {name} | {kind} |" + " |".join(f" {number:.1f}" for number in numbers) + " |")
    seconds = hanging()
    print(
        f"\nOne of 16 samples hangs in C code, timeout_s {TIMEOUT_S}: "
        f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    )


if __name__ == "__main__":
    main()
