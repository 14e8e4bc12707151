"""Before and after: what the training changed on held-out prompts."""

from __future__ import annotations

import json
import os
import sys
import time
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from litgrpo.callbacks import episodes
from litgrpo.callbacks.evaluation_files import measured
from litgrpo.callbacks.metrics_csv import MetricsCSV
from litgrpo.callbacks.number_texts import (
    BOUNDS,
    aligned,
    entries,
    finite,
    marked,
    plain_names,
    signed,
)
from litgrpo.callbacks.run_folder import CONFIG, run_folder, versions, writes_files
from litgrpo.evaluation.paired import Comparison, compared
from litgrpo.text.visible import visible
from litgrpo.training.lightning_compat import validate_now

# report {name: number}, n, reward_names, samples, of_prompts {set: {name: one number per prompt}}
Evaluation = dict[str, Any]
# What a reader of a run wants first of an evaluation, and what says whether the text is still good.
FLUENCY = ("start_perplexity", "start_kl", "ended_frac", "len_mean", "distinct_1", "distinct_2")


class Summary(Callback):
    """Writes `summary.json` and prints a table: the held-out evaluation before and after training.

    Before is the validation that runs before the first iteration (`trainer.num_sanity_val_steps`
    is -1 by default here); after is the one that follows the last iteration. Both answer the same
    prompts, so what changed is stated prompt by prompt. The verbs validate and test print their
    evaluation and write it to `validate.json` and `test.json`, or beside one of another checkpoint.

    Args:
        num_samples: how many prompts to show with one completion each, before and after.
    """

    def __init__(self, num_samples: int = 3) -> None:
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
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Keep the first completions and count the prompts."""
        if "rollout" not in (outputs or {}):  # supervised training samples nothing
            return
        rollout, rewards = outputs["rollout"], outputs["rewards"]
        self.num_prompts += len(rollout.prompts)
        self.reward_names = list(rewards.parts)
        missing = self.num_samples - len(self.samples)
        for b in range(min(missing, len(rollout.prompts))):
            values = {name: finite(part[b, :1])[0] for name, part in rewards.parts.items()}
            episode = episodes.of_row(rollout, b * rollout.group_size)
            self.samples.append(
                {
                    "prompt": rollout.prompts.prompts[b],
                    "completion": marked(
                        rollout.completions[b * rollout.group_size],
                        bool(rollout.truncated[b * rollout.group_size]),
                    ),
                    "rewards": values,
                }
                | ({"reward": float(rewards.total[b, 0]), **episode} if episode else {})
            )

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Remember the evaluation and let the clock run on."""
        evaluation = self._evaluation(trainer, pl_module)
        if trainer.state.fn != "fit":
            evaluation["report"] |= plain_names(pl_module.complete_evaluation())
            self._tell(trainer, pl_module, evaluation)
        elif trainer.sanity_checking and self.before is None:  # else resumed before iteration 1
            self.before = evaluation
            # Lightning logs nothing while it checks; with this the curves begin before training.
            for logger in trainer.loggers:
                logger.log_metrics({f"val/{k}": v for k, v in evaluation["report"].items()}, step=0)
        elif not trainer.sanity_checking:
            self.after, self.after_iteration = evaluation, pl_module.iteration
            self.trains_since = time.monotonic()

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_end = on_validation_end

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
            "of_prompts": pl_module.evaluated_prompts,
        }

    def _tell(self, trainer: Trainer, pl_module: Any, evaluation: Evaluation) -> None:
        assert trainer.state.fn is not None
        of = measured(trainer)
        path = report_file(run_folder(trainer), trainer.state.fn.value, of)
        what = {"checkpoint": of, "iteration": pl_module.iteration}
        _write(trainer, path, (_measures(evaluation) or {}) | what)
        untrained = "Evaluated: the start, untrained; for a trained model give --ckpt_path.\n"
        title = untrained if of == "start" else f"Evaluated: {of}\n"
        pl_module.print(f"{title}{table({'evaluated': evaluation})}\n\nwritten to {path}")

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Evaluate once more, if the last validation is older, and write it all down."""
        if trainer.enable_validation and self.after_iteration != pl_module.iteration:
            validate_now(trainer)
        self.trained_s, self.trains_since = self._elapsed_s(), None
        self._complete(trainer, pl_module)
        self._log_summary(trainer, pl_module.iteration)
        folder = run_folder(trainer)
        _write(trainer, folder / "summary.json", self.content())
        pl_module.print("\n" + visible(self.page(folder, pl_module.iteration)))

    def _complete(self, trainer: Trainer, pl_module: Any) -> None:
        """Add to the last evaluation what the start's weights say, which are loaded for it."""
        missing = pl_module.complete_evaluation()
        if self.after is None or not missing:
            return
        self.after["report"] |= plain_names(missing)
        for logger in trainer.loggers:
            logger.log_metrics(missing, step=pl_module.iteration)

    def _log_summary(self, trainer: Trainer, iteration: int) -> None:
        """Hand before, after and change to loggers that compare runs; the file has its own."""
        known = {"before": self.before, "after": self.after}
        reports = {when: e["report"] for when, e in known.items() if e is not None}
        numbers = {
            f"summary/{name}/{when}": value
            for when, report in reports.items()
            for name, value in report.items()
            if not name.endswith(BOUNDS)
        }
        for set_name, comparison in self.comparisons().items():
            start = f"summary/{set_name}/" if set_name else "summary/"
            changes = comparison.changes.items()
            numbers |= {f"{start}{name}/change": change.mean for name, change in changes}
        for logger in trainer.loggers:
            if numbers and not isinstance(logger, MetricsCSV):
                logger.log_metrics(numbers, step=iteration)

    def comparisons(self) -> dict[str, Comparison]:
        """{set: what changed from before to after, prompt by prompt}."""
        before, after = ((each or {}).get("of_prompts", {}) for each in (self.before, self.after))
        found = {name: compared(before[name], after[name]) for name in after if name in before}
        return {name: comparison for name, comparison in found.items() if comparison is not None}

    def content(self) -> dict[str, Any]:
        """What `summary.json` holds."""
        return {
            "before": _measures(self.before),
            "after": _measures(self.after),
            "change": {name: as_json(each) for name, each in self.comparisons().items()},
            "seconds": round(self.trained_s, 1),
            # Left there by lightning.seed_everything.
            "seed": json.loads(os.environ.get("PL_GLOBAL_SEED", "null")),
            "versions": versions(),
            "samples": {"before": _samples(self.before), "after": _samples(self.after)},
        }

    def page(self, folder: Path, iterations: int) -> str:
        """What the terminal shows at the end of a run."""
        parts = [f"{iterations} iterations, {self.trained_s:.0f} s of training"]
        if self.after is not None:
            evaluations = {"before": self.before, "after": self.after}
            known = {name: e for name, e in evaluations.items() if e is not None}
            parts.append(table(known, self.comparisons()))
            parts.append(samples_page(_samples(self.before), _samples(self.after)))
        parts.append(commands(folder, answers=bool((self.after or {}).get("reward_names"))))
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
    if not writes_files(trainer):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _measures(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    report, sets = evaluation["report"], list(evaluation.get("of_prompts", {}))
    if not any(sets):
        return _of_set(evaluation, report)
    starts = {name: f"{name}/" for name in sets}
    return {
        name: _of_set(
            evaluation, {k.removeprefix(s): x for k, x in report.items() if k.startswith(s)}
        )
        for name, s in starts.items()
    }


def _of_set(evaluation: Evaluation, report: dict[str, float]) -> dict[str, Any]:
    average = next((k for k in report if k.startswith("avg@") and not k.endswith(BOUNDS)), None)
    if average is None:  # supervised training: its own names are the clearest
        return dict(report)
    return {
        "avg_at_k": report[average],
        "low": report.get(average + "_low"),
        "high": report.get(average + "_high"),
        "greedy": report.get("greedy"),
        "n": evaluation["n"],
        "reward": {
            "mean": report.get("reward"),
            "low": report.get("reward_low"),
            "high": report.get("reward_high"),
        },
        "rewards": {k: report[k] for k in evaluation["reward_names"] if k in report},
        "fluency": {k: report[k] for k in FLUENCY if k in report},
        **{k: report[k] for k in report if k.startswith("corpus_")},
    }


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as `summary.json` holds it; prompts by their number in the data."""
    return {
        **{name: vars(change) for name, change in comparison.changes.items()},
        "solved_by": comparison.solved_by,
        "gained": comparison.gained,
        "lost": comparison.lost,
        "mcnemar_p": comparison.p_value,
    }


def report_file(folder: Path, verb: str, of: str) -> Path:
    """Where a verb writes what it measured: `validate.json`, unless that is of another checkpoint.

    Args:
        folder: the run folder.
        verb: validate or test.
        of: name of the checkpoint, or `start`.
    """
    path = folder / f"{verb}.json"
    if not path.exists():
        return path
    earlier = json.loads(path.read_text(encoding="utf-8")).get("checkpoint", of)
    return path if earlier == of else folder / f"{verb}-{of}.json"


def _samples(evaluation: Evaluation | None) -> list[dict[str, Any]]:
    return (evaluation or {"samples": []})["samples"]


def table(
    evaluations: dict[str, Evaluation], comparisons: dict[str, Comparison] | None = None
) -> str:
    """One line per number and one column per evaluation, 95 % intervals in brackets.

    Args:
        evaluations: {heading: evaluation}, of which the last is complete.
        comparisons: {set: what changed from the first to the last, prompt by prompt}.
    """
    columns = {heading: entries(e["report"]) for heading, e in evaluations.items()}
    changes = change_column(comparisons or {})
    columns |= {"change": changes} if changes else {}
    last = list(evaluations.values())[-1]
    numbers = entries(last["report"])
    rows = [[name, *(column.get(name, "") for column in columns.values())] for name in numbers]
    head, *lines = aligned([["", *columns], *rows])
    title = f"{last['n']} held-out prompts" if last["n"] else "held-out data"
    if any("[" in text for text in numbers.values()):
        title += " (95 % intervals in brackets)"
    ruler = "-" * max(map(len, [head, *lines]))
    return "\n".join([title, head, ruler, *lines, *solved_lines(comparisons or {})])


def change_column(comparisons: dict[str, Comparison]) -> dict[str, str]:
    """{name of a number: paired difference with its interval}."""
    return {
        f"{name}/{number}" if name else number: f"{signed(change.mean)}"
        + (f" [{signed(change.low)}, {signed(change.high)}]" if isfinite(change.low) else "")
        for name, comparison in comparisons.items()
        for number, change in comparison.changes.items()
    }


def solved_lines(comparisons: dict[str, Comparison]) -> list[str]:
    """One line for each set of prompts of which some were gained or lost."""
    return [
        f"{name + ': ' if name else ''}prompts solved ({each.solved_by}): {len(each.gained)} "
        f"gained, {len(each.lost)} lost (McNemar's exact p {each.p_value:.2g})"
        for name, each in comparisons.items()
        if each.gained or each.lost
    ]


def samples_page(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """The same prompts with their completions before (where known) and after; episodes as a whole.

    Args:
        before: samples of an evaluation, or none.
        after: samples of a later one.
    """
    blocks = []
    for n, sample in enumerate(after):
        if "messages" in sample:
            known = [("before", old) for old in before[n : n + 1]] + [("after", sample)]
            blocks += [f"{when}:\n{episodes.readable(row)}" for when, row in known]
            continue
        lines = [f"before: {old['completion'].strip()}" for old in before[n : n + 1]]
        prompt, now = sample["prompt"].strip(), sample["completion"].strip()
        blocks.append("\n".join([f"prompt: {prompt}", *lines, f"after:  {now}"]))
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
