"""Makes the corpus: seeded failures and healthy runs, labelled by what they really came to.

python -m tests.tools.doctor.corpus make --half dev        the runs of a half that are not there yet
python -m tests.tools.doctor.corpus pack --half dev        into tests/doctor/labelled/
"""

import argparse
import csv
import gzip
import io
import json
import shutil
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import Callback, Trainer

from litgrpo.algorithms.losses import Objective, TokenMean
from litgrpo.callbacks.completions import Completions
from litgrpo.callbacks.metrics_csv import MetricsCSV
from litgrpo.callbacks.non_finite import NonFinite
from litgrpo.data.prompt_data import PromptData
from litgrpo.evaluation.settings import Evaluation
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.training.grpo import GRPO
from tests.tools.doctor.kinds import CUT, FAULTS, HEALTHY, ITERATIONS, Hidden, Kind, correct
from tests.tools.doctor.tasks import DEV, UNSEEN, Truth, held_out, model_of, probe, rows

# Neither a task nor a seed is in both halves.
HALVES = {
    "dev": [(task, seed) for seed, task in enumerate(DEV * 2)],
    "held_out": [(task, 100 + seed) for seed, task in enumerate(UNSEEN * 2)],
}
REPEATS = {"dev": (1, 1), "held_out": (4, 4)}  # of a fault's and of a healthy kind's runs
PACKED = Path(__file__).parent / "labelled"
DIGITS, PROBED = 4, 5
DROPPED = ("time/", "perf/", "checkpoint/")  # say nothing about learning, and differ by machine
SAMPLES = 8  # rows of samples that are kept, of the first and of the last file


