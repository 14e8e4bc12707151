"""Tests an environment: do policies that play no game earn anything, and does a text break it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.environments.base import EpisodePool, EpisodeStart, FailedEpisode, Message, StepResult
from litgrpo.rewards.scorer import Scorer
from litgrpo.tools.audit.policies import (
    HOSTILE,
    IDLE,
    KNOWS,
    Game,
    Policy,
    scripted,
    text_of,
)
from litgrpo.tools.audit.report import slack
from litgrpo.tools.audit.run import no_warnings

LOWEST = -1e300  # of a row without a reward


@dataclass
class Played:
    """One episode of a scripted policy.

    Args:
        start: how it began.
        game: what the policy saw.
        said: its turns.
        rewards: of the turns; None abstains.
        messages: all that was said and heard.
        failed: why it is left out, or "".
    """

    start: EpisodeStart
    game: Game
    said: list[str] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    failed: str = ""


@dataclass(frozen=True)
class Line:
    """What one policy earned."""

    policy: str
    kind: str
    count: int
    mean: float  # total reward, of episodes that did not fail
    paid: int  # episodes with a reward above 0
    turns: float
    failed: int
    reason: str  # of the first that failed
    beats: int  # rows on which it earns more than the best sample of the initial policy
    reaches: int  # rows on which it is paid, and not less than that
    above_mean: int  # rows on which it earns more than the mean of the samples


@dataclass(frozen=True)
class EpisodeReport:
    """What an audit of an environment found.

    Args:
        rows: that were played.
        samples: episodes of each by the initial policy.
        mean: mean total reward of these samples.
        best: mean over the rows of the best sample's.
        sampled_failed: samples that failed.
        lines: policy by policy.
        failed: {reward: {reason: episodes on which it failed}}.
    """

    rows: int
    samples: int
    mean: float
    best: float
    sampled_failed: int
    lines: list[Line]
    failed: dict[str, dict[str, int]]

    @property
    def faults(self) -> list[str]:
        """What makes environment and rewards unfit to train with, in sentences."""
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
        own = [f"failures: {self.sampled_failed} of {total} samples of the initial policy failed"]
        return [*exploits, *free, *broken, *rewards, *own[: self.sampled_failed]]

    @property
    def remarks(self) -> list[str]:
        """What is worth knowing, but may be meant."""
        earned = [
            f"'{line.policy}' is paid on {line.paid} of {line.count} rows"
            + f", more than the mean sample on {line.above_mean}" * (line.above_mean > 0)
            for line in self.lines
            if line.paid and line.kind != KNOWS
        ]
        known = [
            f"saying the reference answer without playing is paid on {line.paid} of {line.count} "
            "rows: the environment's answers are not needed for the reward"
            for line in self.lines
            if line.paid and line.kind == KNOWS
        ]
        equal = self.mean == self.best and all(line.mean == self.mean for line in self.lines)
        same = "every policy and every sample earns the same: there is nothing to learn from"
        return [*earned, *known, *[same] * equal]

    @property
    def passed(self) -> bool:
        """No fault was found."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        found = {"faults": self.faults, "remarks": self.remarks, "passed": self.passed}
        return asdict(self) | found


def audit_episodes(
    pool: EpisodePool,
    environment: object,
    scorer: Scorer,
    starts: Sequence[EpisodeStart],
    samples: Tensor,
    spoken: Sequence[Sequence[Sequence[str]]],
    *,
    max_turns: int,
) -> EpisodeReport:
    """Let scripted policies play, and compare what they earn with the initial policy's episodes.

    Args:
        pool: plays the environment; episodes that fail must not stop it.
        environment: the pattern, which may show tools.
        scorer: the rewards; it must not stop at failures either.
        starts: B rows with their seeds.
        samples: [B, k] total rewards of the initial policy's episodes; NaN where they failed.
        spoken: their turns.
        max_turns: of an episode.
    """
    require(len(starts) > 0, "there are no rows to play")
    best = samples.nan_to_num(LOWEST).argmax(1).tolist()
    shown = [texts[place] for texts, place in zip(spoken, best, strict=True)]
    answers = [_answer(start.row) for start in starts]
    with no_warnings():
        lines = []
        for policy in scripted(environment, any(map(bool, shown)), any(answers)):
            games = [Game("", *seen) for seen in zip(shown, answers, strict=True)]
            episodes = play(pool, policy, starts, games, max_turns)
            lines.append(line_of(policy, episodes, totals(scorer, episodes), samples))
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
    policy: Policy,
    starts: Sequence[EpisodeStart],
    games: Sequence[Game],
    max_turns: int,
) -> list[Played]:
    """One episode for each start, until it is done, fails or has `max_turns` turns."""
    played = [Played(start, game) for start, game in zip(starts, games, strict=True)]
    going = set()
    for number, opening in enumerate(pool.reset(starts)):
        if isinstance(opening, FailedEpisode):
            played[number].failed = opening.reason
            continue
        played[number].game.prompt = f"{starts[number].row['prompt']}{text_of(opening)}"
        going.add(number)
    for number in sorted(going):
        _speak(pool, policy, number, played[number])
    while going:
        for number, heard in pool.receive(wait=True).items():
            episode = played[number]
            if _goes_on(episode, heard) and len(episode.said) < max_turns:
                _speak(pool, policy, number, episode)
            else:
                going.discard(number)
    return played


