"""Does litgrpo learn what TRL learns? The same weights, data, group, optimizer and steps for both.

    python -m tests.benchmarks.parity -c configs/quickstart.yaml --baseline-python PATH/bin/python

Three seeds. For each: litgrpo's run; its first completions passed to TRL, whose weights after each
of those steps are compared with litgrpo's; TRL's own run over the same prompts in the same order,
whose checkpoints litgrpo evaluates with the same random numbers. `--handed` leaves TRL's own
run out. What is in the folder already is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback
from scipy.special import stdtrit

from litgrpo.models.loading.export import export

ROOT = Path(__file__).parents[2]
HANDED = 3  # iterations whose completions TRL learns, too
# {litgrpo's loss_aggregation: TRL's loss with the same divisor}, with one step per rollout.
LOSSES = {"token_mean": "dapo", "sequence_mean": "grpo"}
LAST = 5  # the share of the iterations, one of five, whose mean reward is compared separately


class Recorder(Callback):
    """Write the inputs for TRL: initial policy, prompts, settings, first completions.

    Args:
        folder: where.
        every: iterations between checkpoints of TRL.
    """

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = Path(folder), every
        self.handed: list[dict[str, Any]] = []
        self.prompts: list[dict[str, Any]] = []
        self.began = (0.0, 0.0)
        self.steps: list[dict[str, float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The weights before the first step."""
        export(pl_module.policy, self.folder / "start")

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clocks."""
        self.began = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Note the prompts, and of the first iterations completions and weights."""
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        self.steps.append({"step_s": wall, "cpu_s": cpu})
        rollout = outputs["iteration"].rollout
        batch = rollout.prompts
        ids = rows_of(batch.prompt_ids, batch.prompt_mask)
        for place, prompt in enumerate(batch.prompts):
            columns = {name: values[place] for name, values in batch.columns.items()}
            self.prompts.append({"prompt": prompt, "ids": ids[place], "columns": columns})
        if pl_module.iteration <= HANDED:
            completions = rows_of(rollout.completion_ids, rollout.completion_mask)
            prompts = [row for row in ids for _ in range(rollout.group_size)]
            self.handed.append({"prompt_ids": prompts, "completion_ids": completions})
            parameters = pl_module.policy.bare_model.named_parameters()
            weights = {name: weight.detach().clone() for name, weight in parameters}
            torch.save(weights, self.folder / f"weights {pl_module.iteration}.pt")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write it all."""
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        model, objective = config["model"]["init_args"], pl_module.objective
        settings = {
            "seed": config["seed_everything"],
            "threads": torch.get_num_threads(),
            "iterations": pl_module.iteration,
            "every": self.every,
            "batch_size": config["data"]["init_args"]["batch_size"],
            "group_size": model["group_size"],
            "max_completion_length": model["max_completion_length"],
            "max_grad_norm": pl_module.update.max_grad_norm,
            "temperature": model["sampling"]["temperature"],
            "bf16": trainer.precision == "bf16-mixed",
            "kl_coef": objective.kl_coef,
            "kl_bias_correction": objective.kl_bias_correction,
            "loss_type": LOSSES[objective.loss_aggregation],
            "optimizer": model["optimizer"],
            "lr_scheduler": model["lr_scheduler"],
            "rewards": model["rewards"],
            "ends": list(pl_module.policy.eos_ids),
        }
        (self.folder / "settings.json").write_text(json.dumps(settings))
        (self.folder / "steps.json").write_text(json.dumps(self.steps))
        lines = (json.dumps(row) + "\n" for row in self.prompts)
        (self.folder / "prompts.jsonl").write_text("".join(lines))
        torch.save(self.handed, self.folder / "handed.pt")


def rows_of(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The tokens of each row without its padding."""
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


