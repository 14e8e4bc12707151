"""Held-out prompts with their completions, and predictions, as JSON lines."""

from __future__ import annotations

import json
import os
from itertools import chain, count
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor, distributed

from litgrpo.callbacks.completions import Row, format_episode, scored_rows, write_jsonl
from litgrpo.callbacks.formatting import finite_or_none
from litgrpo.distributed.messages import rank_zero_info, warn_once_on_failure
from litgrpo.files import write_text
from litgrpo.protocol import TrainedModule
from litgrpo.run_folder import NotSaved, run_folder, writes_files
from litgrpo.text.visible import visible
from litgrpo.types import RewardTable, Rollout

FOLDER = "evaluation"
PREDICTIONS = "predictions.jsonl"


class EvaluationFiles(Callback):
    """Writes each evaluation to `evaluation/`, one line per prompt with all its completions.

    In a fit `iteration-000050.jsonl` is the evaluation after 50 iterations (000000: before the
    first). `validate` and `test` write a file with the name of the checkpoint. A new fit moves
    those of an earlier one in the same folder, and its `summary.json`, to `evaluation/earlier-1`.

    Args:
        enabled: write the files.

    Example:
        `Trainer(callbacks=[EvaluationFiles()])`
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.rows: list[Row] = []
        self.is_new = False  # a fit that was not resumed, before its first file

    def on_fit_start(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        self.is_new = trainer.ckpt_path is None and pl_module.iteration == 0

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        # An interrupted evaluation leaves rows.
        self.rows = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        # SFT samples no completions.
        if self.enabled and "rollout" in (outputs or {}):
            self.rows += prompt_rows(outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        rows, self.rows = gather_rows(self.rows), []
        if rows and writes_files(trainer):
            path = evaluation_file(trainer, pl_module.iteration)
            if self.is_new and trainer.state.fn == "fit":
                # Not before: a recipe first moves an earlier run as a whole.
                self.is_new = False
                with warn_once_on_failure("moving the evaluations of an earlier fit"):
                    set_earlier_aside(run_folder(trainer))
            write_jsonl(path, unique_prompts(rows), "evaluations")

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_end = on_validation_end  # type: ignore[assignment]


def evaluation_file(trainer: Trainer, iteration: int) -> Path:
    """Return the file of an evaluation, which is named after its iteration or checkpoint."""
    name = f"iteration-{iteration:06d}"
    if trainer.state.fn is not None and trainer.state.fn != "fit":
        name = f"{trainer.state.fn.value}-{checkpoint_name(trainer)}"
    return run_folder(trainer) / FOLDER / f"{name}.jsonl"


def set_earlier_aside(folder: Path) -> None:
    """Move the evaluations and the summary of an earlier fit, which are not of the new one."""
    evaluations = sorted((folder / FOLDER).glob("iteration-*.jsonl"))
    if evaluations:
        names = (folder / FOLDER / f"earlier-{number}" for number in count(1))
        aside = next(path for path in names if not path.exists())
        aside.mkdir()
        for path in (*evaluations, *folder.glob("summary.json")):
            path.rename(aside / path.name)
        rank_zero_info(f"Moved the evaluations of an earlier fit to {aside}")


def checkpoint_name(trainer: Trainer) -> str:
    """Name of the evaluated checkpoint; `start` without one. `last` and `best` are resolved."""
    path = trainer.ckpt_path
    return "start" if path is None else Path(path).resolve().stem


def prompt_rows(outputs: Row) -> list[Row]:
    """One plain dictionary per prompt of a batch.

    Args:
        outputs: fields of an `Evaluated`.

    Returns:
        B rows; a number that is not finite is None, and a completion that the length limit cut off
        ends in ` [cut]`.
    """
    rollout, greedy, name = outputs["rollout"], outputs["greedy"], outputs["name"]
    prompts, size = rollout.prompts, rollout.group_size
    samples = sample_rows(rollout, outputs["rewards"], outputs["correct"])
    greedy_rows: list[Row] = []
    if greedy is not None:
        greedy_rows = sample_rows(greedy, outputs["greedy_rewards"], outputs["greedy_correct"])
    definitions = {"definitions": outputs["definitions"]} if outputs["definitions"] else {}
    rows = []
    for b, index in enumerate(prompts.index.tolist()):
        group = samples[b * size : (b + 1) * size]
        row: Row = {"set": name} if name else {}
        rows.append(
            row
            | {
                "index": index,
                "prompt": prompts.prompts[b],
                "reward": known_mean([sample["reward"] for sample in group]),
                "correct": known_mean([sample["correct"] for sample in group]),
                "samples": group,
                "greedy": greedy_rows[b] if greedy_rows else None,
                "columns": {column: values[b] for column, values in prompts.columns.items()},
            }
            | definitions
        )
    return rows


def sample_rows(rollout: Rollout, rewards: RewardTable, correct: Tensor) -> list[Row]:
    """One plain dictionary per held-out completion.

    Args:
        rollout: N = B * G completions.
        rewards: [B, G] their rewards.
        correct: [B, G] 1.0 for correct completions, 0.0 for others, NaN for unscored ones, which
            are None in the rows.
    """
    return [
        row | {"correct": None if success is None else bool(success)}
        for row, success in zip(scored_rows(rollout, rewards), finite_or_none(correct), strict=True)
    ]


def known_mean(values: list[float | None]) -> float | None:
    """Mean of the values that are not None; None if there is none."""
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None


def gather_rows(rows: list[Row]) -> list[Row]:
    """Gather the rows of all ranks; every rank must call this."""
    if not distributed.is_initialized():
        return rows
    gathered: list[list[Row]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(gathered, rows)
    return [row for part in gathered for row in part]


def unique_prompts(rows: list[Row]) -> list[Row]:
    """Each prompt once, sorted by set and index: samplers repeat prompts to fill up the ranks."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        first.setdefault((row.get("set", ""), row["index"]), row)
    return [first[key] for key in sorted(first)]


