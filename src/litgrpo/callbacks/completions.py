"""Completions with their rewards as tables, histograms and lines of JSON."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from litgrpo.arguments import at_least
from litgrpo.callbacks import episodes
from litgrpo.callbacks.metrics_csv import loggers_of
from litgrpo.callbacks.number_texts import finite, markdown, marked
from litgrpo.callbacks.run_folder import run_folder, writes_files
from litgrpo.types import RewardTable, Rollout


class Completions(Callback):
    """Writes completions and their rewards to `samples/iteration-000123.jsonl` and to the loggers.

    TensorBoard gets a table and histograms, Weights & Biases a table; of completions with several
    turns, whole episodes, too, what was spoken and what was heard apart.

    Args:
        every_n_iterations: how often, besides the first and the last; 0 switches it off.
        num_prompts: how many prompts a logger's table shows, each with all its completions.
        num_logged_groups: how many groups' rewards and advantages the first iteration prints.
    """

    def __init__(
        self, every_n_iterations: int = 10, num_prompts: int = 2, num_logged_groups: int = 3
    ) -> None:
        at_least("completions.every_n_iterations", every_n_iterations, 0)
        self.every_n_iterations = every_n_iterations
        self.num_prompts = num_prompts
        self.num_logged_groups = num_logged_groups

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the rollout that `training_step` returned, if it samples at all."""
        if "rollout" not in outputs or not self.every_n_iterations:
            return
        n = pl_module.iteration
        rollout, rewards, advantages = (outputs[k] for k in ("rollout", "rewards", "advantages"))
        if n == 1:
            pl_module.print(first_groups(rewards, advantages, self.num_logged_groups))
        due = n % self.every_n_iterations == 0 or n in (1, pl_module.max_iterations)
        if not due or not writes_files(trainer):
            return
        rows = sample_rows(n, rollout, rewards, advantages)
        write_jsonl(run_folder(trainer) / "samples" / f"iteration-{n:06d}.jsonl", rows)
        shown = rows[: self.num_prompts * rollout.group_size]
        log_tables(trainer, tables_of(shown), n)
        for board in loggers_of(trainer, TensorBoardLogger):
            for name, values in histograms(rollout, rewards, advantages).items():
                board.experiment.add_histogram(name, values, n)


def tables_of(rows: list[dict[str, Any]]) -> dict[str, list[list[Any]]]:
    """{name: lines of cells} of what loggers show of some rows of `sample_rows`."""
    told = [row for row in rows if "messages" in row]
    shown = {"completions": cells(rows), "episodes": episodes.table(told)}
    return {name: lines for name, lines in shown.items() if len(lines) > 1}


def log_tables(trainer: Trainer, tables: dict[str, list[list[Any]]], step: int) -> None:
    """Hand tables to TensorBoard and Weights & Biases, where there are such loggers."""
    for name, (head, *lines) in tables.items():
        for wandb in loggers_of(trainer, WandbLogger):
            wandb.log_table(name, columns=head, data=lines, step=step)
        for board in loggers_of(trainer, TensorBoardLogger):
            board.experiment.add_text(name, markdown_table([head, *lines]), step)


def sample_rows(
    iteration: int, rollout: Rollout, rewards: RewardTable, advantages: Tensor
) -> list[dict[str, Any]]:
    """One plain dictionary per completion.

    Args:
        iteration: when they were sampled.
        rollout: N completions of B prompts.
        rewards: [B, G] per reward function.
        advantages: [B, G].

    Returns:
        N rows; a number that is not finite (a function that abstained) is None, and a completion
        that the length limit cut off ends in ` [cut]`. Of episodes, also `episodes.of_row`.
    """
    lengths, truncated = rollout.lengths.tolist(), rollout.truncated.tolist()
    parts = {name: finite(part) for name, part in rewards.parts.items()}
    total, advantage = finite(rewards.total), finite(advantages)
    return [
        {
            "iteration": iteration,
            "prompt": rollout.prompts.prompts[row // rollout.group_size],
            "completion": marked(completion, truncated[row]),
            "reward": total[row],
            "rewards": {name: values[row] for name, values in parts.items()},
            "advantage": advantage[row],
            "length": lengths[row],
            "truncated": truncated[row],
            "columns": {
                name: values[row // rollout.group_size]
                for name, values in rollout.prompts.columns.items()
            }
            | {name: noted.get(row) for name, noted in rewards.extras.items()},
            **episodes.of_row(rollout, row),
        }
        for row, completion in enumerate(rollout.completions)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object per line; what JSON cannot hold becomes its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def cells(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """The rows as lines of cells, the names of the columns first."""
    names = list(rows[0]["rewards"]) if rows else []
    lines: list[list[Any]] = [["prompt", "completion", *names, "reward", "advantage"]]
    for row in rows:
        numbers = [*(row["rewards"][name] for name in names), row["reward"], row["advantage"]]
        lines.append([row["prompt"], row["completion"], *numbers])
    return lines


def markdown_table(lines: list[list[Any]]) -> str:
    """Lines of cells as a Markdown table; texts show as they are."""
    head, *others = lines
    return markdown([head, *([_shown(value) for value in line] for line in others)])


def _shown(value: Any) -> str:
    """A text or a number (None: not known) in a cell."""
    return cell(value) if isinstance(value, str) else "" if value is None else f"{value:.3g}"


def cell(text: str) -> str:
    r"""Text that shows as it is inside a cell of a Markdown table.

    Example:
        >>> cell("<answer>a|b</answer>\nend")
        '&lt;answer&gt;a&#124;b&lt;/answer&gt;<br>end'
    """
    # TensorBoard renders Markdown, then HTML: a tag would vanish, a bar or a line break would end
    # the cell, and stars, underlines and backticks would format.
    marks = {"|": "&#124;", "*": "&#42;", "_": "&#95;", "`": "&#96;", "\\": "&#92;"}
    escaped = html.escape(text, quote=False)
    for mark, entity in marks.items():
        escaped = escaped.replace(mark, entity)
    return escaped.replace("\r", "").replace("\n", "<br>")


def histograms(rollout: Rollout, rewards: RewardTable, advantages: Tensor) -> dict[str, Tensor]:
    """What is worth seeing as a distribution, without what is not a number."""
    values = {
        "reward/distribution": rewards.total[rewards.valid],
        "completion/len_distribution": rollout.lengths.float(),
        "policy/advantage_distribution": advantages.flatten(),
    }
    finite = {name: x[x.isfinite()].cpu() for name, x in values.items()}
    return {name: x for name, x in finite.items() if x.numel()}


def first_groups(rewards: RewardTable, advantages: Tensor, num_groups: int) -> str:
    """The rewards and advantages of the first groups, to see at once whether they make sense."""

    def numbers(values: Tensor) -> str:
        return " ".join(f"{value:6.2f}" for value in values.tolist())

    lines = []
    for group in range(min(num_groups, rewards.total.shape[0])):
        lines.append(f"group {group}: rewards    {numbers(rewards.total[group])}")
        lines.append(f"         advantages {numbers(advantages[group])}")
    return "\n".join(lines)