@dataclass(frozen=True)
class Pair:
    """The runs of one seed.

    Args:
        recipe: of litgrpo.
        seed: of both.
        folder: of both.
        baseline: Python of an environment with TRL.
        every: iterations between evaluations.
        further: options for litgrpo's command line.
        only_handed: leave out TRL's own run.
    """

    recipe: str
    seed: int
    folder: Path
    baseline: str
    every: int
    further: tuple[str, ...] = ()
    only_handed: bool = False

    @property
    def litgrpo(self) -> Path:
        """Run folder of litgrpo."""
        return self.folder / f"seed {self.seed}" / "litgrpo"

    @property
    def theirs(self) -> Path:
        """TRL's checkpoints."""
        return self.folder / f"seed {self.seed}" / "trl"

    @property
    def handed(self) -> Path:
        """TRL's weights after steps on litgrpo's completions."""
        return self.folder / f"seed {self.seed}" / "trl, handed"

    def run(self) -> None:
        """Train both, and evaluate TRL's checkpoints."""
        if not (self.litgrpo / "settings.json").exists():
            words = ["fit", "-c", self.recipe, "--run_dir", str(self.litgrpo)]
            words += ["--overwrite", "true", "--seed_everything", str(self.seed), *self.further]
            words += ["--trainer.val_check_interval", str(self.every)]
            words += ["--trainer.callbacks+=tests.benchmarks.parity.Recorder"]
            words += [f"--trainer.callbacks.folder={self.litgrpo}"]
            words += [f"--trainer.callbacks.every={self.every}"]
            call_program(sys.executable, "-m", "litgrpo", *words)
        runs = {self.handed: ["--handed"]}
        if not self.only_handed:
            runs[self.theirs] = []
        for folder, options in runs.items():
            if not (folder / "steps.json").exists():
                module = "tests.benchmarks.trl_parity"
                call_program(self.baseline, "-m", module, str(self.litgrpo), str(folder), *options)
        for checkpoint in self.checkpoints():
            folder = checkpoint / "evaluated"
            if not (folder / "validate.json").exists():
                words = ["validate", "-c", self.recipe, "--model.pretrained", str(checkpoint)]
                words += ["--run_dir", str(folder), "--seed_everything", str(self.seed)]
                call_program(sys.executable, "-m", "litgrpo", *words, *self.further)

    def checkpoints(self) -> list[Path]:
        """Checkpoints of TRL, in order."""
        return sorted(self.theirs.glob("checkpoint-*"), key=number_of)

    def differences(self) -> list[tuple[float, float]]:
        """Return each shared step's weight distance, relative to the norm and to the update."""
        start, distances = flat(load_initial_weights(self.litgrpo / "start")), []
        for step in range(1, HANDED + 1):
            files = [folder / f"weights {step}.pt" for folder in (self.litgrpo, self.handed)]
            litgrpo, theirs = (flat(torch.load(file)) for file in files)
            off = (litgrpo - theirs).norm()
            distances.append((float(off / litgrpo.norm()), float(off / (litgrpo - start).norm())))
        return distances

    def held_out(self, name: str) -> tuple[list[int], list[float], list[float]]:
        """Iterations, and held-out accuracies of litgrpo and TRL."""
        litgrpo = self.logged("val/greedy" if name == "greedy" else r"val/avg@\d+")
        theirs = [
            json.loads((checkpoint / "evaluated" / "validate.json").read_text())[name]
            for checkpoint in self.checkpoints()
        ]
        steps = [0, *map(number_of, self.checkpoints())]
        return steps, litgrpo, [litgrpo[0], *theirs]

    def rewards(self) -> tuple[list[float], list[float]]:
        """Mean rewards of each iteration, of litgrpo and TRL."""
        theirs = json.loads((self.theirs / "steps.json").read_text())
        return self.logged("reward/mean"), [row["reward"] for row in theirs]

    def logged(self, pattern: str) -> list[float]:
        """Values of the first number of litgrpo's log whose name matches."""
        with (self.litgrpo / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        name = next(name for name in rows[0] if re.fullmatch(pattern, name))
        return [float(row[name]) for row in rows if row[name]]

    def seconds(self, folder: Path) -> tuple[float, float]:
        """Medians of wall and processor seconds of a step of one side."""
        rows = json.loads((folder / "steps.json").read_text())
        wall, cpu = (statistics.median(row[name] for row in rows) for name in ("step_s", "cpu_s"))
        return wall, cpu


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """All numbers, by the order of their names."""
    return torch.cat([weights[name].detach().double().flatten() for name in sorted(weights)])


def load_initial_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters())