class Beside(Callback):
    """Asks the model beside the run, every few iterations."""

    def __init__(self, task: str) -> None:
        self.task, self.iterations, self.truths = task, [], []
        self.before: list[torch.Tensor] = []

    def ask(self, module: Any) -> None:
        model = module.policy.bare_model
        training = model.training
        self.iterations.append(module.iteration)
        self.truths.append(probe(model.eval(), module.policy.tokenizer, self.task))
        model.train(training)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.before = [each.detach().clone() for each in pl_module.parameters()]
        self.ask(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.iteration % PROBED == 0:
            self.ask(pl_module)

    def moved(self, module: Any) -> float:
        pairs = list(zip(module.parameters(), self.before, strict=True))
        change = sum(float((now - then).nan_to_num(0.0).square().sum()) for now, then in pairs)
        return (change / sum(float(then.square().sum()) for _, then in pairs)) ** 0.5


class Doubled(PromptData):
    """Puts a second begin token in front of every prompt, as a template would."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for prompts in self.sets.values():
            for ids in prompts.ids:
                ids.insert(0, 1)


def settings_of(kind: Kind, task: str, seed: int) -> dict[str, Any]:
    """What GRPO is given."""
    plain = {
        "pretrained": model_of(task, kind.teacher),
        "rewards": {"correct": Reward(correct)},
        "objective": Objective(loss_aggregation=TokenMean()),
        "group_size": 8,
        "max_completion_length": 10,
        "evaluation": Evaluation(samples=2, pass_at=[1], fluency=False),
        "optimizer": lambda trained: torch.optim.AdamW(trained, lr=kind.lr, weight_decay=0.0),
        "lr_scheduler": kind.schedule,
        "max_iterations": ITERATIONS,
        "check_invariants": False,
        "reward_runner": InProcessRunner(),
        "seed": seed,
    }
    return plain | kind.settings()


def config_of(given: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """The recipe as `config.yaml` would have it; what was planted beside it is not in it."""
    model = {
        name: given[name] for name in ("group_size", "max_completion_length", "max_iterations")
    }
    objective = given["objective"]
    model["objective"] = {
        name: getattr(objective, name) for name in ("ratio", "kl_coef", "entropy_coef")
    }
    model["update"] = asdict(given["update"]) if "update" in given else {}
    model["optimizer"] = {"init_args": {"lr": kind.lr}}
    model["rewards"] = {name: {"weight": each.weight} for name, each in given["rewards"].items()}
    if "sampling" in given:
        model["sampling"] = {"temperature": given["sampling"].temperature}
    if "lora" in given:
        model["lora"] = {"rank": given["lora"].rank}
    return {"model": {"init_args": model}, "data": {"init_args": {"batch_size": kind.batch}}}


def train(kind: Kind, task: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run; its label by what it came to."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    given, beside, non_finite = settings_of(kind, task, seed), Beside(task), NonFinite(None)
    module = GRPO(**given)
    source = Doubled if kind.doubled else PromptData
    train_rows = rows(task, kind.words)[: kind.rows]
    data = source(train_rows, val=held_out(task)[:40], batch_size=kind.batch, seed=seed)
    data.eval_batch_size = 40
    trainer = Trainer(
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        callbacks=[beside, non_finite, Completions(20), *kind.callbacks()],
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
    started, error = time.perf_counter(), ""
    try:
        trainer.fit(module, data)
    except Exception as stopped:  # whatever a fault leads to is part of its run
        error = f"{type(stopped).__name__}: {stopped}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config_of(given, kind)))
    moved = beside.moved(module)
    hidden = Hidden(beside.iterations, beside.truths, moved, non_finite.skipped)
    label = {
        "kind": kind.name,
        "task": task,
        "seed": seed,
        "error": error,
        "seconds": round(time.perf_counter() - started, 1),
        "moved": hidden.moved,
        "skipped": hidden.skipped,
        "accuracy": [round(each.accuracy, 3) for each in hidden.truths],
        "ended": [round(each.ended, 3) for each in hidden.truths],
    }
    (folder / "label.json").write_text(json.dumps(label))
    return label | labelled(kind, hidden)


def hidden_of(label: dict[str, Any]) -> Hidden:
    """What was measured beside a run, from its file."""
    pairs = zip(label["accuracy"], label["ended"], strict=True)
    truths = [Truth(accuracy, ended) for accuracy, ended in pairs]
    iterations = [PROBED * n for n in range(len(truths))]
    return Hidden(iterations, truths, label["moved"], label["skipped"])


def labelled(kind: Kind, hidden: Hidden) -> dict[str, Any]:
    """Failed, healthy, or unclear: one that nothing was done to and that learned nothing."""
    suffers = bool(kind.expected) and kind.truth(hidden)
    if not suffers and hidden.ends_less:  # whatever was meant
        return {"label": "failed", "expected": list(CUT), "since": hidden.end_lost_at}
    if not suffers:
        return {"label": "healthy" if hidden.learned else "unclear", "expected": []}
    since = kind.since if kind.since is not None else onset(kind, hidden)
    return {"label": "failed", "expected": list(kind.expected), "since": since}


def onset(kind: Kind, hidden: Hidden) -> int:
    """Iteration of the first measurement at which the truth holds."""
    for n in range(1, len(hidden.truths) + 1):
        known = replace(hidden, iterations=hidden.iterations[:n], truths=hidden.truths[:n])
        if kind.truth(known):
            return max(1, hidden.iterations[n - 1])
    return 1


def wanted(half: str) -> list[tuple[Kind, str, int, str]]:
    """Kind, task, seed and name of every run of a half."""
    faults, healthy = REPEATS[half]
    return [
        (kind, task, seed, f"{kind.name}-{task}-{seed}")
        for repeat in range(max(faults, healthy))
        for kinds, repeats in ((FAULTS, faults), (HEALTHY, healthy))
        for number, kind in enumerate(kinds)
        for task, seed in [HALVES[half][(number + repeat) % len(HALVES[half])]]
        if repeat < repeats
    ]


def make(half: str, folder: Path, seconds: float, only: str) -> None:
    """Run what is not there yet, until the time is used up."""
    began, missing = time.perf_counter(), 0
    for kind, task, seed, name in wanted(half):
        if (folder / half / name / "label.json").exists() or only not in name:
            continue
        if time.perf_counter() - began > seconds:
            missing += 1
            continue
        label = train(kind, task, seed, folder / half / name)
        accuracy = label["accuracy"]
        print(
            name,
            label["label"],
            accuracy[0],
            accuracy[-1],
            label["seconds"],
            label["error"][:90],
            flush=True,
        )
    print(f"{half}: {missing} runs are missing", flush=True)


def pack(half: str, folder: Path) -> None:
    """The labelled metrics of all runs in one file."""
    PACKED.mkdir(exist_ok=True)
    lines = []
    for kind, _, _, name in wanted(half):
        run = folder / half / name
        if not (run / "label.json").exists():
            print("missing", name)
            continue
        label = json.loads((run / "label.json").read_text())
        label |= labelled(kind, hidden_of(label))
        rows = list(csv.DictReader(io.StringIO((run / "metrics.csv").read_text())))
        files = sorted((run / "samples").glob("*.jsonl"))
        chosen = [*files[:1], *files[1:][-1:]]
        samples = [json.loads(x) for f in chosen for x in f.read_text().splitlines()[:SAMPLES]]
        kept = [each for each in rows[0] if not each.startswith(DROPPED)]
        table = {name: [rounded(row[name]) for row in rows] for name in kept}
        config = yaml.safe_load((run / "config.yaml").read_text())
        lines.append(
            {"name": name, "label": label, "config": config, "samples": samples, "table": table}
        )
    with gzip.GzipFile(PACKED / f"{half}.jsonl.gz", "wb", mtime=0) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def rounded(cell: str) -> float | None:
    """A cell with four digits, None where it is empty."""
    return float(f"{float(cell):.{DIGITS}g}") if cell else None


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=("make", "pack"))
    parser.add_argument("--half", choices=HALVES, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if given.verb == "make":
        make(given.half, given.folder, given.seconds, given.only)
    else:
        pack(given.half, given.folder)


if __name__ == "__main__":
    main()
