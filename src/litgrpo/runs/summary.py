"""Compare the held-out evaluations before and after training."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from litgrpo.argument_types import check_argument_types
from litgrpo.callbacks.completions import format_episode
from litgrpo.callbacks.evaluation_files import EvaluationFiles, checkpoint_name, evaluation_file
from litgrpo.callbacks.formatting import (
    BOUNDS,
    format_report,
    format_success,
    strip_stage,
    terminal_columns,
    without_zero_counts,
)
from litgrpo.callbacks.loggers import MetricsCSV, loggers_of
from litgrpo.callbacks.progress import fit_to_terminal
from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.evaluation.evaluator import RESERVED
from litgrpo.evaluation.intervals import FEW_PROMPTS, FEW_PROMPTS_NOTE, Comparison
from litgrpo.files import write_if_possible
from litgrpo.lightning_compat import validate_now
from litgrpo.protocol import TrainedModule
from litgrpo.run_folder import CONFIG, run_folder, versions, writes_files
from litgrpo.runs.pairing import (
    choose_prompts,
    format_difference,
    note_on_redefined,
    pair_evaluations,
    pair_rows,
    prompt_key,
)
from litgrpo.runs.run import Row, Run, read_evaluation
from litgrpo.text.program import program_in_shell
from litgrpo.text.tables import align_columns, plural
from litgrpo.text.visible import visible

Report = dict[str, float]
EVALUATION_S = "time/evaluation_s"
MAX_CANDIDATES = 64  # prompts of which samples are shown
# Fractions of completions that the accuracies leave out.
UNSCORED = ("unscored_frac", "greedy_unscored_frac")
# Metrics that show whether the text is still natural.
TEXT_QUALITY = (
    "initial_perplexity",
    "initial_kl",
    "terminated_frac",
    "len_mean",
    "distinct_1",
    "distinct_2",
)
COMPUTED = ("avg@", "pass@", "corpus_")  # prefixes of metrics that are no reward components


@dataclass(frozen=True)
class Evaluation:
    """Results on held-out prompts.

    Args:
        report: {metric: mean}; with several validation sets {set/metric: mean}.
        rows: prompts with their completions; empty if no file was written.
        success: `TrainedModule.success`; {} if nothing is sampled.
        iteration: of the policy.
    """

    report: Report
    rows: list[Row] = field(default_factory=list)
    success: Mapping[str, Any] = field(default_factory=dict)
    iteration: int = 0

    @property
    def counts(self) -> Counter[str]:
        """{validation set: number of prompts}."""
        return Counter(str(row.get("set", "")) for row in self.rows)


class Summary(Callback):
    """Writes `summary.json` and prints a table: the held-out evaluation before and after training.

    Before is the first evaluation in the run folder: that of all held-out prompts before the first
    iteration if `trainer.num_sanity_val_steps` is -1, as `cli.py` sets it. After is the one that
    follows the last iteration. Means are those of `metrics.csv`; changes are paired by the prompts
    in `evaluation/`, whose callback is added if the trainer does not have it. The commands validate
    and test print their evaluation and write it to `validate.json` and `test.json`; if that file is
    of another checkpoint, the name of the checkpoint is added.

    Args:
        num_samples: number of prompts to show with one completion each, before and after: of the
            first 64, those that improved most, got worse, are incorrect with the highest reward, or
            were truncated, then others.

    Example:
        `Trainer(callbacks=[Summary(num_samples=5)], num_sanity_val_steps=-1)`
    """

    @check_argument_types()
    def __init__(self, num_samples: int = 3) -> None:
        self.num_samples = num_samples
        self.reports: dict[int, Report] = {}  # {iteration: report} of this process
        self.trained_s = 0.0
        self.training_since: float | None = None  # None while the clock is stopped
        self.evaluation_began = 0.0

    def setup(self, trainer: Trainer, pl_module: TrainedModule, stage: str) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, EvaluationFiles) for callback in callbacks):
            # In front of this one, which reads the file.
            callbacks.insert(callbacks.index(self), EvaluationFiles())

    def on_fit_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self.reports = {}

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self.training_since = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        # Validation does not count as training time.
        self.trained_s, self.training_since = self._training_time_s(), None
        self.evaluation_began = time.monotonic()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            pl_module.log(EVALUATION_S, time.monotonic() - self.evaluation_began)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        report = strip_stage(pl_module.evaluation_report)
        if trainer.state.fn != "fit":
            self._report_command(trainer, pl_module, report)
            return
        # Lightning logs nothing in a sanity check; with this the curves start at iteration 0.
        if trainer.sanity_checking and 0 not in logged_reports(recorded_run(trainer)):
            numbers = {f"val/{name}": value for name, value in report.items()}
            numbers[EVALUATION_S] = time.monotonic() - self.evaluation_began
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=0)
        self.reports[pl_module.iteration] = report
        if not trainer.sanity_checking:
            self.training_since = time.monotonic()

    on_test_start = on_validation_start  # type: ignore[assignment]
    on_test_end = on_validation_end  # type: ignore[assignment]

    def _report_command(self, trainer: Trainer, pl_module: TrainedModule, report: Report) -> None:
        """Print and write the evaluation of `validate` or `test`."""
        assert trainer.state.fn is not None
        checkpoint = checkpoint_name(trainer)
        rows = []
        if records_prompts(trainer):
            rows = read_evaluation(evaluation_file(trainer, pl_module.iteration))[0]
        evaluation = Evaluation(report, rows, pl_module.success, pl_module.iteration)
        path = report_file(run_folder(trainer), trainer.state.fn.value, checkpoint)
        source = {"checkpoint": checkpoint, "iteration": pl_module.iteration}
        is_written = _write(trainer, path, (_summarize(evaluation) or {}) | source)
        title = f"Evaluated: {checkpoint}"
        if checkpoint == "start":
            title = "Evaluated: the initial policy; for a trained one pass --ckpt_path."
        table = format_table({"evaluated": evaluation})
        where = f"\n\nwritten to {path}" if is_written else ""
        print_safely(pl_module, f"{title}\n{table}{where}")

    def on_train_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        iteration = pl_module.iteration
        if trainer.enable_validation and iteration not in self.reports:
            # A run that was killed at its end has logged this evaluation before.
            validate_now(trainer, log=iteration not in logged_reports(recorded_run(trainer)))
        self.trained_s, self.training_since = self._training_time_s(), None
        if not trainer.is_global_zero:
            return
        before, after = self.first_and_last(recorded_run(trainer), pl_module)
        summary = RunSummary(before, after, self.num_samples, self.trained_s)
        numbers = summary.numbers()
        for logger in trainer.loggers:
            if numbers and not isinstance(logger, MetricsCSV):  # summary.json has them
                logger.log_metrics(numbers, step=iteration)
        folder = run_folder(trainer)
        _write(trainer, folder / "summary.json", summary.content())
        saved = folder if writes_files(trainer) else None
        print_safely(pl_module, "\n" + visible(summary.page(saved, iteration)))

    def first_and_last(
        self, run: Run, pl_module: TrainedModule
    ) -> tuple[Evaluation | None, Evaluation | None]:
        """Return the first evaluation of a run, and that of its last iteration, if it has them."""
        reports, files = logged_reports(run) | self.reports, run.evaluation_files

        def evaluation(n: int) -> Evaluation:
            rows = read_evaluation(files[n])[0] if n in files else []
            return Evaluation(reports[n], rows, pl_module.success, n)

        first, last = min(reports, default=0), pl_module.iteration
        return (
            evaluation(first) if first in reports and first < last else None,
            evaluation(last) if last in reports else None,
        )

    def _training_time_s(self) -> float:
        running = 0.0 if self.training_since is None else time.monotonic() - self.training_since
        return self.trained_s + running

    def state_dict(self) -> dict[str, Any]:
        return {"trained_s": self._training_time_s()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trained_s = state_dict["trained_s"]


def records_prompts(trainer: Any) -> bool:
    """Return whether this trainer writes its held-out prompts to files."""
    files = [callback for callback in trainer.callbacks if isinstance(callback, EvaluationFiles)]
    return writes_files(trainer) and any(callback.enabled for callback in files)


def recorded_run(trainer: Trainer) -> Run:
    """Return the run with what this trainer records; other files in its folder are not of it."""
    folder, parts = run_folder(trainer), dict[str, Any]()
    if not writes_files(trainer) or not folder.is_dir():
        return Run()
    if not loggers_of(trainer, MetricsCSV):
        parts["metrics"] = Run().metrics
    if not records_prompts(trainer):
        parts["evaluation_files"] = {}
    return Run(folder, **parts)


def logged_reports(run: Run) -> dict[int, Report]:
    """Return {iteration: report} of the evaluations in `metrics.csv`."""
    names = [name for name in run.names if name.startswith("val/")]
    rows = run.metrics[names].dropna(how="all").iterrows()
    return {
        int(iteration): strip_stage({name: x for name, x in row.items() if isfinite(x)})
        for iteration, row in rows
    }


@dataclass(frozen=True)
class RunSummary:
    """The first and the last evaluation of a run, as numbers and as text."""

    before: Evaluation | None
    after: Evaluation | None
    num_samples: int = 3
    seconds: float = 0.0

    @property
    def evaluations(self) -> dict[str, Evaluation]:
        """{when: evaluation} of those that there are."""
        pairs = {"before": self.before, "after": self.after}
        return {when: evaluation for when, evaluation in pairs.items() if evaluation is not None}

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """{validation set: paired changes from before to after}."""
        if self.before is None or self.after is None:
            return {}
        pairs = pair_evaluations(self.before.rows, self.after.rows)
        return {pair.set_name: pair.comparison for pair in pairs}

    @property
    def note(self) -> str:
        """Note on rewards that were redefined between the evaluations."""
        if self.before is None or self.after is None:
            return ""
        return note_on_redefined(self.before.rows, self.after.rows)

    def numbers(self) -> Report:
        """Return before, after and change as metrics, by which loggers compare runs."""
        numbers = {
            f"summary/{name}/{when}": value
            for when, evaluation in self.evaluations.items()
            for name, value in evaluation.report.items()
            if not name.endswith(BOUNDS)
        }
        for set_name, comparison in self.comparisons.items():
            prefix = f"summary/{set_name}/" if set_name else "summary/"
            changes = comparison.changes.items()
            numbers |= {f"{prefix}{name}/change": change.mean for name, change in changes}
        return numbers

    def content(self) -> dict[str, Any]:
        """Content of `summary.json`."""
        return {
            "before": _summarize(self.before),
            "after": _summarize(self.after),
            "change": {name: as_json(comparison) for name, comparison in self.comparisons.items()},
            **({"note": self.note} if self.note else {}),
            "seconds": round(self.seconds, 1),
            # Set by lightning.seed_everything.
            "seed": json.loads(os.environ.get("PL_GLOBAL_SEED", "null")),
            "versions": versions(),
            "samples": {
                "before": [old for old, _ in self.samples if old is not None],
                "after": [new for _, new in self.samples],
            },
        }

    @cached_property
    def samples(self) -> list[tuple[Row | None, Row]]:
        """Samples to show: the first one of a prompt before (None: unknown) and after training."""
        if self.after is None:
            return []
        after = self.after.rows[:MAX_CANDIDATES]
        before = [] if self.before is None else self.before.rows
        earlier = {prompt_key(new): old for _, old, new in pair_rows(before, after)}
        pairs = [(earlier.get(prompt_key(row)), row) for row in after]
        examples = [pairs[n] for n in choose_prompts(pairs, self.num_samples)]
        return [(old and first_sample(old), first_sample(new)) for old, new in examples]

    def page(self, folder: Path | None, iterations: int) -> str:
        """Text that the terminal shows at the end of a run.

        Args:
            folder: the run folder; None if no files were written.
            iterations: of the run.
        """
        parts = [f"{plural(iterations, 'iteration')}, {self.seconds:.0f} s of training"]
        if self.after is not None:
            parts.append(format_table(self.evaluations, self.comparisons))
            parts += [note_on_changed_data(self.before, self.after), self.note]
            parts.append(format_samples(self.samples))
        if folder is None:
            parts.append("no files were written (trainer.fast_dev_run)")
        else:
            is_sampled = self.after is not None and bool(self.after.success)
            parts.append(next_commands(folder, can_predict=is_sampled))
        return "\n\n".join(part for part in parts if part)


def note_on_changed_data(before: Evaluation | None, after: Evaluation) -> str:
    """Return a note if a resumed run has other validation prompts than its first evaluation."""
    if before is None or not (before.rows and after.rows):
        return ""
    old, new = len(before.rows), len(after.rows)
    common = len(pair_rows(before.rows, after.rows))
    if common == old == new:
        return ""
    return (
        f"The validation data changed: `before` was measured on {old} prompts, `after` on {new}; "
        f"{common} are in both, and changes are those of these prompts."
    )


def _write(trainer: Trainer, path: Path, content: dict[str, Any]) -> bool:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return writes_files(trainer) and write_if_possible(path, text, path.name)


def print_safely(pl_module: TrainedModule, text: str) -> None:
    """Print; files are yet to be written, which a terminal that fails must not cost.

    Characters that the terminal does not have are escaped.
    """
    with warn_once_on_failure("printing"):
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        pl_module.print(text.encode(encoding, "backslashreplace").decode(encoding))


def _summarize(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """Nest the numbers of an evaluation, by validation set if there are several."""
    if evaluation is None:
        return None
    report = evaluation.report
    sets = list(dict.fromkeys(name.rpartition("/")[0] for name in report))
    if not any(sets):
        return _summarize_set(evaluation, report, len(evaluation.rows))
    summary = {}
    for name in sets:
        prefix = f"{name}/"
        set_report = {k.removeprefix(prefix): x for k, x in report.items() if k.startswith(prefix)}
        summary[name] = _summarize_set(evaluation, set_report, evaluation.counts[name])
    return summary


def _summarize_set(evaluation: Evaluation, report: Report, count: int) -> dict[str, Any]:
    if not evaluation.success:  # SFT: loss, perplexity and accuracy
        return dict(report)
    averages = [k for k in report if k.startswith("avg@") and not k.endswith(BOUNDS)]
    average = next(iter(averages), "avg@k")  # without a scored completion there is none
    components = [k for k in report if k not in RESERVED and not k.startswith(COMPUTED)]
    return {
        "avg_at_k": report.get(average),
        "low": report.get(average + "_low"),
        "high": report.get(average + "_high"),
        "greedy": report.get("greedy"),
        "n": count,
        **{k: report[k] for k in UNSCORED if k in report},
        "success": evaluation.success,
        "reward": {
            "mean": report.get("reward"),
            "low": report.get("reward_low"),
            "high": report.get("reward_high"),
        },
        "rewards": {k: report[k] for k in components},
        "text_quality": {k: report[k] for k in TEXT_QUALITY if k in report},
        **{k: report[k] for k in report if k.startswith("corpus_")},
    }


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain values; prompts by their index in the data."""
    return {
        **{name: vars(change) for name, change in comparison.changes.items()},
        "solved_by": comparison.solved_by,
        "gained": comparison.gained,
        "lost": comparison.lost,
        "mcnemar_p": comparison.p_value,
    }


