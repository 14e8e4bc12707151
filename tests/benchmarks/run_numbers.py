"""Seconds that an iteration spends on numbers about it and on the doctor, beside its own.

python -m tests.benchmarks.run_numbers
"""

import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from litgrpo.callbacks.iteration_metrics import IterationMetrics
from litgrpo.tools.doctor.callback import Doctor
from litgrpo.training.grpo import GRPO

SECONDS: dict[str, list[float]] = defaultdict(list)
ITERATIONS = 40
RECIPE = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def time_method(kind: type, name: str) -> None:
    """Note the seconds of every call of a method."""
    method = vars(kind)[name]

    def call(self, *args, **kwargs):
        began = time.perf_counter()
        result = method(self, *args, **kwargs)
        SECONDS[f"{kind.__name__}.{name}"].append(time.perf_counter() - began)
        return result

    setattr(kind, name, call)


def main() -> None:
    """Train the quickstart for a while."""
    from litgrpo.cli.lightning_cli import LitGRPOCLI

    for kind, names in {
        GRPO: ["training_step"],
        IterationMetrics: ["on_train_batch_end"],
        Doctor: ["on_train_batch_start", "on_train_batch_end"],
    }.items():
        for name in names:
            time_method(kind, name)
    with TemporaryDirectory() as folder:
        words = ["-c", str(RECIPE), "--run_dir", folder]
        words += ["--model.max_iterations", str(ITERATIONS), "--trainer.limit_val_batches", "0"]
        LitGRPOCLI("fit", words)
    step = sum(SECONDS["GRPO.training_step"])
    for name, seconds in SECONDS.items():
        share = sum(seconds) / step
        print(f"{name}: median {1000 * median(seconds):.2f} ms, {share:.2%} of the steps in all")


if __name__ == "__main__":
    main()
