"""Check an environment with scripted policies: unearned rewards, and texts that break it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
from litgrpo.audit.report import slack
from litgrpo.audit.run import no_warnings
from litgrpo.environments.base import EpisodePool, EpisodeStart, FailedEpisode, Message, StepResult
from litgrpo.rewards.scorer import Scorer

LOWEST = -1e300  # replaces NaN, the reward of a failed episode, so that it is never the best


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


@dataclass(frozen=True)
class PolicyResult:
    """Rewards of one scripted policy."""

    policy: str
    kind: str
    count: int
    mean: float  # total reward, of episodes that did not fail
    paid: int  # episodes with a reward above 0
    turns: float
    failed: int
    reason: str  # of the first that failed
    beats: int  # rows with more reward than the best sample of the initial policy
    reaches: int  # rows with a reward above 0 that is at least as high as that sample
    above_mean: int  # rows with more reward than the mean of the samples


@dataclass(frozen=True)
class EpisodeReport:
    """Result of the audit of an environment.

    Args:
        rows: number of rows that were played.
        samples: episodes of each row by the initial policy.
        mean: mean total reward of these samples.
        best: mean over rows of the best sample's reward.
        sampled_failed: number of samples that failed.
        lines: one result per scripted policy.
        failed: {reward: {reason: episodes on which it failed}}.
    """

    rows: int
    samples: int
    mean: float
    best: float
    sampled_failed: int
    lines: list[PolicyResult]
    failed: dict[str, dict[str, int]]

    @property
    def faults(self) -> list[str]:
        """Problems that make environment or rewards unfit for training, one sentence each."""
        than = f"of {self.samples} samples of the initial policy (these earn {self.best:.3g})"
        exploits = [
            f"exploit: a policy that '{line.policy}' earns {line.mean:.3g} on average and beats "
            f"the best {than} on {line.beats} of {line.count} rows"
            for line in self.lines
            if line.kind != KNOWS and 2 * line.beats > line.count
        ]
        free = [
            f"paid for nothing: a policy that '{line.policy}' earns {line.mean:.3g} on average, as "
            f"much as the best {than} on {line.reaches} of {line.count} rows"
            for line in self.lines
            if line.kind in (IDLE, HOSTILE) and 2 * line.reaches > line.count >= 2 * line.beats
        ]
        broken = [
            f"failures: '{line.policy}' breaks {line.failed} of {line.count} episodes "
            f"({line.reason})"
            for line in self.lines
            if line.failed
        ]
        rewards = [
            f"failures: reward {name!r} fails on episodes of the audit ({reason}: {count})"
            for name, reasons in self.failed.items()
            for reason, count in reasons.items()
        ]
        total = self.rows * self.samples
        found = [*exploits, *free, *broken, *rewards]
        if self.sampled_failed:
            found.append(
                f"failures: {self.sampled_failed} of {total} samples of the initial policy failed"
            )
        return found

    @property
    def remarks(self) -> list[str]:
        """Findings that may be intended, one sentence each."""
        earned = []
        for line in self.lines:
            if line.paid and line.kind != KNOWS:
                remark = f"'{line.policy}' is paid on {line.paid} of {line.count} rows"
                if line.above_mean:
                    remark += f", more than the mean sample on {line.above_mean}"
                earned.append(remark)
        known = [
            f"giving the reference answer without playing is paid on {line.paid} of {line.count} "
            "rows: the environment's answers are not needed for the reward"
            for line in self.lines
            if line.paid and line.kind == KNOWS
        ]
        equal = self.mean == self.best and all(line.mean == self.mean for line in self.lines)
        if equal:
            known.append("every policy and every sample earns the same: advantages are zero")
        return earned + known

    @property
    def passed(self) -> bool:
        """True if there is no fault."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        found = {"faults": self.faults, "remarks": self.remarks, "passed": self.passed}
        return asdict(self) | found


