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
    best_samples,
    compare_with_samples,
    describe_equal_samples,
    describe_failures,
    describe_paid_for_nothing,
    describe_samples,
    mean_and_best,
    patient_scorer,
    reach_best,
)
from litgrpo.environments.base import EpisodePool, EpisodeStart, FailedEpisode, Message, StepResult
from litgrpo.rewards.scorer import Scorer

if TYPE_CHECKING:
    from pandas import DataFrame, Series


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
        title=f"{num_rows} rows; {num_samples} episodes of each by the initial policy "
        f"{describe_samples(samples)}",
        numbers=numbers | {"sampled_failed": int(samples.isnan().sum())},
        tables={"policy": policies},
        faults=[
            *find_faults(policies, samples),
            *describe_failures(patient, "episodes", "reward "),
            *describe_failed_samples(samples),
        ],
        remarks=[*find_remarks(policies), *describe_equal_samples(samples)],
        untested="whether correct episodes are rewarded was not tested",
    )


# --- faults and remarks ---


def find_faults(policies: DataFrame, samples: Tensor) -> Iterator[str]:
    """Yield policies that earn without solving the task, and those that break episodes."""
    _, best = mean_and_best(samples)
    exploits, idle = find_unearned(policies)
    for name, row in policies[exploits].iterrows():
        yield (
            f"exploit: a policy that '{name}' earns {row['mean']:.3g} on average and beats the "
            f"best of {samples.shape[1]} samples of the initial policy (these earn {best:.3g}) on "
            f"{row['beats_best']} of {row['count']} rows"
        )
    yield from describe_paid_for_nothing(policies.index[idle], samples)
    for name, row in policies[policies["failed"] > 0].iterrows():
        yield (
            f"failures: '{name}' breaks {row['failed']} of {row['count']} episodes "
            f"({row['reason']})"
        )


def find_unearned(policies: DataFrame) -> tuple[Series, Series]:
    """Return which policies beat the best sample on most rows, and which idle ones equal it."""
    kind, half = policies["kind"], policies["count"] / 2
    beats = (kind != KNOWS) & (policies["beats_best"] > half)
    idle = kind.isin((IDLE, HOSTILE)) & (policies["reaches_best"] > half) & ~beats
    return beats, idle


def describe_failed_samples(samples: Tensor) -> list[str]:
    """Return a fault if samples of the initial policy failed."""
    failed, count = int(samples.isnan().sum()), samples.numel()
    fault = f"failures: {failed} of {count} samples of the initial policy failed or have no reward"
    return [fault] if failed else []


def find_remarks(policies: DataFrame) -> Iterator[str]:
    """Yield policies without a fault that are paid, which may be intended."""
    exploits, idle = find_unearned(policies)
    paid = policies[(policies["paid"] > 0) & ~exploits & ~idle]
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
    failed = [episode.failed for episode in episodes if episode.failed]
    return compare_with_samples(paid, samples) | {
        "reaches_best": int(((paid > 0) & reach_best(paid, samples)).sum()),
        "paid": int((paid > 0).sum()),
        "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "failed": len(failed),
        "reason": next(iter(Counter(failed)), ""),
        "kind": policy.kind,
    }
