"""Held-out prompts with their completions over time, and the hardest and easiest ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litgrpo.callbacks.formatting import format_number
from litgrpo.runs.pairing import choose_prompts, prompt_key
from litgrpo.runs.report.texts import MessageDiff, diff_messages
from litgrpo.runs.run import Row, Run, finite_numbers
from litgrpo.text.tables import plural
from litgrpo.text.visible import visible

MAX_PROMPTS = 12  # shown over time
NUM_EXTREMES = 5  # hardest and easiest
MAX_PROMPT_CHARS, MAX_NAME_CHARS = 800, 160
PromptKey = tuple[str, int]  # set of prompts, index


@dataclass(frozen=True)
class CompletionView:
    """A completion as the page shows it.

    Args:
        when: its iteration in words.
        messages: its messages, with differences to the one before.
        notes: correctness, reward, components and length in words.
        correct: whether it is correct; None if not known.
    """

    when: str
    messages: list[MessageDiff]
    notes: list[str]
    correct: bool | None


@dataclass(frozen=True)
class PromptHistory:
    """A held-out prompt and one completion per evaluation."""

    reason: str
    prompt: str
    name: str
    completions: list[CompletionView]


@dataclass(frozen=True)
class RankedPrompt:
    """A held-out prompt with its fraction of correct samples."""

    prompt: str
    before: str
    after: str
    reward: str


def describe_completion(row: Row) -> list[str]:
    """Describe a completion: correctness, reward, length, tool calls, failure."""
    notes = []
    if "correct" in row:
        notes.append({True: "correct", False: "incorrect"}.get(row["correct"], "unscored"))
    if "reward" in row:
        components = [
            f"{visible(name, 60)} {_format(x)}" for name, x in (row.get("rewards") or {}).items()
        ]
        brackets = f" ({', '.join(components)})" if components else ""
        notes.append(f"reward {_format(row['reward'])}{brackets}")
    if "length" in row:
        notes.append(f"{row['length']} tokens")
    if row.get("truncated"):
        notes.append("truncated")
    calls = [_describe_calls(visible(name, 60), x) for name, x in (row.get("calls") or {}).items()]
    if calls:
        notes.append(", ".join(calls))
    if row.get("failed"):
        notes.append(f"failed: {visible(row['failed'], 200)}")
    return notes


def _describe_calls(tool: str, counts: Any) -> str:
    """Describe [calls, failed calls] of a tool."""
    numbers = finite_numbers(counts if isinstance(counts, list) else [])
    calls, failed = [*numbers, 0.0, 0.0][:2]
    counted = f"{plural(int(calls), 'call')} of {tool}"
    return counted + (f", {failed:.0f} failed" if failed else "")


def _format(value: Any) -> str:
    return format_number(value) if finite_numbers([value]) else "unknown"


def follow_prompts(run: Run) -> list[PromptHistory]:
    """Return the same prompts at each evaluation, with the first sample of each.

    Every evaluation draws the samples of a prompt with the same random numbers.
    """
    evaluations = {
        iteration: {prompt_key(row): row for row in rows}
        for iteration, rows in run.evaluations.items()
    }
    if not evaluations:
        return []
    first, *_ = evaluations.values()
    *_, latest = evaluations.values()
    shared = [key for key in first if all(key in rows for rows in evaluations.values())]
    histories = []
    reasons = choose_prompts([(first[key], latest[key]) for key in shared], MAX_PROMPTS)
    for position, reason in reasons.items():
        key = shared[position]
        completions, earlier = [], None
        for iteration, rows in evaluations.items():
            sample = rows[key]["samples"][0]
            when = f"after {plural(iteration, 'iteration')}" if iteration else "before training"
            completions.append(
                CompletionView(
                    when,
                    diff_messages(sample, earlier),
                    describe_completion(sample),
                    sample.get("correct"),
                )
            )
            earlier = sample
        name = f"{visible(key[0], 60)} {key[1]}".strip()
        prompt = visible(latest[key]["prompt"], MAX_PROMPT_CHARS)
        histories.append(PromptHistory(reason, prompt, name, completions))
    return histories


def rank_prompts(run: Run) -> tuple[list[RankedPrompt], list[RankedPrompt]]:
    """Return the hardest and the easiest prompts of the last evaluation.

    They are ranked by the fraction of correct samples, then by reward; prompts without a scored
    sample are left out.
    """
    evaluations = [[], *run.evaluations.values()]
    before, after = evaluations[:2][-1], evaluations[-1]
    old = {prompt_key(row): row for row in before}

    def rank(row: Row) -> tuple[float, float, PromptKey]:
        (reward, *_) = (*finite_numbers([row.get("reward")]), 0.0)
        return row["correct"], reward, prompt_key(row)

    def view(row: Row) -> RankedPrompt:
        return RankedPrompt(
            visible(row["prompt"], MAX_NAME_CHARS),
            _format(old.get(prompt_key(row), {}).get("correct")),
            _format(row.get("correct")),
            _format(row.get("reward")),
        )

    scored = [row for row in after if finite_numbers([row.get("correct")])]
    ranking = [view(row) for row in sorted(scored, key=rank)]
    count = min(NUM_EXTREMES, len(ranking) // 2)
    return ranking[:count], ranking[len(ranking) - count :][::-1]
