"""Dynamic sampling: groups that teach nothing make room for those of other prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from litgrpo.algorithm.advantages import Groups
from litgrpo.algorithm.objective import alone
from litgrpo.types import PromptBatch, RewardTable, Rollout, Stats

Ask = Callable[[PromptBatch, int], tuple[Rollout, RewardTable]]


def informative(rewards: RewardTable) -> Tensor:
    """[B] True where the rewards of a group differ by more than rounding."""
    lengths = torch.zeros_like(rewards.total)
    groups = Groups(rewards, lengths, alone, rewards.total).use(rewards.total, rewards.valid)
    return (groups.spread()[0].nan_to_num(0.0) != 0).any(1)


def redrawn(
    rollout: Rollout,
    rewards: RewardTable,
    *,
    more: Callable[[int], PromptBatch],
    ask: Ask,
    most: Callable[[int], int],
    max_resamples: int,
    whole: bool = False,
) -> tuple[Rollout, RewardTable, Stats]:
    """The same number of groups, with those of equal rewards replaced as far as others are found.

    Each redraw asks as many prompts as will do at the share that taught something so far, at most
    B. After the last one the groups that are still missing stay as they are; they count in the
    denominators of the token weights.

    Args:
        rollout: B groups.
        rewards: theirs.
        more: number -> so many prompts that were not asked.
        ask: prompts, number of the redraw -> their completions and rewards.
        most: the largest of a number over all processes, which redraw together.
        max_resamples: redraws at most.
        whole: ask B prompts each time, where another number would have to be compiled.

    Returns:
        Rollout and rewards of B groups, and how it went.

    Source: DAPO, arXiv:2503.14476, section 3.2.
    """
    useful = informative(rewards)
    asked = len(useful)
    found = first = int(useful.sum())
    redraws = 0
    while redraws < max_resamples and (missing := most(len(useful) - int(useful.sum()))):
        redraws += 1
        share = found / asked
        needed = math.ceil(missing / max(share, 1 / len(useful)))
        count = most(len(useful) if whole else min(len(useful), needed))
        fresh, fresh_rewards = ask(more(count), redraws)
        donors = informative(fresh_rewards).nonzero().squeeze(1)
        asked, found = asked + count, found + len(donors)
        slots = (~useful).nonzero().squeeze(1)[: len(donors)]
        donors = donors[: len(slots)]
        rollout = with_groups(rollout, slots, fresh, donors)
        rewards = with_rewards(rewards, slots, fresh_rewards, donors)
        useful[slots] = True
    shares = {
        "dynamic/resamples": redraws,
        "dynamic/prompts_asked": asked,
        "dynamic/informative_frac": first / len(useful),
        "dynamic/filled_frac": int(useful.sum()) / len(useful),
    }
    stats = {name: torch.tensor(float(value)) for name, value in shares.items()}
    return rollout, rewards, stats


def with_groups(rollout: Rollout, slots: Tensor, fresh: Rollout, donors: Tensor) -> Rollout:
    """A rollout whose groups `slots` [k] are the groups `donors` [k] of another one."""
    group, places = rollout.group_size, torch.arange(rollout.group_size)
    into = (slots[:, None] * group + places).flatten()
    rows = (donors[:, None] * group + places).flatten()
    completions = list(rollout.completions)
    for to, row in zip(into.tolist(), rows.tolist(), strict=True):
        completions[to] = fresh.completions[row]
    support = None
    if rollout.support is not None and fresh.support is not None:
        support = _put(rollout.support, into, fresh.support, rows, fill=-1)
    return Rollout(
        prompts=with_prompts(rollout.prompts, slots, fresh.prompts, donors),
        group_size=group,
        completion_ids=_put(rollout.completion_ids, into, fresh.completion_ids, rows),
        completion_mask=_put(rollout.completion_mask, into, fresh.completion_mask, rows),
        sampler_logprobs=_put(rollout.sampler_logprobs, into, fresh.sampler_logprobs, rows),
        truncated=_put(rollout.truncated, into, fresh.truncated, rows),
        completions=completions,
        support=support,
    )


def with_prompts(
    prompts: PromptBatch, slots: Tensor, fresh: PromptBatch, donors: Tensor
) -> PromptBatch:
    """Prompts of which `slots` [k] are `donors` [k] of another batch, padded to the longer one."""
    pairs = list(zip(slots.tolist(), donors.tolist(), strict=True))

    def swapped(values: list, others: list) -> list:
        values = list(values)
        for to, row in pairs:
            values[to] = others[row]
        return values

    def put_flipped(values: Tensor, others: Tensor) -> Tensor:
        """The padding is on the left, so turn it to the right and back."""
        return _put(values.flip(1), slots, others.flip(1), donors).flip(1)

    return PromptBatch(
        prompt_ids=put_flipped(prompts.prompt_ids, fresh.prompt_ids),
        prompt_mask=put_flipped(prompts.prompt_mask, fresh.prompt_mask),
        prompts=swapped(prompts.prompts, fresh.prompts),
        columns={
            name: swapped(values, fresh.columns[name]) for name, values in prompts.columns.items()
        },
        index=_put(prompts.index, slots, fresh.index, donors),
    )


def with_rewards(
    rewards: RewardTable, slots: Tensor, fresh: RewardTable, donors: Tensor
) -> RewardTable:
    """Rewards of which the groups `slots` [k] are the groups `donors` [k] of another table."""

    def put(parts: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: _put(part, slots, others[name], donors) for name, part in parts.items()}

    return replace(
        rewards,
        parts=put(rewards.parts, fresh.parts),
        counted=put(rewards.counted, fresh.counted),
        total=_put(rewards.total, slots, fresh.total, donors),
        valid=_put(rewards.valid, slots, fresh.valid, donors),
        precision=max(rewards.precision, fresh.precision),
    )


def _put(values: Tensor, into: Tensor, fresh: Tensor, rows: Tensor, fill: int = 0) -> Tensor:
    """A copy with rows of `fresh` in the rows `into`, both filled up to the larger sizes."""
    sizes = [max(a, b) for a, b in zip(values.shape[1:], fresh.shape[1:], strict=True)]

    def widened(tensor: Tensor) -> Tensor:
        ends = [end for a, b in zip(tensor.shape[1:], sizes, strict=True) for end in (b - a, 0)]
        return pad(tensor, ends[::-1], value=fill)

    values = widened(values).clone()
    values[into.to(values.device)] = widened(fresh)[rows.to(values.device)]
    return values