def number_of(checkpoint: Path) -> int:
    """The iteration in a checkpoint's name."""
    return int(checkpoint.name.rpartition("-")[2])


def call_program(*words: str) -> None:
    """Run a command at the root."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    done = subprocess.run(
        words,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def interval(litgrpo: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Mean difference of two samples and its 95 % interval (Welch's t, freedom rounded down)."""
    parts = [statistics.variance(side) / len(side) for side in (litgrpo, theirs)]
    middle = statistics.mean(litgrpo) - statistics.mean(theirs)
    if not any(parts):
        return middle, middle, middle
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (litgrpo, theirs), strict=True)
    )
    reach = float(stdtrit(int(freedom), 0.975)) * math.sqrt(sum(parts))
    return middle, middle - reach, middle + reach


def tables(pairs: list[Pair]) -> list[list[str]]:
    """Lines of each table, in Markdown: distances of weights, what was learned, seconds."""
    steps = ["| seed | after step 1 | 2 | 3 |", "|---|---|---|---|"]
    for pair in pairs:
        cells = " | ".join(f"{off:.1e} ({way:.1e})" for off, way in pair.differences())
        steps.append(f"| {pair.seed} | {cells} |")
    if pairs[0].only_handed:
        return [steps]
    learned = [
        "| | litgrpo, by seed | TRL, by seed | difference of the means |",
        "|---|---|---|---|",
    ]
    for title, values in measures(pairs).items():
        litgrpo, theirs = (list(side) for side in zip(*values, strict=True))
        middle, low, high = interval(litgrpo, theirs)
        sides = (", ".join(f"{value:.3f}" for value in side) for side in (litgrpo, theirs))
        cells = [title, *sides, f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]"]
        learned.append(f"| {' | '.join(cells)} |")
    seconds = [
        "| seed | litgrpo, s | TRL, s | ratio | of processor seconds |",
        "|---|---|---|---|---|",
    ]
    for pair in pairs:
        litgrpo, theirs = pair.seconds(pair.litgrpo), pair.seconds(pair.theirs)
        wall, cpu = (b / a for a, b in zip(litgrpo, theirs, strict=True))
        seconds.append(
            f"| {pair.seed} | {litgrpo[0]:.2f} | {theirs[0]:.2f} | {wall:.1f} | {cpu:.1f} |"
        )
    return [steps, learned, seconds]


def measures(pairs: list[Pair]) -> dict[str, list[tuple[float, float]]]:
    """Return {metric: litgrpo's and TRL's value for each seed}."""
    by_title: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        litgrpo, theirs = pair.rewards()
        mean, last = statistics.mean, len(litgrpo) // LAST
        values = {
            "mean reward of all iterations": (mean(litgrpo), mean(theirs)),
            f"mean reward of the last {last}": (mean(litgrpo[-last:]), mean(theirs[-last:])),
        }
        for title, name in (("sampled", "avg_at_k"), ("greedy", "greedy")):
            steps, one, two = pair.held_out(name)
            middle = len(steps) // 2
            at = f"held-out accuracy, {title}"
            values[f"{at}, iteration {steps[middle]}"] = one[middle], two[middle]
            values[f"{at}, at the end"] = one[-1], two[-1]
        for title, both in values.items():
            by_title.setdefault(title, []).append(both)
    return by_title


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", dest="recipe", default="configs/quickstart.yaml")
    parser.add_argument("--baseline-python", required=True, help="of an environment with trl")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/parity"))
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument(
        "--handed", action="store_true", help="only the steps on litgrpo's completions"
    )
    options, further = parser.parse_known_args()
    pairs = [
        Pair(
            options.recipe,
            seed,
            options.folder.absolute(),
            options.baseline_python,
            options.every,
            tuple(further),
            options.handed,
        )
        for seed in options.seeds
    ]
    for pair in pairs:
        pair.run()
    for lines in tables(pairs):
        print(*lines, "", sep="\n")


if __name__ == "__main__":
    main()
