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
        return ""

    def step(self, action: str) -> StepResult:
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
    """Count observations that are not a function of row, seed and actions; 0 for agents."""
    if not isinstance(episodes, Episodes):
        return 0.0
    rows = [
        {name: values[n] for name, values in prompts.columns.items()} | {"prompt": text}
        for n, text in enumerate(prompts.prompts)
    ]
    starts = [EpisodeStart(row, n, (0, 0, n, 0)) for n, row in enumerate(rows)]
    actions = [prompts.prompts[0], "1", "<answer>2</answer>"]
    # The first episode is played three times, at last after the others.
    deviations = find_deviations(episodes.pool, starts, actions)
    for line in deviations[:1]:
        log.warning("the environment, %s", line)
    return float(len(deviations))


# Responses of an episode, that of `reset` first.
Transcript = list[str | list[Message] | StepResult | FailedEpisode]


def find_deviations(
    pool: EpisodePool, starts: Sequence[EpisodeStart], actions: Sequence[str]
) -> list[str]:
    """Play the first episode, again, and after all others; describe each response that differs."""
    # One process plays them in turn, which reveals state that outlives an episode (class
    # attributes, module variables) and other inputs (clock, network, system random numbers).
    # Worker processes seed the global random generators for each episode.
    first, again, *_, after_others = (
        play_episode(pool, start, actions) for start in (starts[0], *starts, starts[0])
    )
    again_differs = _find_differences(first, again, "played again")
    return again_differs + _find_differences(first, after_others, "played after others")


def play_episode(pool: EpisodePool, start: EpisodeStart, actions: Sequence[str]) -> Transcript:
    """Play an episode to its end; return its responses."""
    transcript: Transcript = list(pool.reset([start]))
    for action in actions:
        response = transcript[-1]
        is_done = isinstance(response, StepResult) and response.done
        if is_done or isinstance(response, FailedEpisode):
            break
        pool.send(0, action)
        transcript.append(pool.receive(wait=True)[0])
    pool.end(0)
    return transcript


def _find_differences(first: Transcript, second: Transcript, occasion: str) -> list[str]:
    """Describe differing responses; a missing one counts as different."""
    no_response = FailedEpisode("nothing")
    longer = max(len(first), len(second))
    padded = [
        [*transcript, *[no_response] * (longer - len(transcript))] for transcript in (first, second)
    ]
    return [
        f"{f'turn {turn}' if turn else 'reset'}, {occasion}: got {actual!r:.80}, "
        f"expected {expected!r:.80}"
        for turn, (expected, actual) in enumerate(zip(*padded, strict=True))
        if actual != expected
    ]


def mark_stop_strings(rollout: Rollout, stops: StopStrings | None) -> Tensor:
    """Mark the tokens [N, C] that complete a stop string within their turn."""
    marks = torch.zeros_like(rollout.completion_mask)
    assert rollout.turns is not None
    if stops is None:
        return marks
    for row, turns in enumerate(rollout.turns):
        for turn in range(int(turns.max()) + 1):
            positions = (turns == turn).nonzero().flatten()
            end = stops.length(rollout.completion_ids[row][positions].tolist())
            marks[row, positions[end - 1 : end]] = True
    return marks


def count_bad_turns(rollout: Rollout, ends: Tensor, limit: int) -> float:
    """Count rows with a turn that is not: tokens, then one end token [N, C] or a length limit."""
    turns, mask = rollout.turns, rollout.completion_mask
    assert turns is not None
    positions, lengths = torch.arange(mask.shape[1], device=mask.device), mask.sum(1)
    after = torch.nn.functional.pad(turns[:, 1:], (0, 1), value=-1)
    ends_turn = (turns >= 0) & (turns != after)
    same_turn = (turns[:, :, None] == turns[:, None]) & (turns >= 0)[:, None]
    full_turn = same_turn.sum(2) == TURN_TOKENS
    at_limit = positions == limit - 1
    generated_ends = ends & (turns >= 0)
    correct = torch.where(ends_turn, generated_ends | full_turn | at_limit, ~generated_ends)
    correct &= mask == (positions < lengths[:, None])
    return float((~correct.all(1) | (lengths == 0)).sum())
