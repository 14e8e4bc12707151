"""Start-up checks of episodes: gradients of turns, inputs of rewards, reproducible environments.

Gradients and reward inputs are checked with a small built-in environment, which is fast and calls
no tool of the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.algorithms.losses import MicroBatchTokenMean
from litgrpo.environments.base import (
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    Message,
    StepResult,
)
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.models.packing import pack_left
from litgrpo.models.policy import Policy
from litgrpo.rollout.episodes import EpisodeRunner, Episodes, EpisodeSettings
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.rollout.turn_format import InlineFormat
from litgrpo.training.controllers import FixedCoefficients
from litgrpo.training.learner import Learner
from litgrpo.types import (
    PromptBatch,
    RewardTable,
    Rollout,
    RolloutLogprobs,
    TrainingBatch,
    pad_left,
)

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
    padded = [[*each, *[missing] * (longer - len(each))] for each in (first, second)]
    return [
        f"{f'turn {turn}' if turn else 'reset'}, {how}: got {two!r:.80}, expected {one!r:.80}"
        for turn, (one, two) in enumerate(zip(*padded, strict=True))
        if one != two
    ]


def mark_stop_strings(rollout: Rollout, stops: StopStrings | None) -> Tensor:
    """Mark the tokens [N, C] that complete a stop string within their turn."""
    found = torch.zeros_like(rollout.completion_mask)
    assert rollout.turns is not None
    if stops is None:
        return found
    for row, turns in enumerate(rollout.turns):
        for turn in range(int(turns.max()) + 1):
            places = (turns == turn).nonzero().flatten()
            end = stops.length(rollout.completion_ids[row][places].tolist())
            found[row, places[end - 1 : end]] = True
    return found


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


def turns_error(
    learner: Learner, rollout: Rollout, rewards: RewardTable, gradient_of: Any
) -> float:
    """Compare the gradient of episodes with that of their turns as separate rows.

    Loss weights and advantages come from rows without observations, in which generated tokens
    follow each other. Each turn then becomes a row, whose prompt is everything before it in its
    segment.

    Returns the norm of the difference over the norm. If all episodes of a group have the same text,
    their gradients cancel and only rounding remains. The norm is therefore the larger of two, with
    and without the signs of the advantages. `micro_batch_token_mean` is replaced by a token mean,
    because there are more turns than episodes, and the cross-entropy of observations is left out,
    because turns have none.

    Args:
        learner: of the run, in small.
        rollout: N episodes.
        rewards: [B, G] of these episodes.
        gradient_of: function of a learner and a training batch.
    """
    learner = with_comparable_loss(learner)
    known = learner.old_and_reference_logprobs(rollout)
    whole = learner.build_batch(rollout, rewards, known)
    alone = split_turns(learner, rollout, rewards, known)
    found, expected = gradient_of(learner, whole), gradient_of(learner, alone)
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    unsigned = gradient_of(learner, replace(alone, advantages=alone.advantages.abs()))
    size = max(sum(float(b.square().sum()) for b in each) for each in (expected, unsigned))
    return math.sqrt(off / size) if off else 0.0


def with_comparable_loss(learner: Learner) -> Learner:
    """Return a learner whose loss does not depend on which rows the turns are in.

    Args:
        learner: of the run, in small.
    """
    objective = replace(learner.objective, observation_nll_coef=0.0)
    if isinstance(objective.aggregation, MicroBatchTokenMean):
        objective = replace(objective, loss_aggregation="token_mean")
    if objective == learner.objective:
        return learner
    return replace(learner, coefficients=FixedCoefficients(objective))


def split_turns(
    learner: Learner, rollout: Rollout, rewards: RewardTable, known: RolloutLogprobs
) -> TrainingBatch:
    """Make every turn a separate row, whose prompt is everything before the turn."""
    assert rollout.turns is not None
    generated = rollout.turns >= 0
    ids, mask = pack_left(rollout.completion_ids, generated)

    def pack(values: Tensor | None, fill: float = 0.0) -> Tensor | None:
        return None if values is None else _move_left(values, generated).masked_fill(~mask, fill)

    candidates = rollout.candidate_ids
    if candidates is not None:
        every = [_move_left(each, generated) for each in candidates.unbind(2)]
        candidates = torch.stack(every, 2).masked_fill(~mask[..., None], -1)
    values: dict[str, Any] = {
        "completion_ids": ids,
        "completion_mask": mask,
        "loss_mask": mask,
        "sampler_logprobs": pack(rollout.sampler_logprobs),
        "candidate_ids": candidates,
        "turns": pack(rollout.turns, -1),
        "segments": None,
    }
    joined = replace(rollout, **values)
    norms = pack(known.score_norms)
    seen = RolloutLogprobs(pack(known.old), pack(known.ref), score_norms=norms)
    return _one_row_per_turn(learner.build_batch(joined, rewards, seen), joined, rollout)


def _move_left(values: Tensor, marked: Tensor) -> Tensor:
    """Move the marked entries of each row to its left, [N, c]."""
    order = (~marked).long().argsort(dim=1, stable=True)[:, : int(marked.sum(1).max())]
    return values.gather(1, order)


def _one_row_per_turn(batch: TrainingBatch, joined: Rollout, rollout: Rollout) -> TrainingBatch:
    """Split rows whose turns follow each other into rows [M] of one turn each."""
    assert joined.turns is not None
    assert rollout.turns is not None
    numbers = joined.turns.amax(1)
    pairs = [(row, turn) for row, last in enumerate(numbers.tolist()) for turn in range(last + 1)]
    prompts = []
    for row, turn in pairs:
        first = int((rollout.turns[row] == turn).nonzero()[0])
        before, segment = rollout.completion_ids[row, :first], 0
        if rollout.segments is not None:
            segment = int(rollout.segments[row, first])
            before = before[rollout.segments[row, :first] == segment]
        prompt = int(batch.prompt_of[row])
        asked = batch.prompt_ids[prompt][batch.prompt_mask[prompt]]
        prompts.append([*asked.tolist() * (segment == 0), *before.tolist()])
    ids, mask = (each.to(batch.prompt_ids.device) for each in pad_left(prompts, 0))
    rows = torch.tensor([row for row, _ in pairs])
    mine = joined.turns[rows] == torch.tensor([[turn] for _, turn in pairs]).to(numbers.device)

    def part(values: Tensor | None) -> Any:
        if values is None:
            return None
        order = (~mine).long().argsort(dim=1, stable=True)[:, : int(mine.sum(1).max())]
        return values[rows][torch.arange(len(rows))[:, None], order]

    real = part(torch.ones_like(joined.turns, dtype=torch.bool)) & _move_left(mine, mine)
    names = ("completion_ids", "sampler_logprobs", "old_logprobs", "ref_logprobs", "candidate_ids")
    values = {name: part(getattr(batch, name)) for name in names}
    values |= {name: part(getattr(batch, name)) * real for name in ("advantages", "loss_weights")}
    if batch.nll_weights is not None:
        values["nll_weights"] = part(batch.nll_weights) * real
    values |= {"completion_mask": real, "loss_mask": real}
    prompt_of = torch.arange(len(pairs), device=ids.device)
    return replace(batch, prompt_ids=ids, prompt_mask=mask, prompt_of=prompt_of, **values)


def count_rewards_of_other_text(
    rollout: Rollout,
    inputs: dict[str, Any],
    policy: Policy,
    stop_token_ids: Sequence[int],
    cut: Callable[[str], str],
) -> float:
    """Count rows whose reward function received other text than the last turn of the policy.

    Args:
        rollout: N episodes.
        inputs: arguments of a reward function.
        policy: has the tokenizer.
        stop_token_ids: of `sampling`.
        cut: cuts a text at its stop string.
    """
    assert rollout.turns is not None
    last = rollout.turns == rollout.turns.amax(1, keepdim=True)
    wrong = 0
    for row, mine in enumerate(last):
        ids = rollout.completion_ids[row][mine & rollout.loss_mask[row]].tolist()
        text = cut(*policy.completion_texts([ids], stop_token_ids))
        differs = inputs["completions"][row] != text or inputs["completion_ids"][row] != ids
        wrong += bool(differs)
    return float(wrong)
