"""Whole episodes for files, loggers and the terminal: what was spoken and heard, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from litgrpo.callbacks.number_texts import finite
from litgrpo.types import Rollout

SPOKEN = "assistant"


def of_row(rollout: Rollout, row: int) -> dict[str, Any]:
    """What a line of JSON says of an episode.

    Args:
        rollout: N completions.
        row: which.

    Returns:
        `messages` (those of the role `assistant` were spoken, the others heard), `turn_rewards`
        (None: the environment abstained), `calls` ({tool: [calls, failed]}), `failed` (why, or "");
        nothing where completions are single turns.
    """
    if not rollout.episodes:
        return {}
    episode = rollout.episodes[row]
    spoken, rewards = len(episode.assistant_texts), rollout.turn_rewards
    return {
        "messages": list(episode.messages),
        "turn_rewards": [] if rewards is None else finite(rewards[row])[:spoken],
        "calls": {name: list(counts) for name, counts in episode.calls.items()},
        "failed": episode.failed,
        "observation_tokens_cut": episode.observation_tokens_cut,
    }


def lines(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """An episode, or a single turn, as lines.

    Args:
        row: of `samples/*.jsonl` or `predictions.jsonl`.

    Returns:
        For each message who says it, what, and the reward of the turn ("" where there is none).
    """
    said = [("prompt", str(row["prompt"]), "")]
    if "messages" not in row:
        return [*said, ("policy", str(row["completion"]), "")]
    rewards, turn = list(row.get("turn_rewards", ())), 0
    for message in row["messages"]:
        spoken = message["role"] == SPOKEN
        name = message.get("name")
        who = "policy" if spoken else f"{message['role']}{f' {name}' if name else ''}"
        reward = _number(rewards[turn]) if spoken and turn < len(rewards) else ""
        said.append((who, str(message["content"]), reward))
        turn += spoken
    return said


def readable(row: Mapping[str, Any]) -> str:
    """An episode for the terminal.

    Example:
        >>> heard = [{"role": "assistant", "content": "<call>2*3</call>"},
        ...          {"role": "tool", "content": "6"}, {"role": "assistant", "content": "6"}]
        >>> print(readable({"prompt": "2*3=?", "messages": heard, "turn_rewards": [0.0, 1.0]}))
        prompt     | 2*3=?
        policy 1   | <call>2*3</call>   (reward 0)
        tool       | 6
        policy 2   | 6   (reward 1)
    """
    shown, turn = [], 0
    for who, text, reward in lines(row):
        turn += who == "policy"
        name = f"policy {turn}" if who == "policy" and "messages" in row else who
        first, *others = text.splitlines() or [""]
        shown += [f"{name:<10} | {first}", *(f"{'':<10} | {line}" for line in others)]
        shown[-1] += f"   (reward {reward})" if reward else ""
    return "\n".join(shown + _notes(row))


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Episodes as lines of cells, a line for each message, the names of the columns first."""
    cells = [["episode", "who", "text", "reward of the turn", "reward", "advantage"]]
    for number, row in enumerate(rows):
        for place, (who, text, reward) in enumerate(lines(row)):
            total = [_number(row["reward"]), _number(row["advantage"])] if place == 0 else ["", ""]
            cells.append([str(number), who, text, reward, *total])
    return cells


def _notes(row: Mapping[str, Any]) -> list[str]:
    """What else is known of an episode, in a line each."""
    parts = ", ".join(f"{k} {_number(v)}" for k, v in row.get("rewards", {}).items())
    calls = ", ".join(f"{k} {n} ({bad} failed)" for k, (n, bad) in row.get("calls", {}).items())
    total = f"{_number(row.get('reward'))}  ({parts})" if parts else ""
    known = {
        "reward": total,
        "advantage": _number(row["advantage"]) if "advantage" in row else "",
        "calls": calls,
        "failed": row.get("failed", ""),
        "left out": f"{row['observation_tokens_cut']} heard tokens"
        if row.get("observation_tokens_cut")
        else "",
    }
    return [f"{name + ':':<10}   {text}" for name, text in known.items() if text]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