def _speak(pool: EpisodePool, policy: Policy, number: int, episode: Played) -> None:
    said = policy.says(episode.game)
    episode.said.append(said)
    episode.messages.append({"role": "assistant", "content": said})
    pool.send(number, said)


def _goes_on(episode: Played, heard: StepResult | FailedEpisode) -> bool:
    """Note an answer; whether another turn may follow."""
    if isinstance(heard, FailedEpisode):
        episode.failed = heard.reason
        return False
    episode.rewards.append(heard.reward)
    texts = isinstance(heard.observation, str)
    messages: Any = [{"role": "user", "content": heard.observation}] if texts else heard.observation
    episode.game.heard.append(text_of(heard.observation))
    episode.messages += [] if heard.done else messages
    return not heard.done


def totals(scorer: Scorer, episodes: Sequence[Played]) -> Tensor:
    """[B] the total rewards; NaN of episodes that failed."""
    whole = [n for n, episode in enumerate(episodes) if not episode.failed]
    paid = torch.full((len(episodes),), torch.nan, dtype=torch.float64)
    if not whole:
        return paid
    right = [episodes[number] for number in whole]
    last = [episode.said[-1] for episode in right]
    names = dict.fromkeys(name for episode in right for name in episode.start.row)
    columns = {name: [each.start.row.get(name) for each in right] for name in names}
    columns |= {
        "messages": [each.messages for each in right],
        "turns": [each.said for each in right],
        "turn_rewards": [each.rewards for each in right],
        # No tokenizer is asked: characters will do.
        "completion_ids": [[ord(one) for one in text[:1000]] for text in last],
        "completion_lengths": [min(len(text), 1000) for text in last],
        "truncated": [False] * len(right),
    }
    del columns["prompt"]
    asked = [each.game.prompt for each in right]
    chat = scorer.reward_format == "chat"
    said: Any = [each.messages for each in right] if chat else last
    table = scorer(asked, said, columns, 1)
    paid[whole] = table.total.masked_fill(~table.valid, torch.nan).flatten()
    return paid


def line_of(policy: Policy, episodes: Sequence[Played], paid: Tensor, samples: Tensor) -> Line:
    """The numbers of one policy.

    Args:
        policy: that played.
        episodes: B.
        paid: [B] total rewards; NaN where there is none.
        samples: [B, k] those of the initial policy.
    """
    highest, mean = samples.nan_to_num(LOWEST).max(1).values, samples.nanmean(1)
    known = paid[~paid.isnan()]
    failed = [episode.failed for episode in episodes if episode.failed]
    good = paid.nan_to_num(LOWEST)
    reaches = (good > 0) & (good >= highest - slack(highest))
    return Line(
        policy=policy.name,
        kind=policy.kind,
        count=len(episodes),
        mean=float(known.mean()) if len(known) else 0.0,
        paid=int((good > 0).sum()),
        turns=sum(len(episode.said) for episode in episodes) / len(episodes),
        failed=len(failed),
        reason=next(iter(Counter(failed)), ""),
        beats=int((good > highest + slack(highest)).sum()),
        reaches=int(reaches.sum()),
        above_mean=int((good > mean + slack(mean)).sum()),
    )