class Predictions(Callback):
    """Prints reasoning and answer of each prediction and writes it to a JSONL file.

    Args:
        path: file to write, also over an earlier one; default: `predictions.jsonl` in the run
            folder, or `predictions_2.jsonl` and so on if earlier ones exist.
        show: also print the predictions.

    Example:
        `Trainer(callbacks=[Predictions("answers.jsonl", show=False)])`
    """

    def __init__(self, path: str | None = None, show: bool = True) -> None:
        self.path = path
        self.show = show
        self.file = Path(PREDICTIONS)
        self.failure: OSError | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.file, self.failure = self._choose_file(trainer), None
        try:
            write_text(self.file, "")
        except OSError as error:
            raise ValueError(
                f"predictions.path: {self.file} cannot be written ({error.strerror}): choose "
                "another file with --predictions.path."
            ) from error

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: TrainedModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        for row in outputs:
            self._append(row)
            if self.show:
                pl_module.print(visible(format_prediction(row)))

    def _append(self, row: Row) -> None:
        """Append a line, or none of it; after a failure all later lines are left out."""
        if self.failure is not None:
            return
        size = self.file.stat().st_size
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        except OSError as error:
            self.failure = error
            os.truncate(self.file, size)

    def on_predict_end(self, trainer: Trainer, pl_module: TrainedModule) -> None:
        if self.failure is not None:
            raise NotSaved(
                f"{self.file} is not complete: {self.failure}; free space, or choose another file "
                "with --predictions.path, and repeat the command."
            )
        pl_module.print(f"written to {self.file}")

    def _choose_file(self, trainer: Trainer) -> Path:
        # Each rank writes its own file.
        rank = f"-{trainer.global_rank}" if trainer.global_rank else ""
        if self.path is not None:
            path = Path(self.path)
            return path.with_name(path.stem + rank + path.suffix)
        first = run_folder(trainer) / PREDICTIONS
        names = (f"{first.stem}{number}" for number in chain([""], map("_{}".format, count(2))))
        paths = (first.with_name(f"{name}{rank}{first.suffix}") for name in names)
        return next(path for path in paths if not path.exists() or not path.stat().st_size)


def format_prediction(row: Row) -> str:
    """Format one prediction for the terminal; an episode message by message."""
    if "messages" in row:
        return format_episode(row) + "\n"
    names = ("prompt", "reasoning", "answer") if row["answer"] else ("prompt", "completion")
    texts = {name: str(row[name]).strip() for name in names if row[name]}
    return "".join(f"{name + ':':<10} {text}\n" for name, text in texts.items())
