"""Make the corpus: planted faults and healthy runs, labelled by measured outcomes."""

import csv
import gzip
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import Callback, Trainer

from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.completions import Completions
from litgrpo.callbacks.guards import NonFinite
from litgrpo.callbacks.loggers import MetricsCSV
from litgrpo.data.modules import PromptData
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards import Scoring
from litgrpo.rewards.reward import Reward
from tests.runs.doctor.kinds import CUT, FAULTS, HEALTHY, ITERATIONS, Kind, Measurements, correct
from tests.runs.doctor.tasks import DEV, UNSEEN, Truth, held_out, model_of, probe, rows

# Neither a task nor a seed is in both halves.
HALVES = {
    "dev": [(task, seed) for seed, task in enumerate(DEV * 2)],
    "held_out": [(task, 100 + seed) for seed, task in enumerate(UNSEEN * 2)],
}
REPEATS = {"dev": (1, 1), "held_out": (4, 4)}  # of a fault's and of a healthy kind's runs
PACKED = Path(__file__).parent / "labelled"
DIGITS, PROBED = 4, 5
DROPPED = ("time/", "perf/", "checkpoint/")  # differ by machine
SAMPLES = 8  # rows kept of the first and of the last file of samples


class Probe(Callback):
    """Measure the model every few iterations, independently of the log."""

    def __init__(self, task: str) -> None:
        self.task, self.iterations, self.truths = task, [], []
        self.before: list[torch.Tensor] = []

    def measure(self, module: Any) -> None:
        model = module.policy.bare_model
        training = model.training
        self.iterations.append(module.iteration)
        self.truths.append(probe(model.eval(), module.policy.tokenizer, self.task))
        model.train(training)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.before = [weight.detach().clone() for weight in pl_module.parameters()]
        self.measure(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.iteration % PROBED == 0:
            self.measure(pl_module)

    def relative_change(self, module: Any) -> float:
        pairs = list(zip(module.parameters(), self.before, strict=True))
        change = sum(float((now - then).nan_to_num(0.0).square().sum()) for now, then in pairs)
        return (change / sum(float(then.square().sum()) for _, then in pairs)) ** 0.5


class TwoBeginTokens(PromptData):
    """Prompts with a second begin token, as a wrong chat template writes."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for prompts in self.sets.values():
            for ids in prompts.ids:
                ids.insert(0, 1)


def arguments_of(kind: Kind, task: str, seed: int) -> dict[str, Any]:
    """Return the arguments of GRPO."""
    defaults = {
        "pretrained": model_of(task, kind.demonstrator),
        "rewards": {"correct": Reward(correct)},
        "objective": Objective(),
        "group_size": 8,
        "max_completion_length": 10,
        "evaluation": Evaluation(num_samples=2, pass_at_k=[1], text_quality=False),
        "optimizer": lambda trained: torch.optim.AdamW(trained, lr=kind.lr, weight_decay=0.0),
        "lr_scheduler": kind.schedule,
        "max_iterations": ITERATIONS,
        "check_invariants": False,
        "scoring": Scoring(num_workers=0),
        "seed": seed,
    }
    return defaults | kind.settings()


def config_of(arguments: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the config as `config.yaml` has it, without the planted fault."""
    sizes = ("group_size", "max_completion_length", "max_iterations")
    coefficients = ("importance_sampling_level", "kl_coef", "entropy_coef")
    model = {name: arguments[name] for name in sizes}
    model["objective"] = {name: getattr(arguments["objective"], name) for name in coefficients}
    model["update"] = asdict(arguments["update"]) if "update" in arguments else {}
    model["optimizer"] = {"init_args": {"lr": kind.lr}}
    rewards = arguments["rewards"]
    model["rewards"] = {name: {"weight": reward.weight} for name, reward in rewards.items()}
    if "sampling" in arguments:
        model["sampling"] = {"temperature": arguments["sampling"].temperature}
    if "lora" in arguments:
        model["lora"] = {"rank": arguments["lora"].rank}
    return {"model": {"init_args": model}, "data": {"init_args": {"batch_size": kind.batch}}}


def train(kind: Kind, task: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one run; return its label."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    arguments, measured, non_finite = arguments_of(kind, task, seed), Probe(task), NonFinite(None)
    module = GRPO(**arguments)
    source = TwoBeginTokens if kind.two_begin_tokens else PromptData
    train_rows = rows(task, kind.words)[: kind.rows]
    data = source(train_rows, val=held_out(task)[:40], batch_size=kind.batch, seed=seed)
    data.eval_batch_size = 40
    trainer = Trainer(
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        callbacks=[measured, non_finite, Completions(20), *kind.callbacks()],
        accelerator="cpu",
        max_epochs=-1,
        val_check_interval=20,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    error = ""
    try:
        trainer.fit(module, data)
    except Exception as exception:  # a planted fault may stop its run
        error = f"{type(exception).__name__}: {exception}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config_of(arguments, kind)))
    moved = measured.relative_change(module)
    measurements = Measurements(measured.iterations, measured.truths, moved, non_finite.skipped)
    label = {
        "kind": kind.name,
        "task": task,
        "seed": seed,
        "error": error,
        "moved": measurements.moved,
        "skipped": measurements.skipped,
        "accuracy": [round(truth.accuracy, 3) for truth in measurements.truths],
        "ended": [round(truth.ended, 3) for truth in measurements.truths],
    }
    (folder / "label.json").write_text(json.dumps(label))
    return label | label_run(kind, measurements)


def measurements_of(label: dict[str, Any]) -> Measurements:
    """Rebuild the measurements of a run from its label."""
    pairs = zip(label["accuracy"], label["ended"], strict=True)
    truths = [Truth(accuracy, ended) for accuracy, ended in pairs]
    iterations = [PROBED * n for n in range(len(truths))]
    return Measurements(iterations, truths, label["moved"], label["skipped"])


def label_run(kind: Kind, measurements: Measurements) -> dict[str, Any]:
    """Label a run: failed, healthy, or unclear if it has no fault and learned nothing."""
    failed = bool(kind.expected) and kind.failed(measurements)
    if not failed and measurements.ends_less:  # regardless of the planted fault
        return {"label": "failed", "expected": list(CUT), "since": measurements.end_lost_at}
    if not failed:
        return {"label": "healthy" if measurements.learned else "unclear", "expected": []}
    since = kind.since if kind.since is not None else onset(kind, measurements)
    return {"label": "failed", "expected": list(kind.expected), "since": since}


def onset(kind: Kind, measurements: Measurements) -> int:
    """Return the iteration of the first measurement that shows the fault."""
    for n in range(1, len(measurements.truths) + 1):
        known = replace(
            measurements, iterations=measurements.iterations[:n], truths=measurements.truths[:n]
        )
        if kind.failed(known):
            return max(1, measurements.iterations[n - 1])
    return 1


def list_runs(half: str) -> list[tuple[Kind, str, int, str]]:
    """Return kind, task, seed and name of every run of a half."""
    faults, healthy = REPEATS[half]
    return [
        (kind, task, seed, f"{kind.name}-{task}-{seed}")
        for repeat in range(max(faults, healthy))
        for kinds, repeats in ((FAULTS, faults), (HEALTHY, healthy))
        for number, kind in enumerate(kinds)
        for task, seed in [HALVES[half][(number + repeat) % len(HALVES[half])]]
        if repeat < repeats
    ]


def make(half: str, folder: Path, only: str = "") -> None:
    """Train the missing runs whose names contain `only`."""
    for kind, task, seed, name in list_runs(half):
        if (folder / half / name / "label.json").exists() or only not in name:
            continue
        label = train(kind, task, seed, folder / half / name)
        accuracy, error = label["accuracy"], label["error"][:90]
        print(name, label["label"], accuracy[0], accuracy[-1], error, flush=True)


def pack(half: str, folder: Path) -> None:
    """Write the labelled metrics of all runs into one file."""
    lines = []
    for kind, _, _, name in list_runs(half):
        run = folder / half / name
        if not (run / "label.json").exists():
            print("missing", name)
            continue
        label = json.loads((run / "label.json").read_text())
        label |= label_run(kind, measurements_of(label))
        with (run / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        files = sorted((run / "samples").glob("*.jsonl"))
        first_and_last = [*files[:1], *files[1:][-1:]]
        samples = [
            json.loads(line)
            for path in first_and_last
            for line in path.read_text().splitlines()[:SAMPLES]
        ]
        metrics = [name for name in rows[0] if not name.startswith(DROPPED)]
        table = {name: [round_cell(row[name]) for row in rows] for name in metrics}
        config = yaml.safe_load((run / "config.yaml").read_text())
        lines.append(
            {"name": name, "label": label, "config": config, "samples": samples, "table": table}
        )
    with gzip.GzipFile(PACKED / f"{half}.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def round_cell(cell: str) -> float | None:
    """Return the number in a cell with four digits, None if it is empty."""
    return float(f"{float(cell):.{DIGITS}g}") if cell else None
