"""Time of reading the state of a checkpoint: `python -m tests.checkpointing.cost`.

Runs the quickstart for some iterations, with TensorBoard and CSV and without loggers, and prints
medians: of the whole state, which is read when a file is written, and of the snapshot that
every iteration takes, so that a dropped iteration can be undone.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from litgrpo.checkpointing.callback import Boundary
from litgrpo.cli.main import main as program

MEASURES: dict[str, Callable[[Any], Any]] = {
    "whole state": lambda trainer: trainer._checkpoint_connector.dump_checkpoint(False),
    "snapshot": Boundary.capture,
}


class Timed(Callback):
    """Measures both after every iteration."""

    def __init__(self) -> None:
        self.took_ms: dict[str, list[float]] = {name: [] for name in MEASURES}

    def on_train_batch_end(self, trainer, *_) -> None:
        for name, ask in MEASURES.items():
            started = time.perf_counter()
            ask(trainer)
            self.took_ms[name].append(1000 * (time.perf_counter() - started))

    def on_train_end(self, trainer, pl_module) -> None:
        for name, took in self.took_ms.items():
            largest = max(took)
            print(f"MEDIAN {name}: {statistics.median(took):.3f} ms, maximum {largest:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=50)
    iterations = str(parser.parse_args().iterations)
    recipe = ["fit", "-c", "configs/quickstart.yaml", "--model.max_iterations", iterations]
    recipe += ["--trainer.callbacks+=tests.checkpointing.cost.Timed"]
    recipe += ["--trainer.limit_val_batches", "1"]
    for loggers in ("true", "false"):
        print(f"LOGGERS {loggers}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            run = ["--run_dir", folder, "--tensorboard", loggers, "--csv", loggers]
            sys.argv = ["cli.py", *recipe, *run]
            program()


if __name__ == "__main__":
    main()
