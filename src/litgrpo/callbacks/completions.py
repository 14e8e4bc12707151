"""Completions and episodes with their rewards, as JSON lines, tables, histograms and text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor

from litgrpo.arguments import at_least
from litgrpo.callbacks.formatting import finite_or_none, mark_truncated
from litgrpo.callbacks.loggers import loggers_of
from litgrpo.distributed.messages import warn_once_on_failure
from litgrpo.files import write_if_possible
from litgrpo.protocol import TrainedModule
from litgrpo.run_folder import run_folder, writes_files
from litgrpo.text.tables import escape_cell
from litgrpo.types import RewardTable, Rollout

Row = dict[str, Any]
POLICY_ROLE = "assistant"  # of the messages that the policy generated


class Completions(Callback):
    """Writes completions and rewards to `samples/iteration-000123.jsonl` and to the loggers.

    TensorBoard gets a table and histograms, Weights & Biases a table. Multi-turn completions also
    get a table of whole episodes, in which generated turns and observations are separate rows.

    Args:
        every_n_iterations: interval; the first and the last iteration are always written. 0
            disables it.
        num_prompts: number of prompts in a logger's table, each with all its completions.
        num_logged_groups: number of groups whose rewards and advantages the first iteration prints.

    Example:
        `Trainer(callbacks=[Completions(every_n_iterations=50, num_prompts=4)])`
    """

    def __init__(
        self, every_n_iterations: int = 10, num_prompts: int = 2, num_logged_groups: int = 3
    ) -> None:
        at_least("completions.every_n_iterations", every_n_iterations, 0)
        self.every_n_iterations = every_n_iterations
        self.num_prompts = num_prompts
        self.num_logged_groups = num_logged_groups

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainedModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # SFT returns no rollout.
        if "iteration" not in outputs or not self.every_n_iterations:
            return
        n, iteration = pl_module.iteration, outputs["iteration"]
        rollout, rewards, advantages = iteration.rollout, iteration.rewards, iteration.advantages
        if n == 1:
            pl_module.print(format_first_groups(rewards, advantages, self.num_logged_groups))
        is_due = n % self.every_n_iterations == 0 or n in (1, pl_module.max_iterations)
        if not is_due or not writes_files(trainer):
            return
        rows = completion_rows(n, rollout, rewards, advantages)
        write_jsonl(run_folder(trainer) / "samples" / f"iteration-{n:06d}.jsonl", rows, "samples")
        log_tables(trainer, build_tables(rows[: self.num_prompts * rollout.group_size]), n)
        for board in loggers_of(trainer, TensorBoardLogger):
            with warn_once_on_failure("logger TensorBoard"):
                for name, values in histograms(rollout, rewards, advantages).items():
                    board.experiment.add_histogram(name, values, n)


# --- rows of JSON ---


def completion_rows(
    iteration: int, rollout: Rollout, rewards: RewardTable, advantages: Tensor
) -> list[Row]:
    """One plain dictionary per completion.

    Args:
        iteration: in which they were sampled.
        rollout: N completions of B prompts.
        rewards: [B, G] per reward function.
        advantages: [B, G].

    Returns:
        N rows. A number that is not known (no reward function scored the completion) is None, a
        completion that the length limit cut off ends in ` [cut]`. Rows of episodes also have the
        entries of `episode_row`.
    """
    advantage = finite_or_none(advantages)
    rows = []
    for row, scored in enumerate(scored_rows(rollout, rewards)):
        prompt = row // rollout.group_size
        columns = {name: values[prompt] for name, values in rollout.prompts.columns.items()}
        columns |= {name: values.get(row) for name, values in rewards.extras.items()}
        source = {"iteration": iteration, "prompt": rollout.prompts.prompts[prompt]}
        rows.append(source | scored | {"advantage": advantage[row], "columns": columns})
    return rows


def scored_rows(rollout: Rollout, rewards: RewardTable) -> list[Row]:
    """Return text, rewards and length of each completion, and what describes an episode."""
    total = finite_or_none(rewards.scored)
    parts = {name: finite_or_none(part) for name, part in rewards.components.items()}
    lengths, truncated = (x.flatten().tolist() for x in (rollout.lengths, rollout.truncated))
    return [
        {
            "completion": mark_truncated(text, truncated[row]),
            "reward": total[row],
            "rewards": {name: values[row] for name, values in parts.items()},
            "length": lengths[row],
            "truncated": truncated[row],
            **episode_row(rollout, row),
        }
        for row, text in enumerate(rollout.completions)
    ]


def episode_row(rollout: Rollout, row: int) -> Row:
    """Entries of a JSON row that describe an episode; empty for single-turn completions.

    Args:
        rollout: N completions.
        row: index of the completion.

    Returns:
        `messages` (the role `assistant` marks generated ones, the others are observations),
        `turn_rewards` (None: the environment gave none), `calls` ({tool: [calls, failed]}),
        `failed` (the reason, or ""), `observation_tokens_cut` (tokens cut from observations).
    """
    if not rollout.episodes:
        return {}
    episode = rollout.episodes[row]
    return {
        "messages": list(episode.messages),
        "turn_rewards": episode.turn_rewards,
        "calls": {name: list(counts) for name, counts in episode.calls.items()},
        "failed": episode.failed,
        "observation_tokens_cut": episode.observation_tokens_cut,
    }


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Write one JSON object per line; a full disk costs the file, not the training.

    Returns:
        True if the file was written.
    """
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    return write_if_possible(path, "".join(line + "\n" for line in lines), name)


# --- tables and histograms ---