def report_file(folder: Path, command: str, checkpoint: str) -> Path:
    """File for the evaluation of a command: `validate.json`, unless another checkpoint has it."""
    path = folder / f"{command}.json"
    if not path.exists():
        return path
    earlier = json.loads(path.read_text(encoding="utf-8")).get("checkpoint", checkpoint)
    return path if earlier == checkpoint else folder / f"{command}-{checkpoint}.json"


def format_table(
    evaluations: Mapping[str, Evaluation], comparisons: Mapping[str, Comparison] | None = None
) -> str:
    """One line per metric and one column per evaluation, 95 % intervals in brackets.

    Fractions of unscored completions have a line if one is not 0. In a terminal that is too
    narrow, only the changes have intervals.

    Args:
        evaluations: {heading: evaluation}; the last one is complete.
        comparisons: {validation set: paired changes from the first to the last}.
    """
    latest = list(evaluations.values())[-1]
    columns = {}
    reports = [evaluation.report for evaluation in reversed(list(evaluations.values()))]
    all_names = dict.fromkeys(name for report in reports for name in without_zero_counts(report))
    for heading, evaluation in evaluations.items():
        count = len(evaluation.rows)
        is_same_size = count in (0, len(latest.rows))
        title = heading if is_same_size else f"{heading} ({plural(count, 'prompt')})"
        if heading == "before" and evaluation.iteration:
            title += f" (iteration {evaluation.iteration})"
        columns[title] = format_report(evaluation.report)
    changes = change_column(comparisons or {})
    names = [name for name in all_names if not name.endswith(BOUNDS)]
    head, *lines = _align_metrics(names, columns, changes)
    if changes and max(map(len, lines)) > terminal_columns():
        bare = {
            title: {name: text.partition(" [")[0] for name, text in column.items()}
            for title, column in columns.items()
        }
        head, *lines = _align_metrics(names, bare, changes)
    title = plural(len(latest.rows), "held-out prompt") if latest.rows else "held-out data"
    notes = []
    if any("[" in text for column in columns.values() for text in column.values()):
        title += ", 95 % intervals in brackets"
        is_few = bool(latest.rows) and min(latest.counts.values()) < FEW_PROMPTS
        notes += [fit_to_terminal(FEW_PROMPTS_NOTE)] * is_few
    if rule := format_success(latest.success):
        title += f"; {rule}"
    ruler = "-" * max(map(len, [head, *lines]))
    return "\n".join([title, head, ruler, *lines, *notes, *format_solved_counts(comparisons or {})])


