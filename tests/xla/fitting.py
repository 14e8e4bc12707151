"""`cli.py fit` in this process, on the CPU or through XLA, and what a run was seen to do."""

import csv
import math
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback
from torch import Tensor

from litgrpo.cli.main import main
from litgrpo.distributed.device import to_host
from litgrpo.types import Rollout
from tests.faults.running import merge_runs

OVERLAYS = {"cpu": "configs/hardware/cpu.yaml", "xla": "configs/hardware/xla_cpu.yaml"}
# The quickstart in small: epochs of seven iterations, with prompts and completions of any length.
SMALL: dict[str, Any] = {
    "model": {
        "init_args": {
            "rewards": {
                "correct": {"function": "litgrpo.rewards.correctness", "weight": 0.8},
                "format": {
                    "function": "litgrpo.rewards.reasoning_answer",
                    "weight": 0.2,
                },
            },
            "scoring": {"num_workers": 0},
            "group_size": 4,
            "check_invariants": False,
            "update": {"micro_batch_size": 12},
        }
    },
    "data": {
        "init_args": {
            "train": "python:litgrpo.data.examples.problems.train?size=28",
            "val": {"path": "python:litgrpo.data.examples.problems.held_out", "limit": 8},
            "batch_size": 4,
            "eval_batch_size": 8,
        }
    },
    "trainer": {"val_check_interval": 5, "enable_progress_bar": False},
    "checkpoint": {"every_n_iterations": 3},
    "tensorboard": False,
}


@dataclass
class Seen:
    """Observations of a run.

    Args:
        rollouts: of each iteration.
        gradients: {name: tensor} before the first optimizer step, clipped.
        rows: of metrics.csv, one for each iteration.
        weights: {name: tensor} at the end.
        at_end: what `Watcher.look` found on the device after the last iteration.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    at_end: Any = None

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


class Watcher(Callback):
    """Keeps what the newest run did in `Watcher.seen`."""

    seen = Seen()
    look: Any = None  # trainer, module -> something to keep

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.seen.gradients:
            named = {n: p for n, p in pl_module.named_parameters() if p.grad is not None}
            hosts = to_host([p.grad for p in named.values()])
            self.seen.gradients = {n: g.clone() for n, g in zip(named, hosts, strict=True)}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if isinstance(outputs, dict) and "iteration" in outputs:
            self.seen.rollouts.append(outputs["iteration"].rollout)

    def on_train_end(self, trainer, pl_module):
        named = dict(pl_module.policy.named_parameters())
        hosts = to_host(list(named.values()))
        self.seen.weights = {n: w.clone() for n, w in zip(named, hosts, strict=True)}
        if Watcher.look is not None:
            self.seen.at_end = Watcher.look(trainer, pl_module)


def fit(
    where: str,
    iterations: int,
    *others: dict[str, Any],
    base: str = "configs/quickstart.yaml",
    folder: Path | None = None,
    words: tuple[str, ...] = (),
) -> Seen:
    """Train the quickstart in small.

    Args:
        where: a key of `OVERLAYS`.
        iterations: how many.
        others: further settings.
        base: the recipe below.
        folder: the run folder; else one that is gone afterwards.
        words: more of the command line.
    """
    Watcher.seen = Seen()
    settings = {"model": {"init_args": {"max_iterations": iterations}}}
    watcher = {"trainer": {"callbacks": [{"class_path": "tests.xla.fitting.Watcher"}]}}
    run = folder or Path(tempfile.mkdtemp()) / "run"
    recipe = Path(tempfile.mkdtemp()) / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merge_runs(settings, watcher, *others)))
    command = ["fit", "-c", base, "-c", OVERLAYS[where], "-c", str(recipe), "--run_dir", str(run)]
    sys.argv = ["cli.py", *command, "--debug", *words]
    assert main() == 0
    Watcher.seen.rows = read_rows(run)
    shutil.rmtree(recipe.parent)
    if folder is None:
        shutil.rmtree(run.parent)
    return Watcher.seen


def read_rows(run: Path) -> list[dict[str, float]]:
    """Read the rows of metrics.csv that belong to iterations."""
    with (run / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    kind = "optim/lr"
    return [{k: float(v) for k, v in line.items() if v} for line in lines if line.get(kind)]


def same_tokens(one: Rollout, other: Rollout) -> float:
    """Share of tokens that agree, up to the first of each row that does not."""
    width = min(one.completion_ids.shape[1], other.completion_ids.shape[1])
    ids, others = one.completion_ids[:, :width], other.completion_ids[:, :width]
    mask = one.completion_mask[:, :width] | other.completion_mask[:, :width]
    alike = (ids == others) | ~mask
    before = alike.long().cumprod(1).bool()
    # The token that differs counts, those after it do not: they continue another text.
    counted = mask & torch.cat([torch.ones_like(before[:, :1]), before[:, :-1]], 1)
    return float((alike & counted).sum() / counted.sum())


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference of named tensors over the norm of the first."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    off = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    size = sum(float(each.double().square().sum()) for each in one.values())
    return (off / size) ** 0.5


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
