"""Compare the held-out evaluations before and after training."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, Trainer

from litgrpo.argument_types import check_argument_types
from litgrpo.callbacks.completions import episode_row, format_episode
from litgrpo.callbacks.evaluation_files import checkpoint_name
from litgrpo.callbacks.files import write_if_possible
from litgrpo.callbacks.formatting import (
    BOUNDS,
    align_columns,
    finite_or_none,
    format_change,
    format_report,
    format_success,
    mark_truncated,
    strip_stage,
    terminal_columns,
    without_zero_counts,
)
from litgrpo.callbacks.loggers import MetricsCSV
from litgrpo.callbacks.progress import fit_to_terminal
from litgrpo.callbacks.protocol import TrainedModule
from litgrpo.callbacks.run_folder import CONFIG, run_folder, versions, writes_files
from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.evaluation.intervals import (
    FEW_PROMPTS,
    FEW_PROMPTS_NOTE,
    Comparison,
    compare_evaluations,
)
from litgrpo.text.counts import plural
from litgrpo.text.program import program_in_shell
from litgrpo.text.visible import visible
from litgrpo.training.lightning_compat import validate_now

# An evaluation as plain values, for a checkpoint: report {name: number}, n, reward_names, samples,
# of_prompts {set: {name: one number per prompt}}, success {reward, threshold}.
Evaluation = dict[str, Any]
Sample = dict[str, Any]
MAX_KEPT = 64  # samples of an evaluation, which are part of the checkpoint
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


class Summary(Callback):
    """Writes `summary.json` and prints a table: the held-out evaluation before and after training.

    Before is the validation that runs before the first iteration: of all held-out prompts if
    `trainer.num_sanity_val_steps` is -1, as `cli.py` sets it. After is the one that follows the
    last iteration. Changes are paired by prompt. The commands validate and test print
    their evaluation and write it to `validate.json` and `test.json`; if that file is of another
    checkpoint, the name of the checkpoint is added.

    Args:
        num_samples: number of prompts to show with one completion each, before and after: of the
            first 64, the one whose reward rose most, the one whose reward fell most or is lowest,
            and others whose completion changed.

    Example:
        `Trainer(callbacks=[Summary(num_samples=5)], num_sanity_val_steps=-1)`
    """

    @check_argument_types()
    def __init__(self, num_samples: int = 3) -> None:
        self.num_samples = num_samples
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self.after_iteration = -1
        self.logged_iteration = -1  # newest evaluation that the resumed checkpoint's logs hold
        self.trained_s = 0.0
        self.training_since: float | None = None  # None while the clock is stopped
        self.num_prompts = 0
        self.reward_names: list[str] = []
        self.samples: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Start the clock."""
        self.training_since = time.monotonic()

    def on_validation_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Stop the clock: validation does not count as training time."""
        self.trained_s, self.training_since = self._training_time_s(), None
        self.num_prompts, self.reward_names, self.samples = 0, [], []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Keep the first completions, from which `choose_samples` chooses; count the prompts."""
        if "rollout" not in (outputs or {}):  # SFT samples nothing
            return
        rollout, rewards = outputs["rollout"], outputs["rewards"]
        self.num_prompts += len(rollout.prompts)
        self.reward_names = list(rewards.components)
        missing = (MAX_KEPT if self.num_samples else 0) - len(self.samples)
        for b in range(min(missing, len(rollout.prompts))):
            row = b * rollout.group_size  # the first completion of the group
            is_truncated = bool(rollout.truncated[row])
            parts = rewards.components.items()
            sample = {
                "prompt": rollout.prompts.prompts[b],
                "completion": mark_truncated(rollout.completions[row], is_truncated),
                "rewards": {name: finite_or_none(part[b, :1])[0] for name, part in parts},
                "reward": finite_or_none(rewards.scored[b, :1])[0],
            }
            self.samples.append(sample | episode_row(rollout, row))

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        """Keep the evaluation and restart the clock."""
        evaluation = self._evaluation(trainer, pl_module)
        if trainer.state.fn != "fit":
            self._report_command(trainer, pl_module, evaluation)
        elif trainer.sanity_checking and self.before is None:  # else resumed before iteration 1
            self.before = evaluation
            # Lightning logs nothing in a sanity check; with this the curves start at iteration 0.
            for logger in trainer.loggers:
                logger.log_metrics({f"val/{k}": v for k, v in evaluation["report"].items()}, step=0)
        elif not trainer.sanity_checking:
            self.after, self.after_iteration = evaluation, pl_module.iteration
            self.training_since = time.monotonic()

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end  # type: ignore[assignment]
    on_test_end = on_validation_end  # type: ignore[assignment]

    def _evaluation(self, trainer: Trainer, pl_module: TrainedModule) -> Evaluation:
        count = self.num_prompts
        if trainer.world_size > 1:
            mine = torch.tensor(count, device=pl_module.device)
            count = int(trainer.strategy.reduce(mine, reduce_op="sum"))
        of_prompts = pl_module.evaluated_prompts
        # Ranks repeat prompts to have equal counts; the results of a set hold each prompt once.
        counts = {name: max(map(len, each.values())) for name, each in of_prompts.items() if each}
        return {
            "report": strip_stage(pl_module.evaluation_report),
            "n": sum(counts.values()) or count,
            "counts": counts,
            "reward_names": self.reward_names,
            "samples": self.samples,
            "of_prompts": of_prompts,
            "success": pl_module.success,
            "digests": digests_of(trainer),
        }

    def _report_command(
        self, trainer: Trainer, pl_module: TrainedModule, evaluation: Evaluation
    ) -> None:
        """Print and write the evaluation of `validate` or `test`."""
        assert trainer.state.fn is not None
        checkpoint = checkpoint_name(trainer)
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
        """Evaluate again if the last validation is older, then write and print the summary."""
        if trainer.enable_validation and self.after_iteration != pl_module.iteration:
            # A run that was killed at its end has logged this evaluation before.
            validate_now(trainer, log=self.logged_iteration != pl_module.iteration)
        self.trained_s, self.training_since = self._training_time_s(), None
        self._log_summary(trainer, pl_module.iteration)
        folder = run_folder(trainer)
        _write(trainer, folder / "summary.json", self.content())
        saved = folder if writes_files(trainer) else None
        print_safely(pl_module, "\n" + visible(self.page(saved, pl_module.iteration)))

    def _log_summary(self, trainer: Trainer, iteration: int) -> None:
        """Log before, after and change, by which loggers compare runs."""
        known = {"before": self.before, "after": self.after}
        reports = {when: e["report"] for when, e in known.items() if e is not None}
        numbers = {
            f"summary/{name}/{when}": value
            for when, report in reports.items()
            for name, value in report.items()
            if not name.endswith(BOUNDS)
        }
        for set_name, comparison in self.comparisons().items():
            prefix = f"summary/{set_name}/" if set_name else "summary/"
            changes = comparison.changes.items()
            numbers |= {f"{prefix}{name}/change": change.mean for name, change in changes}
        for logger in trainer.loggers:
            if numbers and not isinstance(logger, MetricsCSV):  # summary.json has them
                logger.log_metrics(numbers, step=iteration)

    def comparisons(self) -> dict[str, Comparison]:
        """{validation set: paired changes from before to after}."""
        before, after = self.before or {}, self.after or {}
        old, new = before.get("of_prompts", {}), after.get("of_prompts", {})
        were, are = before.get("digests", {}), after.get("digests", {})
        found = {
            name: compare_evaluations(
                match_prompts(old[name], were.get(name, {}), are.get(name, {})), new[name]
            )
            for name in new
            if name in old
        }
        return {name: comparison for name, comparison in found.items() if comparison is not None}

    def content(self) -> dict[str, Any]:
        """Content of `summary.json`."""
        before, after = self.chosen_samples()
        return {
            "before": _summarize(self.before),
            "after": _summarize(self.after),
            "change": {name: as_json(each) for name, each in self.comparisons().items()},
            "seconds": round(self.trained_s, 1),
            # Set by lightning.seed_everything.
            "seed": json.loads(os.environ.get("PL_GLOBAL_SEED", "null")),
            "versions": versions(),
            "samples": {"before": before, "after": after},
        }

    def chosen_samples(self) -> tuple[list[Sample], list[Sample]]:
        """Return the samples to show: before (of the prompts that have one) and after training."""
        before, after = _samples(self.before), _samples(self.after)
        if self.after is None:
            return before[: self.num_samples], []
        shown = choose_samples(before, after, self.num_samples)
        return [old for n in shown for old in _same_prompt(before, n, after[n])], [
            after[n] for n in shown
        ]

    def page(self, folder: Path | None, iterations: int) -> str:
        """Text that the terminal shows at the end of a run.

        Args:
            folder: the run folder; None if no files were written.
            iterations: of the run.
        """
        parts = [f"{plural(iterations, 'iteration')}, {self.trained_s:.0f} s of training"]
        if self.after is not None:
            evaluations = {"before": self.before, "after": self.after}
            known = {name: e for name, e in evaluations.items() if e is not None}
            parts.append(format_table(known, self.comparisons()))
            parts.append(note_on_changed_data(self.before, self.after))
            parts.append(format_samples(*self.chosen_samples()))
        samples_text = bool((self.after or {}).get("reward_names"))
        if folder is None:
            parts.append("no files were written (trainer.fast_dev_run)")
        else:
            parts.append(next_commands(folder, can_predict=samples_text))
        return "\n\n".join(part for part in parts if part)

    def _training_time_s(self) -> float:
        running = 0.0 if self.training_since is None else time.monotonic() - self.training_since
        return self.trained_s + running

    def state_dict(self) -> dict[str, Any]:
        """The first evaluation and the training time, which a resumed run cannot measure again."""
        newest = max(self.after_iteration, self.logged_iteration)
        return {"before": self.before, "trained_s": self._training_time_s(), "evaluated": newest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.before, self.trained_s = state_dict["before"], state_dict["trained_s"]
        self.logged_iteration = state_dict["evaluated"]


def digests_of(trainer: Trainer) -> dict[str, dict[int, str]]:
    """Return {validation set: {index: digest of the prompt}}; {} for other data modules."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return data.validation_digests() if isinstance(data, HasDigests) else {}


@runtime_checkable
class HasDigests(Protocol):
    """Data module that identifies its validation prompts."""

    def validation_digests(self) -> dict[str, dict[int, str]]:
        """Return {validation set: {index: digest of the prompt}}."""


def match_prompts(
    before: dict[str, list[float]], were: dict[int, str], are: dict[int, str]
) -> dict[str, list[float]]:
    """Return an earlier evaluation with the indices that its prompts have in later data.

    Prompts that the later data do not have are left out.

    Args:
        before: {name: one number per prompt}, with `index`.
        were: {index: digest} when it was measured; {} if unknown.
        are: {index: digest} of the later data.

    Example:
        >>> match_prompts({"index": [0.0, 1.0], "x": [5.0, 6.0]}, {0: "a", 1: "b"}, {0: "b"})
        {'index': [0.0], 'x': [6.0]}
    """
    if were == are or not (were and are):
        return before
    places = {digest: index for index, digest in are.items()}
    matched = [places.get(were.get(int(index), "")) for index in before["index"]]
    kept = [row for row, index in enumerate(matched) if index is not None]
    found = {name: [values[row] for row in kept] for name, values in before.items()}
    return found | {"index": [float(matched[row] or 0) for row in kept]}


def note_on_changed_data(before: Evaluation | None, after: Evaluation | None) -> str:
    """Return a note if a resumed run has other validation prompts than its first evaluation."""
    were, are = ((each or {}).get("digests", {}) for each in (before, after))
    if not (were and are) or were == are:
        return ""
    common = sum(len({*were.get(name, {}).values()} & {*are[name].values()}) for name in are)
    old, new = (sum(map(len, each.values())) for each in (were, are))
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
    report, sets = evaluation["report"], list(evaluation.get("of_prompts", {}))
    if not any(sets):
        return _summarize_set(evaluation, report, evaluation["n"])
    summary = {}
    for name in sets:
        prefix = f"{name}/"
        own = {k.removeprefix(prefix): x for k, x in report.items() if k.startswith(prefix)}
        summary[name] = _summarize_set(evaluation, own, evaluation["counts"].get(name, 0))
    return summary


def _summarize_set(evaluation: Evaluation, report: dict[str, float], count: int) -> dict[str, Any]:
    if not evaluation["reward_names"]:  # SFT: loss, perplexity and accuracy
        return dict(report)
    averages = [k for k in report if k.startswith("avg@") and not k.endswith(BOUNDS)]
    average = next(iter(averages), "avg@k")  # without a scored completion there is none
    return {
        "avg_at_k": report.get(average),
        "low": report.get(average + "_low"),
        "high": report.get(average + "_high"),
        "greedy": report.get("greedy"),
        "n": count,
        **{k: report[k] for k in UNSCORED if k in report},
        "success": evaluation.get("success", {}),
        "reward": {
            "mean": report.get("reward"),
            "low": report.get("reward_low"),
            "high": report.get("reward_high"),
        },
        "rewards": {k: report[k] for k in evaluation["reward_names"] if k in report},
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
    """File for the evaluation of a command: `validate.json`, unless another checkpoint has it.

    Args:
        folder: the run folder.
        command: validate or test.
        checkpoint: name of the checkpoint, or `start`.
    """
    path = folder / f"{command}.json"
    if not path.exists():
        return path
    earlier = json.loads(path.read_text(encoding="utf-8")).get("checkpoint", checkpoint)
    return path if earlier == checkpoint else folder / f"{command}-{checkpoint}.json"


def _samples(evaluation: Evaluation | None) -> list[dict[str, Any]]:
    return [] if evaluation is None else evaluation["samples"]


def format_table(
    evaluations: dict[str, Evaluation], comparisons: dict[str, Comparison] | None = None
) -> str:
    """One line per metric and one column per evaluation, 95 % intervals in brackets.

    Fractions of unscored completions have a line if one is not 0. In a terminal that is too
    narrow, only the changes have intervals.

    Args:
        evaluations: {heading: evaluation}; the last one is complete.
        comparisons: {validation set: paired changes from the first to the last}.
    """
    last = list(evaluations.values())[-1]
    columns = {}
    reports = [each["report"] for each in reversed(evaluations.values())]
    shown = dict.fromkeys(name for report in reports for name in without_zero_counts(report))
    for heading, evaluation in evaluations.items():
        count = evaluation["n"]
        title = heading if count == last["n"] else f"{heading} ({plural(count, 'prompt')})"
        columns[title] = format_report(evaluation["report"])
    changes = change_column(comparisons or {})
    names = [name for name in shown if not name.endswith(BOUNDS)]
    head, *lines = _align_metrics(names, columns, changes)
    if changes and max(map(len, lines)) > terminal_columns():
        bare = {
            title: {name: text.partition(" [")[0] for name, text in column.items()}
            for title, column in columns.items()
        }
        head, *lines = _align_metrics(names, bare, changes)
    title = plural(last["n"], "held-out prompt") if last["n"] else "held-out data"
    notes = []
    if any("[" in text for column in columns.values() for text in column.values()):
        title += ", 95 % intervals in brackets"
        counts = last.get("counts") or {"": last["n"]}
        notes += [fit_to_terminal(FEW_PROMPTS_NOTE)] * (0 < min(counts.values()) < FEW_PROMPTS)
    if rule := format_success(last.get("success", {})):
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


def change_column(comparisons: dict[str, Comparison]) -> dict[str, str]:
    """{metric: paired difference with its interval, as text}."""
    texts = {}
    for set_name, comparison in comparisons.items():
        for metric, change in comparison.changes.items():
            text = format_change(change.mean)
            if isfinite(change.low):
                text += f" [{format_change(change.low)}, {format_change(change.high)}]"
            texts[f"{set_name}/{metric}" if set_name else metric] = text
    return texts


def format_solved_counts(comparisons: dict[str, Comparison]) -> list[str]:
    """One line for each validation set with newly solved or no longer solved prompts."""
    return [
        f"{name + ': ' if name else ''}prompts solved ({each.solved_by}): {len(each.gained)} "
        f"gained, {len(each.lost)} lost (McNemar's exact p {each.p_value:.2g})"
        for name, each in comparisons.items()
        if each.gained or each.lost
    ]


def format_samples(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Completions of the same prompts before (if known) and after training; whole episodes.

    Args:
        before: samples of an evaluation, or none.
        after: samples of a later one.
    """
    blocks = []
    for n, sample in enumerate(after):
        if "messages" in sample:
            known = [("before", old) for old in _same_prompt(before, n, sample)]
            known.append(("after", sample))
            blocks += [f"{when}:\n{format_episode(row)}" for when, row in known]
            continue
        lines = [f"before: {old['completion'].strip()}" for old in _same_prompt(before, n, sample)]
        prompt, now = sample["prompt"].strip(), sample["completion"].strip()
        blocks.append("\n".join([f"prompt: {prompt}", *lines, f"after:  {now}"]))
    return "\n\n".join(blocks)


def choose_samples(before: list[Sample], after: list[Sample], number: int) -> list[int]:
    """Return the indices of the samples that show most of what training changed.

    The largest gain of reward; the largest loss, or else the lowest reward; then prompts whose
    completion changed; then the first. A sample without a reward has neither.

    Args:
        before: samples of an evaluation, or none.
        after: samples of a later one.
        number: how many to choose.

    Example:
        >>> old = [{"prompt": p, "completion": "x", "reward": 0.0} for p in "abc"]
        >>> new = [dict(old[0]), dict(old[1]), old[2] | {"completion": "y", "reward": 1.0}]
        >>> choose_samples(old, new, 2)
        [2, 0]
    """
    rewards = {n: row["reward"] for n, row in enumerate(after) if row.get("reward") is not None}
    changes: dict[int, float] = {}
    changed: list[int] = []
    for n, sample in enumerate(after):
        for old in _same_prompt(before, n, sample):
            if n in rewards and old.get("reward") is not None:
                changes[n] = rewards[n] - old["reward"]
            changed += [n] * (sample["completion"] != old["completion"])
    best = sorted(rewards, key=lambda n: -changes.get(n, rewards[n]))[:1]
    others = [n for n in rewards if n not in best]
    lost = [n for n in others if changes.get(n, 0.0) < 0]
    worst = sorted(lost or others, key=lambda n: changes[n] if lost else rewards[n])[:1]
    return list(dict.fromkeys([*best, *worst, *changed, *range(len(after))]))[:number]


def _same_prompt(
    before: list[dict[str, Any]], n: int, sample: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the earlier sample of the same prompt, in a list; [] if there is none."""
    candidates = [*before[n : n + 1], *before]
    return [old for old in candidates if old["prompt"] == sample["prompt"]][:1]


def next_commands(folder: Path, *, can_predict: bool) -> str:
    """Commands to inspect the run.

    Args:
        folder: the run folder.
        can_predict: the module generates completions; SFT does not.
    """
    name, config = shlex.quote(str(folder)), folder / CONFIG
    lines = [f"results are in {name}; inspect them with", f"  tensorboard --logdir {name}"]
    if can_predict and config.exists():
        predict = f"{program_in_shell()} predict -c {shlex.quote(str(config))} --ckpt_path last"
        lines.append(f"""  {predict} --data.prompts '["your prompt"]'""")
    return "\n".join(lines)
