"""Measure the cost of a pool of episodes: steps that take no time, and steps that wait.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.episodes

Prints Markdown: medians over repetitions of 32 episodes of 3 turns.
"""

import statistics
import time

from litgrpo.environments.base import EpisodeStart, StepResult
from litgrpo.environments.workers import episode_pool

EPISODES, TURNS, REPETITIONS, WAIT_S = 32, 3, 9, 0.05


class Waiting:
    """Says a turn again, after a while."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s

    def reset(self, row, seed):
        return ""

    def step(self, action):
        time.sleep(self.wait_s)
        return StepResult(action)


def turn_s(environment: Waiting, workers: int) -> float:
    """Seconds of one turn of all episodes."""
    pool, found = episode_pool(environment, num_workers=workers), []
    for _ in range(REPETITIONS):
        pool.reset([EpisodeStart({}, n, (0, 0, n, 0)) for n in range(EPISODES)])
        started = time.perf_counter()
        for _ in range(TURNS):
            for n in range(EPISODES):
                pool.send(n, "a few words of text")
            left = EPISODES
            while left:
                left -= len(pool.receive(wait=True))
        found.append((time.perf_counter() - started) / TURNS)
    pool.close()
    return statistics.median(found)


def main() -> None:
    print("| played | a step, echo | 32 steps of 50 ms |\n|---|---|---|")
    for workers in (0, 2, 8, 32):
        place = f"{workers} processes" if workers else "in the training process"
        quick = 1e6 * turn_s(Waiting(), workers) / EPISODES
        slow = 1e3 * turn_s(Waiting(WAIT_S), workers)
        print(f"| {place} | {quick:.0f} us | {slow:.0f} ms |")


if __name__ == "__main__":
    main()
