"""What must be true of episodes besides: they are learned as their turns, and judged by them.

The episodes are those of a small environment of our own, so that a check costs nothing and neither
tool nor game is touched.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.algorithms.losses import MicroBatchTokenMean
from litgrpo.data.prompts import pad_left
from litgrpo.environments.base import EpisodeStart, StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.response_log import find_deviations
from litgrpo.models.packing import pack_left
from litgrpo.models.policy import Policy
from litgrpo.rollout.episodes import Episodes, EpisodeSettings
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.rollout.turn_format import InlineFormat
from litgrpo.training.controllers import FixedCoefficients
from litgrpo.training.learner import Learner
from litgrpo.types import PromptBatch, RewardTable, Rollout, RolloutLogprobs, TrainingBatch

log = logging.getLogger(__name__)

TURN_TOKENS = 4


@dataclass
class Nods:
    """Says the same after every turn; a turn is worth its length."""

    def reset(self, row: dict[str, Any], seed: int) -> str:
        """Nothing is added to the prompt."""
        return ""

    def step(self, action: str) -> StepResult:
        """The same answer always."""
        return StepResult(" ok", reward=float(len(action)))


def small_episodes(policy: Policy) -> Episodes:
    """Episodes of at most three short turns."""
    settings = EpisodeSettings(
        max_turns=3, max_turn_tokens=TURN_TOKENS, turn_format="inline", close_truncated_turns=True
    )

    def opener(prompts: PromptBatch, row: int, added: object) -> list[int]:
        return prompts.prompt_ids[row][prompts.prompt_mask[row]].tolist()

    return Episodes(InProcessEpisodes(Nods()), InlineFormat(policy.tokenizer), settings, opener)


def unrepeated(episodes: Episodes | None, prompts: PromptBatch) -> float:
    """Answers of the run's environment that depend on more than row, seed and what was said.

    Args:
        episodes: of the run.
        prompts: a few; the first is played twice, and once beside the others.
    """
    pool = episodes and episodes.pool.single_process_pool()
    if not pool:
        return 0.0
    rows = [
        {name: values[n] for name, values in prompts.columns.items()} | {"prompt": text}
        for n, text in enumerate(prompts.prompts)
    ]
    starts = [EpisodeStart(row, n, (0, 0, n, 0)) for n, row in enumerate(rows)]
    try:
        found = find_deviations(pool, starts, [prompts.prompts[0], "1", "<answer>2</answer>"])
    finally:
        pool.close()
    for line in found[:1]:
        log.warning("the environment, %s", line)
    return float(len(found))


def stopped(rollout: Rollout, stops: StopStrings | None) -> Tensor:
    """[N, C] True for the tokens that complete a stop string within their turn."""
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


def bad_turns(rollout: Rollout, ends: Tensor, limit: int) -> float:
    """Number of rows with a turn that is not: tokens, then one end token or a limit of them.

    Args:
        rollout: N episodes of a small environment.
        ends: [N, C] True where a turn may end.
        limit: tokens of a row at most.
    """
    turns, mask = rollout.turns, rollout.completion_mask
    assert turns is not None
    places, lengths = torch.arange(mask.shape[1], device=mask.device), mask.sum(1)
    after = torch.nn.functional.pad(turns[:, 1:], (0, 1), value=-1)
    last = (turns >= 0) & (turns != after)
    same = (turns[:, :, None] == turns[:, None]) & (turns >= 0)[:, None]
    full = same.sum(2) == TURN_TOKENS
    at_limit = places == limit - 1
    spoken_ends = ends & (turns >= 0)
    right = torch.where(last, spoken_ends | full | at_limit, ~spoken_ends)
    right &= mask == (places < lengths[:, None])
    return float((~right.all(1) | (lengths == 0)).sum())


def turns_error(
    learner: Learner, rollout: Rollout, rewards: RewardTable, gradient_of: Any
) -> float:
    """Norm of the difference of two gradients over their norm: of episodes, and of their turns.

    What an episode's tokens weigh is what they weigh where the policy's words follow each other and
    nothing was heard; each turn is then a row of its own after all that came before it.

    Where a policy says the same in every episode of a group, what is learned from them cancels and
    rounding is left. The norm is therefore that without signs, where it is larger. The mean of a
    micro-batch is taken over all rows, because turns are more rows than episodes.

    Args:
        learner: of the run, in small.
        rollout: N episodes.
        rewards: [B, G] theirs.
        gradient_of: the gradient of a learner and an batch.
    """
    learner = with_one_mean(learner)
    known = learner.old_and_reference_logprobs(rollout)
    whole = learner.build_batch(rollout, rewards, known)
    alone = as_turns(learner, rollout, rewards, known)
    found, expected = gradient_of(learner, whole), gradient_of(learner, alone)
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    unsigned = gradient_of(learner, replace(alone, advantages=alone.advantages.abs()))
    size = max(sum(float(b.square().sum()) for b in each) for each in (expected, unsigned))
    return math.sqrt(off / size) if off else 0.0


def with_one_mean(learner: Learner) -> Learner:
    """The same learner; the mean of each micro-batch is that of all rows, which one of all equals.

    Args:
        learner: of the run, in small.
    """
    if not isinstance(learner.objective.aggregation, MicroBatchTokenMean):
        return learner
    objective = replace(learner.objective, loss_aggregation="token_mean")
    return replace(learner, coefficients=FixedCoefficients(objective))


def as_turns(
    learner: Learner, rollout: Rollout, rewards: RewardTable, known: RolloutLogprobs
) -> TrainingBatch:
    """Every turn as a row of its own, whose prompt is all that was said and heard before it."""
    assert rollout.turns is not None
    spoken = rollout.turns >= 0
    ids, mask = pack_left(rollout.completion_ids, spoken)

    def packed(values: Tensor | None, fill: float = 0.0) -> Tensor | None:
        return None if values is None else _packed(values, spoken).masked_fill(~mask, fill)

    candidates = rollout.candidate_ids
    if candidates is not None:
        every = [_packed(each, spoken) for each in candidates.unbind(2)]
        candidates = torch.stack(every, 2).masked_fill(~mask[..., None], -1)
    values: dict[str, Any] = {
        "completion_ids": ids,
        "completion_mask": mask,
        "loss_mask": mask,
        "sampler_logprobs": packed(rollout.sampler_logprobs),
        "candidate_ids": candidates,
        "turns": packed(rollout.turns, -1),
    }
    joined = replace(rollout, **values)
    seen = RolloutLogprobs(packed(known.old), packed(known.ref))
    return _divided(learner.build_batch(joined, rewards, seen), joined, rollout)


def _packed(values: Tensor, marked: Tensor) -> Tensor:
    """[N, c] the marked entries of each row, moved to its left."""
    order = (~marked).long().argsort(dim=1, stable=True)[:, : int(marked.sum(1).max())]
    return values.gather(1, order)


def _divided(batch: TrainingBatch, joined: Rollout, rollout: Rollout) -> TrainingBatch:
    """Rows [M] of one turn each, from rows whose turns follow each other."""
    assert joined.turns is not None
    assert rollout.turns is not None
    numbers = joined.turns.amax(1)
    pairs = [(row, turn) for row, last in enumerate(numbers.tolist()) for turn in range(last + 1)]
    prompts = []
    for row, turn in pairs:
        first = int((rollout.turns[row] == turn).nonzero()[0])
        prompt = int(batch.prompt_of[row])
        asked = batch.prompt_ids[prompt][batch.prompt_mask[prompt]]
        prompts.append([*asked.tolist(), *rollout.completion_ids[row, :first].tolist()])
    ids, mask = (each.to(batch.prompt_ids.device) for each in pad_left(prompts, 0))
    rows = torch.tensor([row for row, _ in pairs])
    mine = joined.turns[rows] == torch.tensor([[turn] for _, turn in pairs]).to(numbers.device)

    def part(values: Tensor | None) -> Any:
        if values is None:
            return None
        order = (~mine).long().argsort(dim=1, stable=True)[:, : int(mine.sum(1).max())]
        return values[rows][torch.arange(len(rows))[:, None], order]

    real = part(torch.ones_like(joined.turns, dtype=torch.bool)) & _packed(mine, mine)
    names = ("completion_ids", "sampler_logprobs", "old_logprobs", "ref_logprobs", "candidate_ids")
    values = {name: part(getattr(batch, name)) for name in names}
    values |= {name: part(getattr(batch, name)) * real for name in ("advantages", "loss_weights")}
    values |= {"completion_mask": real, "loss_mask": real}
    prompt_of = torch.arange(len(pairs), device=ids.device)
    return replace(batch, prompt_ids=ids, prompt_mask=mask, prompt_of=prompt_of, **values)


def overheard(
    rollout: Rollout, asked: dict[str, Any], policy: Policy, cut: Callable[[str], str]
) -> float:
    """Number of rows of which a reward read other words than the policy's last turn.

    Args:
        rollout: N episodes.
        asked: what a reward function was given.
        policy: has the tokenizer.
        cut: a text up to its stop string.
    """
    assert rollout.turns is not None
    last = rollout.turns == rollout.turns.amax(1, keepdim=True)
    wrong = 0
    for row, mine in enumerate(last):
        ids = rollout.completion_ids[row][mine & rollout.loss_mask[row]].tolist()
        said = cut(str(policy.tokenizer.decode(ids, skip_special_tokens=True)))
        heard = asked["completions"][row] != said or asked["completion_ids"][row] != ids
        wrong += bool(heard)
    return float(wrong)
