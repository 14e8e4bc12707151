"""What every held-out prompt was answered, as lines of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor, distributed

from litgrpo.callbacks import episodes
from litgrpo.callbacks.completions import write_jsonl
from litgrpo.callbacks.number_texts import finite, marked
from litgrpo.callbacks.run_folder import run_folder, writes_files
from litgrpo.types import RewardTable, Rollout

FOLDER = "evaluation"
Row = dict[str, Any]


class EvaluationFiles(Callback):
    """Writes each evaluation to `evaluation/`, a line for each prompt with all its completions.

    In a fit `iteration-000050.jsonl` is the evaluation after 50 iterations (000000: before the
    first); `validate` and `test` write a file that names the checkpoint they measured.

    Args:
        enabled: whether to write them.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.rows: list[Row] = []

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Begin anew."""
        self.rows = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any, **__: Any
    ) -> None:
        """Keep what the batch was answered; supervised training answers nothing."""
        if self.enabled and "rollout" in (outputs or {}):
            self.rows += prompt_rows(outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write it all, each prompt once."""
        rows, self.rows = gathered(self.rows), []
        if rows and writes_files(trainer):
            name = f"iteration-{pl_module.iteration:06d}"
            if trainer.state.fn != "fit":
                name = f"{trainer.state.fn.value}-{measured(trainer)}"  # type: ignore[union-attr]
            write_jsonl(run_folder(trainer) / FOLDER / f"{name}.jsonl", each_once(rows))

    on_test_start, on_test_batch_end = on_validation_start, on_validation_batch_end
    on_test_end = on_validation_end


def measured(trainer: Trainer) -> str:
    """What a verb evaluates: the name of its checkpoint, `start` without one.

    `last` and `best` are links, whose file is named.
    """
    path = trainer.ckpt_path
    return "start" if path is None else Path(path).resolve().stem


def prompt_rows(outputs: Row) -> list[Row]:
    """One plain dictionary for each prompt of a batch.

    Args:
        outputs: the fields of an `Evaluated`.

    Returns:
        B rows; a number that is not finite is None, and a completion that the length limit cut off
        ends in ` [cut]`.
    """
    rollout, greedy, name = outputs["rollout"], outputs["greedy"], outputs["name"]
    prompts, size = rollout.prompts, rollout.group_size
    samples = completion_rows(rollout, outputs["rewards"], outputs["right"])
    likely: list[Row | None] = [None] * len(prompts)
    if greedy is not None:
        likely = [*completion_rows(greedy, outputs["greedy_rewards"], outputs["greedy_right"])]
    index = prompts.index.tolist()
    return [
        {
            **({"set": name} if name else {}),
            "index": index[b],
            "prompt": prompts.prompts[b],
            "reward": mean([row["reward"] for row in samples[b * size : (b + 1) * size]]),
            "right": mean([float(row["right"]) for row in samples[b * size : (b + 1) * size]]),
            "samples": samples[b * size : (b + 1) * size],
            "greedy": likely[b],
            "columns": {column: values[b] for column, values in prompts.columns.items()},
        }
        for b in range(len(prompts))
    ]


def completion_rows(rollout: Rollout, rewards: RewardTable, right: Tensor) -> list[Row]:
    """One plain dictionary for each completion.

    Args:
        rollout: N = B * G completions.
        rewards: [B, G] theirs.
        right: [B, G] True where one succeeded.
    """
    total = finite(rewards.total.where(rewards.valid, float("nan")))
    parts = {name: finite(part) for name, part in rewards.parts.items()}
    lengths, cut, successes = (
        values.flatten().tolist() for values in (rollout.lengths, rollout.truncated, right)
    )
    return [
        {
            "completion": marked(text, cut[row]),
            "reward": total[row],
            "rewards": {name: values[row] for name, values in parts.items()},
            "right": successes[row],
            "length": lengths[row],
            "truncated": cut[row],
            **episodes.of_row(rollout, row),
        }
        for row, text in enumerate(rollout.completions)
    ]


def mean(values: list[float | None]) -> float | None:
    """Mean of the known values; None where none is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def gathered(rows: list[Row]) -> list[Row]:
    """The rows of all processes; every process must take part."""
    if not distributed.is_initialized():
        return rows
    of_all: list[list[Row]] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(of_all, rows)
    return [row for part in of_all for row in part]


def each_once(rows: list[Row]) -> list[Row]:
    """The rows in the order of their sets and of the prompts in them, each prompt once."""
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        first.setdefault((row.get("set", ""), row["index"]), row)
    return [first[place] for place in sorted(first)]
