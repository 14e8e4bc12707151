"""Start-up checks of episodes: ends of turns, reproducible environments."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from litgrpo.environments.base import (
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    Message,
    StepResult,
)
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.models.policy import Policy
from litgrpo.rollout.episodes import EpisodeRunner, Episodes, EpisodeSettings
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.rollout.turn_format import InlineFormat
from litgrpo.types import PromptBatch, Rollout

log = logging.getLogger(__name__)

TURN_TOKENS = 4


@dataclass
class ConstantEnvironment:
    """Environment with a constant observation; the reward of a turn is its length."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Add nothing to the prompt."""
        return ""

    def step(self, action: str) -> StepResult:
        """Return the constant observation."""
        return StepResult(" ok", reward=float(len(action)))


def small_episodes(policy: Policy) -> Episodes:
    """Build episodes of at most three short turns."""
    settings = EpisodeSettings(
        max_turns=3, max_turn_tokens=TURN_TOKENS, turn_format="inline", close_truncated_turns=True
    )

    def opener(prompts: PromptBatch, row: int, added: object) -> list[int]:
        return prompts.prompt_ids[row][prompts.prompt_mask[row]].tolist()

    return Episodes(
        InProcessEpisodes(ConstantEnvironment()), InlineFormat(policy.tokenizer), settings, opener
    )


def count_unreproducible_responses(episodes: EpisodeRunner | None, prompts: PromptBatch) -> float:
    """Count observations that are not a function of row, seed and actions; 0 for agents.

    Args:
        episodes: of the run.
        prompts: a few; the first is played three times, at last after the others.
    """
    if not isinstance(episodes, Episodes):
        return 0.0
    rows = [
        {name: values[n] for name, values in prompts.columns.items()} | {"prompt": text}
        for n, text in enumerate(prompts.prompts)
    ]
    starts = [EpisodeStart(row, n, (0, 0, n, 0)) for n, row in enumerate(rows)]
    actions = [prompts.prompts[0], "1", "<answer>2</answer>"]
    deviations = find_deviations(episodes.pool, starts, actions)
    for line in deviations[:1]:
        log.warning("the environment, %s", line)
    return float(len(deviations))


# Responses of an episode, that of `reset` first.
Transcript = list[str | list[Message] | StepResult | FailedEpisode]


def find_deviations(
    pool: EpisodePool, starts: Sequence[EpisodeStart], actions: Sequence[str]
) -> list[str]:
    """Play an episode, play it again, and after others; describe responses that differ.

    One process plays them one after the other. This reveals state that outlives an episode (class
    attributes, module variables) and non-deterministic inputs (clock, network, system random
    numbers). Worker processes seed the global random generators for each episode.

    Args:
        pool: plays single episodes.
        starts: the first is compared; the others are played before it.
        actions: turns of every episode.

    Returns:
        One line for each response that differs.
    """
    first, again, *_, last = (
        play_episode(pool, start, actions) for start in (starts[0], *starts, starts[0])
    )
    again_differs = _find_differences(first, again, "played again")
    return again_differs + _find_differences(first, last, "played after others")


def play_episode(pool: EpisodePool, start: EpisodeStart, actions: Sequence[str]) -> Transcript:
    """Play an episode to its end; return its responses."""
    transcript: Transcript = list(pool.reset([start]))
    for action in actions:
        last = transcript[-1]
        if isinstance(last, FailedEpisode) or (isinstance(last, StepResult) and last.done):
            break
        pool.send(0, action)
        transcript.append(pool.receive(wait=True)[0])
    pool.end(0)
    return transcript


def _find_differences(first: Transcript, second: Transcript, how: str) -> list[str]:
    """Describe differing responses; a missing one counts as different."""
    missing = FailedEpisode("nothing")
    longer = max(len(first), len(second))
    padded = [
        [*transcript, *[missing] * (longer - len(transcript))] for transcript in (first, second)
    ]
    return [
        f"{f'turn {turn}' if turn else 'reset'}, {how}: got {two!r:.80}, expected {response!r:.80}"
        for turn, (response, two) in enumerate(zip(*padded, strict=True))
        if response != two
    ]


def mark_stop_strings(rollout: Rollout, stops: StopStrings | None) -> Tensor:
    """Mark the tokens [N, C] that complete a stop string within their turn."""
    marks = torch.zeros_like(rollout.completion_mask)
    assert rollout.turns is not None
    if stops is None:
        return marks
    for row, turns in enumerate(rollout.turns):
        for turn in range(int(turns.max()) + 1):
            places = (turns == turn).nonzero().flatten()
            end = stops.length(rollout.completion_ids[row][places].tolist())
            marks[row, places[end - 1 : end]] = True
    return marks


def count_bad_turns(rollout: Rollout, ends: Tensor, limit: int) -> float:
    """Count rows with a turn that is not: tokens, then one end token or a length limit.

    Args:
        rollout: N episodes of a small environment.
        ends: [N, C] True where a turn may end.
        limit: largest number of tokens of a row.
    """
    turns, mask = rollout.turns, rollout.completion_mask
    assert turns is not None
    places, lengths = torch.arange(mask.shape[1], device=mask.device), mask.sum(1)
    after = torch.nn.functional.pad(turns[:, 1:], (0, 1), value=-1)
    last = (turns >= 0) & (turns != after)
    same = (turns[:, :, None] == turns[:, None]) & (turns >= 0)[:, None]
    full = same.sum(2) == TURN_TOKENS
    at_limit = places == limit - 1
    generated_ends = ends & (turns >= 0)
    correct = torch.where(last, generated_ends | full | at_limit, ~generated_ends)
    correct &= mask == (places < lengths[:, None])
    return float((~correct.all(1) | (lengths == 0)).sum())