def audit_episodes(
    pool: EpisodePool,
    environment: object,
    scorer: Scorer,
    starts: Sequence[EpisodeStart],
    samples: Tensor,
    turn_texts: Sequence[Sequence[Sequence[str]]],
    *,
    max_turns: int,
) -> EpisodeReport:
    """Play episodes with scripted policies; compare their rewards with the initial policy's.

    Args:
        pool: plays the environment.
        environment: the environment itself, whose tools are listed.
        scorer: the rewards; failures must not stop it.
        starts: B rows with their seeds.
        samples: [B, k] total rewards of the initial policy's episodes; NaN where they failed.
        turn_texts: [B][k] turns of these episodes.
        max_turns: maximum number of turns per episode.
    """
    require(len(starts) > 0, "there are no rows to play")
    best = samples.nan_to_num(LOWEST).argmax(1).tolist()
    shown = [texts[place] for texts, place in zip(turn_texts, best, strict=True)]
    answers = [_answer(start.row) for start in starts]
    with no_warnings():
        lines = []
        for policy in list_policies(environment, any(map(bool, shown)), any(answers)):
            games = [Game("", *seen) for seen in zip(shown, answers, strict=True)]
            episodes = play(pool, policy, starts, games, max_turns)
            lines.append(
                summarize_policy(policy, episodes, score_episodes(scorer, episodes), samples)
            )
    real = samples.nan_to_num(LOWEST).max(1).values
    return EpisodeReport(
        rows=len(starts),
        samples=samples.shape[1],
        mean=float(samples.nanmean()),
        best=float(real[real > LOWEST].mean()),
        sampled_failed=int(samples.isnan().sum()),
        lines=lines,
        failed={name: dict(reasons) for name, reasons in scorer.failures.items() if reasons},
    )


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
    last = [episode.turns[-1] for episode in played]
    names = dict.fromkeys(name for episode in played for name in episode.start.row)
    columns = {name: [each.start.row.get(name) for each in played] for name in names}
    columns |= {
        "messages": [each.messages for each in played],
        "turns": [each.turns for each in played],
        "turn_rewards": [each.rewards for each in played],
        # The audit has no tokenizer here; characters stand for tokens.
        "completion_ids": [[ord(one) for one in text[:1000]] for text in last],
        "completion_lengths": [min(len(text), 1000) for text in last],
        "truncated": [False] * len(played),
    }
    del columns["prompt"]
    prompts = [each.game.prompt for each in played]
    chat = scorer.reward_format == "chat"
    completions: Any = [each.messages for each in played] if chat else last
    table = scorer(prompts, completions, columns, 1)
    paid[complete] = table.total.masked_fill(~table.valid, torch.nan).flatten()
    return paid


def summarize_policy(
    policy: ScriptedPolicy, episodes: Sequence[PlayedEpisode], paid: Tensor, samples: Tensor
) -> PolicyResult:
    """Summarize the episodes of one policy.

    Args:
        policy: the scripted policy.
        episodes: its B episodes.
        paid: [B] total rewards; NaN for failed episodes.
        samples: [B, k] total rewards of the initial policy.
    """
    highest, mean = samples.nan_to_num(LOWEST).max(1).values, samples.nanmean(1)
    known = paid[~paid.isnan()]
    failed = [episode.failed for episode in episodes if episode.failed]
    good = paid.nan_to_num(LOWEST)
    reaches = (good > 0) & (good >= highest - slack(highest))
    return PolicyResult(
        policy=policy.name,
        kind=policy.kind,
        count=len(episodes),
        mean=float(known.mean()) if len(known) else 0.0,
        paid=int((good > 0).sum()),
        turns=sum(len(episode.turns) for episode in episodes) / len(episodes),
        failed=len(failed),
        reason=next(iter(Counter(failed)), ""),
        beats=int((good > highest + slack(highest)).sum()),
        reaches=int(reaches.sum()),
        above_mean=int((good > mean + slack(mean)).sum()),
    )