def _align_metrics(
    names: Iterable[str], columns: dict[str, dict[str, str]], changes: dict[str, str]
) -> list[str]:
    """Lines of a table with a row for each name; the column of changes is left out if empty."""
    columns = columns | ({"change": changes} if changes else {})
    rows = [[name, *(column.get(name, "") for column in columns.values())] for name in names]
    return align_columns([["", *columns], *rows])


def change_column(comparisons: Mapping[str, Comparison]) -> dict[str, str]:
    """{metric: paired difference with its interval, as text}."""
    texts = {}
    for set_name, comparison in comparisons.items():
        for metric, change in comparison.changes.items():
            name = f"{set_name}/{metric}" if set_name else metric
            texts[name] = format_difference(change.mean, change.low, change.high)
    return texts


def format_solved_counts(comparisons: Mapping[str, Comparison]) -> list[str]:
    """One line for each validation set with newly solved or no longer solved prompts."""
    return [
        f"{name + ': ' if name else ''}prompts solved ({comparison.solved_by}): "
        f"{len(comparison.gained)} gained, {len(comparison.lost)} lost "
        f"(McNemar's exact p {comparison.p_value:.2g})"
        for name, comparison in comparisons.items()
        if comparison.gained or comparison.lost
    ]


def first_sample(row: Row) -> Row:
    """Return the first completion of a prompt, with the prompt."""
    return {"prompt": row["prompt"], **row["samples"][0]}


def format_samples(samples: Sequence[tuple[Row | None, Row]]) -> str:
    """Completions of the same prompts before (None: unknown) and after training; whole episodes."""
    blocks = []
    for before, after in samples:
        if "messages" in after:
            rows = {"before": before, "after": after}
            blocks += [f"{when}:\n{format_episode(row)}" for when, row in rows.items() if row]
            continue
        lines = [f"prompt: {after['prompt'].strip()}"]
        lines += [] if before is None else [f"before: {before['completion'].strip()}"]
        blocks.append("\n".join([*lines, f"after:  {after['completion'].strip()}"]))
    return "\n\n".join(blocks)


def next_commands(folder: Path, *, can_predict: bool) -> str:
    """Commands to inspect the run."""
    name, config = shlex.quote(str(folder)), folder / CONFIG
    lines = [f"results are in {name}; inspect them with", f"  tensorboard --logdir {name}"]
    if can_predict and config.exists():
        predict = f"{program_in_shell()} predict -c {shlex.quote(str(config))} --ckpt_path last"
        lines.append(f"""  {predict} --data.prompts '["your prompt"]'""")
    return "\n".join(lines)
