"""Check an environment with scripted policies: unearned rewards, and texts that break it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.audit.policies import (
    HOSTILE,
    IDLE,
    KNOWS,
    Game,
    ScriptedPolicy,
    list_policies,
    text_of,
)
from litgrpo.audit.report import AuditReport
from litgrpo.audit.score import (
    LOWEST,
    best_samples,
    compare_with_samples,
    describe_failures,
    mean_and_best,
    patient_scorer,
    slack,
)
from litgrpo.environments.base import EpisodePool, EpisodeStart, FailedEpisode, Message, StepResult
from litgrpo.rewards.scorer import Scorer

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass
class PlayedEpisode:
    """One episode of a scripted policy.

    Args:
        start: row and seed of the episode.
        game: the episode as the policy sees it.
        turns: texts of the policy.
        rewards: reward of each turn; None if the environment gave none.
        messages: turns and observations as a chat.
        failed: reason of the failure, or "".
    """

    start: EpisodeStart
    game: Game
    turns: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    failed: str = ""


def audit_episodes(
    pool: EpisodePool,
    environment: object,
    scorer: Scorer,
    starts: Sequence[EpisodeStart],
    samples: Tensor,
    turn_texts: Sequence[Sequence[Sequence[str]]],
    *,
    max_turns: int,
) -> AuditReport:
    """Play episodes with scripted policies; compare their rewards with the initial policy's.

    Args:
        pool: plays the environment.
        environment: the environment itself, whose tools are listed.
        scorer: the rewards.
        starts: B rows with their seeds.
        samples: [B, k] total rewards of the initial policy's episodes; NaN where they failed.
        turn_texts: [B][k] turns of these episodes.
        max_turns: maximum number of turns per episode.
    """
    import pandas as pd

    require(len(starts) > 0, "there are no rows to play")
    best_turns = [texts[n] for texts, n in zip(turn_texts, best_samples(samples), strict=True)]
    answers = [_answer(start.row) for start in starts]
    rows = {}
    with patient_scorer(scorer) as patient:
        for policy in list_policies(environment, any(map(bool, best_turns)), any(answers)):
            games = [Game("", *parts) for parts in zip(best_turns, answers, strict=True)]
            episodes = play(pool, policy, starts, games, max_turns)
            rows[policy.name] = summarize_policy(
                policy, episodes, score_episodes(patient, episodes), samples
            )
    policies = pd.DataFrame.from_dict(rows, orient="index").sort_values("mean", ascending=False)
    mean, best = mean_and_best(samples)
    num_rows, num_samples = samples.shape
    numbers = {"rows": num_rows, "samples": num_samples, "mean": mean, "best": best}
    return AuditReport(
        title=f"{num_rows} rows; {num_samples} episodes of each by the initial policy earn "
        f"{mean:.3g} on average, the best of them {best:.3g}",
        numbers=numbers | {"sampled_failed": int(samples.isnan().sum())},
        tables={"policy": policies},
        faults=[
            *find_faults(policies, samples),
            *describe_failures(patient, "episodes", "reward "),
            *describe_failed_samples(samples),
        ],
        remarks=list(find_remarks(policies, samples)),
    )


# --- faults and remarks ---


def find_faults(policies: DataFrame, samples: Tensor) -> Iterator[str]:
    """Yield policies that earn without solving the task, and those that break episodes."""
    _, best = mean_and_best(samples)
    than = f"of {samples.shape[1]} samples of the initial policy (these earn {best:.3g})"
    for name, row in policies.iterrows():
        count, earns = row["count"], f"a policy that '{name}' earns {row['mean']:.3g} on average"
        if row["kind"] != KNOWS and 2 * row["beats_best"] > count:
            yield (
                f"exploit: {earns} and beats the best {than} on {row['beats_best']} of {count} rows"
            )
        elif row["kind"] in (IDLE, HOSTILE) and 2 * row["reaches_best"] > count:
            yield (
                f"paid for nothing: {earns}, as much as the best {than} on {row['reaches_best']} "
                f"of {count} rows"
            )
    for name, row in policies[policies["failed"] > 0].iterrows():
        yield (
            f"failures: '{name}' breaks {row['failed']} of {row['count']} episodes "
            f"({row['reason']})"
        )


def describe_failed_samples(samples: Tensor) -> list[str]:
    """Return a fault if samples of the initial policy failed."""
    failed = int(samples.isnan().sum())
    fault = f"failures: {failed} of {samples.numel()} samples of the initial policy failed"
    return [fault] if failed else []


def find_remarks(policies: DataFrame, samples: Tensor) -> Iterator[str]:
    """Yield policies that are paid, which may be intended, and rewards that rank nothing."""
    paid = policies[policies["paid"] > 0]
    for name, row in paid[paid["kind"] != KNOWS].iterrows():
        remark = f"'{name}' is paid on {row['paid']} of {row['count']} rows"
        if row["beats_mean"]:
            remark += f", more than the mean sample on {row['beats_mean']}"
        yield remark
    for _, row in paid[paid["kind"] == KNOWS].iterrows():
        yield (
            f"giving the reference answer without playing is paid on {row['paid']} of "
            f"{row['count']} rows: the environment's answers are not needed for the reward"
        )
    mean, best = mean_and_best(samples)
    if mean == best and (policies["mean"] == mean).all():
        yield "every policy and every sample earns the same: advantages are zero"


# --- playing ---


def _answer(row: dict[str, Any]) -> str:
    answer = row.get("answer")
    first = answer[0] if isinstance(answer, list) and answer else answer
    return "" if first is None else str(first)


def play(
    pool: EpisodePool,
    policy: ScriptedPolicy,
    starts: Sequence[EpisodeStart],
    games: Sequence[Game],
    max_turns: int,
) -> list[PlayedEpisode]:
    """Play one episode per start, until it is done, fails or has `max_turns` turns."""
    played = [PlayedEpisode(start, game) for start, game in zip(starts, games, strict=True)]
    running = set()
    for number, opening in enumerate(pool.reset(starts)):
        if isinstance(opening, FailedEpisode):
            played[number].failed = opening.reason
            continue
        played[number].game.prompt = f"{starts[number].row['prompt']}{text_of(opening)}"
        running.add(number)
    for number in sorted(running):
        _send_turn(pool, policy, number, played[number])
    while running:
        for number, result in pool.receive(wait=True).items():
            episode = played[number]
            if _record_step(episode, result) and len(episode.turns) < max_turns:
                _send_turn(pool, policy, number, episode)
            else:
                running.discard(number)
                pool.end(number)
    return played


def _send_turn(
    pool: EpisodePool, policy: ScriptedPolicy, number: int, episode: PlayedEpisode
) -> None:
    text = policy.respond(episode.game)
    episode.turns.append(text)
    episode.messages.append({"role": "assistant", "content": text})
    pool.send(number, text)


def _record_step(episode: PlayedEpisode, result: StepResult | FailedEpisode) -> bool:
    """Record the result of a turn; return True if the episode continues."""
    if isinstance(result, FailedEpisode):
        episode.failed = result.reason
        return False
    episode.rewards.append(result.reward)
    if isinstance(result.observation, str):
        messages: list[Message] = [{"role": "user", "content": result.observation}]
    else:
        messages = result.observation
    episode.game.observations.append(text_of(result.observation))
    if not result.done:
        episode.messages += messages
    return not result.done


def score_episodes(scorer: Scorer, episodes: Sequence[PlayedEpisode]) -> Tensor:
    """Return the total rewards [B]; NaN for episodes that failed."""
    complete = [n for n, episode in enumerate(episodes) if not episode.failed]
    paid = torch.full((len(episodes),), torch.nan, dtype=torch.float64)
    if not complete:
        return paid
    played = [episodes[number] for number in complete]
    last_turns = [episode.turns[-1] for episode in played]
    names = dict.fromkeys(name for episode in played for name in episode.start.row)
    columns = {name: [episode.start.row.get(name) for episode in played] for name in names}
    columns |= {
        "messages": [episode.messages for episode in played],
        "turns": [episode.turns for episode in played],
        "turn_rewards": [episode.rewards for episode in played],
        # The audit has no tokenizer here; characters stand for tokens.
        "completion_ids": [[ord(character) for character in text[:1000]] for text in last_turns],
        "completion_lengths": [min(len(text), 1000) for text in last_turns],
        "truncated": [False] * len(played),
    }
    del columns["prompt"]
    prompts = [episode.game.prompt for episode in played]
    chat = scorer.scoring.format == "chat"
    completions: Any = [episode.messages for episode in played] if chat else last_turns
    table = scorer(prompts, completions, columns, 1)
    paid[complete] = table.total.masked_fill(~table.valid, torch.nan).flatten()
    return paid


def summarize_policy(
    policy: ScriptedPolicy, episodes: Sequence[PlayedEpisode], paid: Tensor, samples: Tensor
) -> dict[str, Any]:
    """Summarize B episodes of a policy; rewards `paid` [B], `samples` [B, k], NaN if failed."""
    highest = samples.nan_to_num(LOWEST).max(1).values
    failed = [episode.failed for episode in episodes if episode.failed]
    return compare_with_samples(paid, samples) | {
        "reaches_best": int(((paid > 0) & (paid >= highest - slack(highest))).sum()),
        "paid": int((paid > 0).sum()),
        "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "failed": len(failed),
        "reason": next(iter(Counter(failed)), ""),
        "kind": policy.kind,
    }