def build_tables(rows: list[Row]) -> dict[str, list[list[Any]]]:
    """Tables for the loggers, {name: rows of cells, the head first}; only those with content."""
    episodes = [row for row in rows if "messages" in row]
    tables = {"completions": completion_table(rows), "episodes": episode_table(episodes)}
    return {name: table for name, table in tables.items() if len(table) > 1}


def log_tables(trainer: Trainer, tables: dict[str, list[list[Any]]], step: int) -> None:
    """Log tables to TensorBoard and Weights & Biases."""
    for name, (head, *rows) in tables.items():
        for wandb in loggers_of(trainer, WandbLogger):
            with warn_once_on_failure("logger WandbLogger"):
                wandb.log_table(name, columns=head, data=rows, step=step)
        # Without padding: a completion can have thousands of characters.
        lines = [
            head,
            ["---"] * len(head),
            *([_format_cell(value) for value in row] for row in rows),
        ]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        for board in loggers_of(trainer, TensorBoardLogger):
            with warn_once_on_failure("logger TensorBoard"):
                board.experiment.add_text(name, table, step)


def completion_table(rows: list[Row]) -> list[list[Any]]:
    """Rows of cells, one per completion, the head first."""
    names = list(rows[0]["rewards"]) if rows else []
    table: list[list[Any]] = [["prompt", "completion", *names, "reward", "advantage"]]
    for row in rows:
        numbers = [*(row["rewards"][name] for name in names), row["reward"], row["advantage"]]
        table.append([row["prompt"], row["completion"], *numbers])
    return table


def episode_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of cells, one per message of an episode, the head first."""
    table = [["episode", "role", "text", "turn reward", "reward", "advantage"]]
    for number, row in enumerate(rows):
        for position, (role, text, turn_reward) in enumerate(episode_messages(row)):
            total = ["", ""]
            if position == 0:
                total = [_format(row["reward"]), _format(row["advantage"])]
            table.append([str(number), role, text, turn_reward, *total])
    return table


def _format_cell(value: str | float | None) -> str:
    """Escape a text, or format a number (None: unknown)."""
    if isinstance(value, str):
        return escape_cell(value)
    return "" if value is None else f"{value:.3g}"


def histograms(rollout: Rollout, rewards: RewardTable, advantages: Tensor) -> dict[str, Tensor]:
    """Values whose distribution TensorBoard shows, without NaN and infinity."""
    values = {
        "reward/distribution": rewards.total[rewards.valid],
        "completion/len_distribution": rollout.lengths.float(),
        "policy/advantage_distribution": advantages[rewards.valid],
    }
    finite = {name: x[x.isfinite()].cpu() for name, x in values.items()}
    return {name: x for name, x in finite.items() if x.numel()}


# --- text for the terminal ---


def format_first_groups(rewards: RewardTable, advantages: Tensor, num_groups: int) -> str:
    """Rewards and advantages of the first groups, for a quick check."""

    def numbers(values: Tensor) -> str:
        return " ".join(f"{'none' if isnan(x) else f'{x:.2f}':>6}" for x in values.tolist())

    lines = []
    for group in range(min(num_groups, rewards.total.shape[0])):
        lines.append(f"group {group}: rewards    {numbers(rewards.scored[group])}")
        lines.append(f"         advantages {numbers(advantages[group])}")
    return "\n".join(lines)


def episode_messages(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Messages of an episode, or prompt and completion of a single turn.

    Args:
        row: of `samples/*.jsonl` or `predictions.jsonl`.

    Returns:
        (role, text, reward of the turn or "") of each message; the role of generated ones is
        `policy`.
    """
    messages = [("prompt", str(row["prompt"]), "")]
    if "messages" not in row:
        return [*messages, ("policy", str(row["completion"]), "")]
    rewards, turn = list(row.get("turn_rewards", ())), 0
    for message in row["messages"]:
        role, reward = str(message["role"]), ""
        if message.get("name"):
            role = f"{role} {message['name']}"
        if message["role"] == POLICY_ROLE:
            role = "policy"
            if turn < len(rewards):
                reward = _format(rewards[turn])
            turn += 1
        messages.append((role, str(message["content"]), reward))
    return messages


def format_episode(row: Mapping[str, Any]) -> str:
    """Format an episode for the terminal."""
    lines, turn = [], 0
    for role, text, reward in episode_messages(row):
        name = role
        if role == "policy" and "messages" in row:
            turn += 1
            name = f"policy {turn}"
        first, *other_lines = text.splitlines() or [""]
        lines += [f"{name:<10} | {first}", *(f"{'':<10} | {line}" for line in other_lines)]
        if reward:
            lines[-1] += f"   (reward {reward})"
    return "\n".join(lines + _format_notes(row))


def _format_notes(row: Mapping[str, Any]) -> list[str]:
    """Reward, advantage, tool calls and failure of an episode, one line each."""
    notes = {}
    if row.get("rewards"):
        parts = ", ".join(f"{name} {_format(value)}" for name, value in row["rewards"].items())
        notes["reward"] = f"{_format(row.get('reward'))}  ({parts})"
    if "advantage" in row:
        notes["advantage"] = _format(row["advantage"])
    if row.get("calls"):
        calls = row["calls"].items()
        notes["calls"] = ", ".join(f"{name} {n} ({failed} failed)" for name, (n, failed) in calls)
    if row.get("failed"):
        notes["failed"] = row["failed"]
    if row.get("observation_tokens_cut"):
        notes["cut off"] = f"{row['observation_tokens_cut']} observation tokens"
    return [f"{name + ':':<10}   {text}" for name, text in notes.items()]


def _format(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
