"""Before and after: what the training changed on held-out prompts."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from litgrpo import __version__
from litgrpo.callbacks.report import BOUNDS, entries, plain_names
from litgrpo.callbacks.run_folder import CONFIG, may_write, run_folder
from litgrpo.callbacks.validating import validate_now

Evaluation = dict[str, Any]  # report {name: number}, n, reward_names, samples


class Summary(Callback):
    """Writes `summary.json` and prints a table: the held-out evaluation before and after training.

    Before is the validation that runs before the first iteration (`trainer.num_sanity_val_steps`
    is -1 by default here); after is the one that follows the last iteration. The verbs validate
    and test print their evaluation and write it to `validate.json` and `test.json`.

    Args:
        num_samples: how many prompts to show with one completion each, before and after.
    """

    def __init__(self, num_samples: int = 3) -> None:
        """Nothing is known yet."""
        self.num_samples = num_samples
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.after_iteration = -1
        self.trained_s = 0.0
        self.trains_since: float | None = None
        self.num_prompts = 0
        self.reward_names: list[str] = []
        self.samples: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock."""
        self.trains_since = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Stop the clock: validation is not training."""
        self.trained_s, self.trains_since = self._elapsed_s(), None
        self.num_prompts, self.reward_names, self.samples = 0, [], []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        """Keep the first completions and count the prompts."""
        if not isinstance(outputs, dict) or "rollout" not in outputs:
            return
        rollout, rewards = outputs["rollout"], outputs["rewards"]
        self.num_prompts += len(rollout.prompts)
        self.reward_names = list(rewards.parts)
        missing = self.num_samples - len(self.samples)
        for b in range(min(missing, len(rollout.prompts))):
            values = {name: part[b, 0].item() for name, part in rewards.parts.items()}
            self.samples.append(
                {
                    "prompt": rollout.prompts.prompts[b],
                    "completion": rollout.completions[b * rollout.group_size],
                    "rewards": {k: v if math.isfinite(v) else None for k, v in values.items()},
                }
            )

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Remember the evaluation and let the clock run on."""
        evaluation = self._evaluation(trainer, pl_module)
        if trainer.state.fn != "fit":
            self._tell(trainer, pl_module, evaluation)
        elif trainer.sanity_checking and self.before is None:  # else resumed before iteration 1
            self.before = evaluation
            # Lightning logs nothing while it checks; with this the curves begin before training.
            for logger in trainer.loggers:
                logger.log_metrics({f"val/{k}": v for k, v in evaluation["report"].items()}, step=0)
        elif not trainer.sanity_checking:
            self.after, self.after_iteration = evaluation, pl_module.iteration
            self.trains_since = time.monotonic()

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start counting."""
        self.on_validation_start(trainer, pl_module)

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keep the first completions and count the prompts."""
        self.on_validation_batch_end(trainer, pl_module, outputs)

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print and write the evaluation."""
        self._tell(trainer, pl_module, self._evaluation(trainer, pl_module))

    def _evaluation(self, trainer: Trainer, pl_module: Any) -> Evaluation:
        count = self.num_prompts
        if trainer.world_size > 1:
            mine = torch.tensor(count, device=pl_module.device)
            count = int(trainer.strategy.reduce(mine, reduce_op="sum"))
        return {
            "report": plain_names(pl_module.evaluation_report),
            "n": count,
            "reward_names": self.reward_names,
            "samples": self.samples,
        }

    def _tell(self, trainer: Trainer, pl_module: Any, evaluation: Evaluation) -> None:
        assert trainer.state.fn is not None
        path = run_folder(trainer) / f"{trainer.state.fn.value}.json"
        _write(trainer, path, _measures(evaluation) or {})
        pl_module.print(f"{table({'evaluated': evaluation})}\n\nwritten to {path}")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Evaluate what was learned, if the last validation is older, and write it all down."""
        if trainer.enable_validation and self.after_iteration != pl_module.iteration:
            validate_now(trainer)
        self.trained_s, self.trains_since = self._elapsed_s(), None
        folder = run_folder(trainer)
        _write(trainer, folder / "summary.json", self.content())
        pl_module.print("\n" + self.page(folder, pl_module.iteration))

    def content(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        seed = os.environ.get("PL_GLOBAL_SEED")  # left there by lightning.seed_everything
        return {
            "before": _measures(self.before),
            "after": _measures(self.after),
            "seconds": round(self.trained_s, 1),
            "seed": None if seed is None else int(seed),
            "versions": versions(),
            "samples": {
                "before": self.before["samples"] if self.before else [],
                "after": self.after["samples"] if self.after else [],
            },
        }

    def page(self, folder: Path, iterations: int) -> str:
        """What the terminal shows at the end of a run."""
        parts = [f"{iterations} iterations, {self.trained_s:.0f} s of training"]
        if self.after is not None:
            evaluations = {"before": self.before, "after": self.after}
            parts.append(table({name: e for name, e in evaluations.items() if e is not None}))
            parts.append(samples_page(self.before, self.after))
        parts.append(commands(folder, answers=bool(self.after and self.after["reward_names"])))
        return "\n\n".join(part for part in parts if part)

    def _elapsed_s(self) -> float:
        running = 0.0 if self.trains_since is None else time.monotonic() - self.trains_since
        return self.trained_s + running

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run cannot measure again."""
        return {"before": self.before, "trained_s": self._elapsed_s()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the first evaluation and the clock up."""
        self.before, self.trained_s = state_dict["before"], state_dict["trained_s"]


def _write(trainer: Trainer, path: Path, content: dict[str, Any]) -> None:
    if not may_write(trainer):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _measures(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    report = evaluation["report"]
    average = next((k for k in report if k.startswith("avg@") and not k.endswith(BOUNDS)), None)
    if average is None:  # supervised training: its own names are the clearest
        return dict(report)
    return {
        "avg_at_k": report[average],
        "low": report.get(average + "_low"),
        "high": report.get(average + "_high"),
        "greedy": report.get("greedy"),
        "n": evaluation["n"],
        "rewards": {k: report[k] for k in evaluation["reward_names"] if k in report},
        **{k: report[k] for k in report if k.startswith("corpus_")},
    }


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    packages = {name: metadata.version(name) for name in ("torch", "lightning", "transformers")}
    return {"python": platform.python_version(), "litgrpo": __version__, **packages}


def table(evaluations: dict[str, Evaluation]) -> str:
    """One line per number and one column per evaluation, 95 % intervals in brackets.

    Args:
        evaluations: {heading: evaluation}, of which the last is complete.
    """
    columns = {heading: entries(e["report"]) for heading, e in evaluations.items()}
    last = list(evaluations.values())[-1]
    names = list(entries(last["report"]))
    lines = [["", *columns]]
    lines += [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    padded = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    title = f"{last['n']} held-out prompts" if last["n"] else "held-out data"
    if any("[" in text for text in columns[list(columns)[-1]].values()):
        title += " (95 % intervals in brackets)"
    return "\n".join([title, padded[0], "-" * max(map(len, padded)), *padded[1:]])


def samples_page(before: Evaluation | None, after: Evaluation) -> str:
    """The same prompts with what the policy said before and after."""
    old = before["samples"] if before else []
    blocks = []
    for n, sample in enumerate(after["samples"]):
        lines = [f"prompt: {sample['prompt'].strip()}"]
        if n < len(old):
            lines.append(f"before: {old[n]['completion'].strip()}")
        lines.append(f"after:  {sample['completion'].strip()}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def commands(folder: Path, *, answers: bool) -> str:
    """What to type to look further.

    Args:
        folder: the run folder.
        answers: whether the module can be asked (supervised training only learns).
    """
    lines = [f"everything is in {folder}; look further with", f"  tensorboard --logdir {folder}"]
    if answers and (folder / CONFIG).exists():
        program = "python cli.py" if sys.argv[0].endswith(".py") else "litgrpo"
        predict = f"{program} predict -c {folder / CONFIG} --ckpt_path last"
        lines.append(f"""  {predict} --data.prompts '["your prompt"]'""")
    return "\n".join(lines)
