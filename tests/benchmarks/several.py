"""CPU seconds of each process and iteration: one, two with DDP, two with FSDP2.

    python -m tests.benchmarks.several --turns 3

The quickstart's model, task and sizes (16 prompts, 8 completions of at most 40 tokens), one thread
each, in turns. Printed: the median over all iterations but the first two of each turn, of process
0; wall seconds of a machine with fewer cores than processes would mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from litgrpo.data.modules import PromptData
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from litgrpo.rewards import correctness
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.training.grpo import GRPO
from tests.support.gloo import run_by

SIDES = {"1 process": 1, "2 processes, DDP": 2, "2 processes, FSDP2": 2}


class Watch(Callback):
    """CPU seconds of each iteration."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.before = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """It begins."""
        self.before = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """It has ended."""
        self.seconds.append(time.process_time() - self.before)


def learn(processes: int, side: str, iterations: int, file: str) -> None:
    """Train; the first process writes down its seconds."""
    torch.set_num_threads(1)
    module = GRPO(
        "builtin:tiny-gemma2",
        {"correct": Reward(correctness)},
        max_completion_length=40,
        max_iterations=iterations,
        reward_runner=InProcessRunner(),
        check_invariants=False,
    )
    strategies: dict[str, Any] = dict(zip(SIDES, ("auto", "ddp", FSDP2Strategy()), strict=True))
    watch = Watch()
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategies[side],
        max_epochs=-1,
        use_distributed_sampler=False,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptData("python:litgrpo.data.examples.problems.train", batch_size=16))
    if trainer.is_global_zero:
        torch.save(watch.seconds, file)


def main() -> None:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    args = parser.parse_args()
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.pt"
        for _ in range(args.turns):
            for side, processes in SIDES.items():
                run_by(processes, learn, side, args.iterations, str(file))
                found[side] += torch.load(file)[2:]
    for side, seconds in found.items():
        low, middle, high = (statistics.quantiles(seconds, n=4)[n] for n in range(3))
        print(f"{side:>20}: {middle:.3f} s [{low:.3f}, {high:.3f}], N = {len(seconds)}")


if __name__ == "__main__":
    from tests.benchmarks.several import main as imported  # forks find `learn` by its module

    imported()
