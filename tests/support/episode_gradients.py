"""Gradients of episodes as those of their turns, and texts that rewards receive."""

import math
from dataclasses import replace

import torch

from litgrpo.algorithms.aggregation import MicroBatchTokenMean
from litgrpo.checks.invariants import gradient
from litgrpo.learning.micro_batches import BatchLimits
from litgrpo.models.packing import pack_left
from litgrpo.types import RolloutLogprobs, TokenRows, pad_left


def turns_error(learner, rollout, rewards) -> float:
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
    """
    learner = with_comparable_loss(learner)
    limits = BatchLimits(shared=learner.policy.computes_prompts_once)
    known = learner.old_and_reference_logprobs(rollout)
    whole = learner.build_batch(rollout, rewards, known)
    alone = split_turns(learner, rollout, rewards, known)
    found, expected = (gradient(learner, batch, limits) for batch in (whole, alone))
    off = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    unsigned = gradient(learner, replace(alone, advantages=alone.advantages.abs()), limits)
    size = max(sum(float(b.square().sum()) for b in each) for each in (expected, unsigned))
    return math.sqrt(off / size) if off else 0.0


def with_comparable_loss(learner):
    """Return a learner whose loss does not depend on which rows the turns are in.

    Args:
        learner: of the run, in small.
    """
    objective = replace(learner.objective, observation_nll_coef=0.0)
    if isinstance(objective.resolved_aggregation, MicroBatchTokenMean):
        objective = replace(objective, loss_aggregation="token_mean")
    if objective == learner.objective:
        return learner
    return replace(learner, objective=objective)


def split_turns(learner, rollout, rewards, known):
    """Make every turn a separate row, whose prompt is everything before the turn."""
    generated = rollout.turns >= 0
    ids, mask = pack_left(rollout.completion_ids, generated)

    def pack(values, fill=0.0):
        return None if values is None else _move_left(values, generated).masked_fill(~mask, fill)

    candidates = rollout.candidate_ids
    if candidates is not None:
        every = [_move_left(each, generated) for each in candidates.unbind(2)]
        candidates = torch.stack(every, 2).masked_fill(~mask[..., None], -1)
    values = {
        "completion_ids": ids,
        "completion_mask": mask,
        "sampler_logprobs": pack(rollout.sampler_logprobs),
        "candidate_ids": candidates,
        "turns": pack(rollout.turns, -1),
        "segments": None,
    }
    joined = replace(rollout, **values)
    norms = pack(known.score_norms)
    seen = RolloutLogprobs(pack(known.old), pack(known.ref), score_norms=norms)
    return _one_row_per_turn(learner.build_batch(joined, rewards, seen), joined, rollout)


def _move_left(values, marked):
    """Move the marked entries of each row to its left, [N, c]."""
    order = (~marked).long().argsort(dim=1, stable=True)[:, : int(marked.sum(1).max())]
    return values.gather(1, order)


def _one_row_per_turn(batch, joined, rollout):
    """Split rows whose turns follow each other into rows [M] of one turn each."""
    numbers, tokens = joined.turns.amax(1), batch.tokens
    pairs = [(row, turn) for row, last in enumerate(numbers.tolist()) for turn in range(last + 1)]
    prompts = []
    for row, turn in pairs:
        first = int((rollout.turns[row] == turn).nonzero()[0])
        before, segment = rollout.completion_ids[row, :first], 0
        if rollout.segments is not None:
            segment = int(rollout.segments[row, first])
            before = before[rollout.segments[row, :first] == segment]
        prompt = int(tokens.prompt_of[row])
        asked = tokens.prompt_ids[prompt][tokens.prompt_mask[prompt]]
        prompts.append([*asked.tolist() * (segment == 0), *before.tolist()])
    ids, mask = (each.to(tokens.prompt_ids.device) for each in pad_left(prompts, 0))
    rows = torch.tensor([row for row, _ in pairs])
    mine = joined.turns[rows] == torch.tensor([[turn] for _, turn in pairs]).to(numbers.device)

    def part(values):
        if values is None:
            return None
        order = (~mine).long().argsort(dim=1, stable=True)[:, : int(mine.sum(1).max())]
        return values[rows][torch.arange(len(rows))[:, None], order]

    real = part(torch.ones_like(joined.turns, dtype=torch.bool)) & _move_left(mine, mine)
    names = ("sampler_logprobs", "old_logprobs", "ref_logprobs")
    values = {name: part(getattr(batch, name)) for name in names}
    values |= {name: part(getattr(batch, name)) * real for name in ("advantages", "loss_weights")}
    if batch.term_weights is not None:
        values["term_weights"] = part(batch.term_weights) * real[..., None]
    prompt_of = torch.arange(len(pairs), device=ids.device)
    completions = part(tokens.completion_ids), real, part(tokens.candidate_ids)
    alone = TokenRows(ids, mask, prompt_of, *completions)
    return replace(batch, tokens=alone, loss_mask=real, **values)


def count_rewards_of_other_text(rollout, inputs, rollouter) -> int:
    """Count rows whose reward function received other text than the last turn of the policy.

    Args:
        rollout: N episodes.
        inputs: arguments of a reward function.
        rollouter: generated them.
    """
    stops, sampling = rollouter.stop_strings, rollouter.sampling
    last = rollout.turns == rollout.turns.amax(1, keepdim=True)
    wrong = 0
    for row, mine in enumerate(last):
        ids = rollout.completion_ids[row][mine & rollout.loss_mask[row]].tolist()
        (text,) = rollouter.policy.completion_texts([ids], sampling.stop_token_ids)
        if stops is not None:
            text = stops.cut(text, sampling.include_stop_str_in_output)
        differs = inputs["completions"][row] != text or inputs["completion_ids"][row] != ids
        wrong += bool(differs)
    return wrong
