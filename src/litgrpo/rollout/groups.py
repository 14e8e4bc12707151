"""Groups of rollouts: replace them, join and select them, and hold them as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from litgrpo.types import Episode, PromptBatch, Rollout

# Fields of a rollout with one entry per row, and the value of missing columns.
FILLING = {
    "completion_ids": 0,
    "completion_mask": 0,
    "sampler_logprobs": 0,
    "truncated": 0,
    "candidate_ids": -1,
    "turns": -1,
    "token_versions": 0,
    "segments": 0,
}
LISTS = ("completions", "episodes")  # of N entries, or none


def with_groups(rollout: Rollout, replaced: Tensor, fresh: Rollout, donors: Tensor) -> Rollout:
    """Replace groups `replaced` [k] of a rollout by groups `donors` [k] of another one."""
    into = rows_of_groups(replaced, rollout.group_size)
    rows = rows_of_groups(donors, rollout.group_size)
    lists: dict[str, Any] = {name: list(getattr(rollout, name)) for name in LISTS}
    for name in (name for name in LISTS if lists[name]):
        for to, row in zip(into.tolist(), rows.tolist(), strict=True):
            lists[name][to] = getattr(fresh, name)[row]
    if (rollout.segments is None) != (fresh.segments is None):  # all rows of one have one segment
        rollout, fresh = _with_segments(rollout), _with_segments(fresh)
    if rollout.token_versions is not None:
        fresh = with_token_versions(fresh)
    pairs = {name: (getattr(rollout, name), getattr(fresh, name)) for name in FILLING}
    tensors: dict[str, Any] = {
        name: put_rows(values, into, others, rows, FILLING[name])
        for name, (values, others) in pairs.items()
        if values is not None
    }
    prompts = with_prompts(rollout.prompts, replaced, fresh.prompts, donors)
    return replace(rollout, prompts=prompts, **lists, **tensors)


def rows_of_groups(groups: Tensor, group_size: int) -> Tensor:
    """Return [k * G] the numbers of the rows of groups [k]."""
    return (groups[:, None] * group_size + torch.arange(group_size)).flatten()


def _with_segments(rollout: Rollout) -> Rollout:
    if rollout.segments is not None:
        return rollout
    return replace(rollout, segments=torch.zeros_like(rollout.completion_ids, dtype=torch.int16))


def with_token_versions(rollout: Rollout) -> Rollout:
    """Return a rollout with the version of the weights of each token."""
    if rollout.token_versions is not None:
        return rollout
    versions = torch.full_like(rollout.completion_ids, rollout.policy_version, dtype=torch.int32)
    return replace(rollout, token_versions=versions)


def with_prompts(
    prompts: PromptBatch, replaced: Tensor, fresh: PromptBatch, donors: Tensor
) -> PromptBatch:
    """Replace prompts `replaced` [k] by `donors` [k] of another batch, padded to the longer one."""
    pairs = list(zip(replaced.tolist(), donors.tolist(), strict=True))

    def swap(values: list, others: list) -> list:
        values = list(values)
        for to, row in pairs:
            values[to] = others[row]
        return values

    def put_flipped(values: Tensor, others: Tensor) -> Tensor:
        # `put_rows` pads on the right, prompts are padded on the left: flip them and back.
        return put_rows(values.flip(1), replaced, others.flip(1), donors).flip(1)

    return PromptBatch(
        prompt_ids=put_flipped(prompts.prompt_ids, fresh.prompt_ids),
        prompt_mask=put_flipped(prompts.prompt_mask, fresh.prompt_mask),
        prompts=swap(prompts.prompts, fresh.prompts),
        columns={
            name: swap(values, fresh.columns[name]) for name, values in prompts.columns.items()
        },
        index=put_rows(prompts.index, replaced, fresh.index, donors),
    )


def put_rows(values: Tensor, into: Tensor, fresh: Tensor, rows: Tensor, fill: float = 0) -> Tensor:
    """Copy `values`, with rows `into` replaced by rows of `fresh`; both padded to one size."""
    sizes = [max(a, b) for a, b in zip(values.shape[1:], fresh.shape[1:], strict=True)]

    def widen(tensor: Tensor) -> Tensor:
        ends = [end for a, b in zip(tensor.shape[1:], sizes, strict=True) for end in (b - a, 0)]
        return pad(tensor, ends[::-1], value=fill)

    values = widen(values).clone()
    values[into.to(values.device)] = widen(fresh)[rows.to(values.device)]
    return values


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as plain values and tensors; columns and episodes have only plain values."""
    values = {each.name: getattr(rollout, each.name) for each in fields(Rollout)}
    values["prompts"] = vars(rollout.prompts)
    values["episodes"] = [vars(each) for each in rollout.episodes]
    return values


def unpack_rollout(values: dict[str, Any], device: torch.device | str) -> Rollout:
    """Rebuild a rollout from the result of `pack_rollout`, on a device."""
    values = values | {
        "prompts": PromptBatch(**values["prompts"]),
        "episodes": [Episode(**each) for each in values["episodes"]],
    }
    return move_rollout(Rollout(**values), device)


def move_rollout(rollout: Rollout, device: torch.device | str) -> Rollout:
    """Return a rollout with its tensors on a device."""
    moved: dict[str, Any] = {
        name: value.to(device) for name in FILLING if (value := getattr(rollout, name)) is not None
    }
    return replace(rollout, prompts=rollout.prompts.to(device), **moved)


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Return the groups of several rollouts on the host as one, padded to one size.

    Args:
        parts: rollouts of the same G and kind, at least one.
    """
    if any(part.segments is not None for part in parts):  # all rows of the others have one segment
        parts = [_with_segments(part) for part in parts]
    first = parts[0]
    lists: dict[str, Any] = {
        name: [value for part in parts for value in getattr(part, name)] for name in LISTS
    }
    tensors: dict[str, Any] = {
        name: _stack_rows([getattr(part, name) for part in parts], fill)
        for name, fill in FILLING.items()
        if getattr(first, name) is not None
    }
    batches = [part.prompts for part in parts]
    # `_stack_rows` pads on the right, prompts are padded on the left: flip them and back.
    ids, mask = (
        _stack_rows([getattr(batch, name).flip(1) for batch in batches], 0).flip(1)
        for name in ("prompt_ids", "prompt_mask")
    )
    columns = {
        name: [value for batch in batches for value in batch.columns[name]]
        for name in first.prompts.columns
    }
    texts = [text for batch in batches for text in batch.prompts]
    index = torch.cat([batch.index for batch in batches])
    prompts = PromptBatch(ids, mask, texts, columns, index)
    return replace(first, prompts=prompts, **lists, **tensors)


def select_groups(rollout: Rollout, groups: Sequence[int]) -> Rollout:
    """Return some groups of a rollout on the host, without columns that none of them uses."""
    size = rollout.group_size
    rows = [group * size + place for group in groups for place in range(size)]
    lists: dict[str, Any] = {
        name: [values[row] for row in rows] if (values := getattr(rollout, name)) else []
        for name in LISTS
    }
    tensors: dict[str, Any] = {
        name: value[rows] for name in FILLING if (value := getattr(rollout, name)) is not None
    }
    used = max(1, int(tensors["completion_mask"].sum(1).max()))
    for name, value in tensors.items():
        if value.dim() > 1:
            tensors[name] = value[:, :used]
    return replace(rollout, prompts=rollout.prompts.select(groups), **lists, **tensors)


def _stack_rows(parts: Sequence[Tensor], fill: float) -> Tensor:
    """Concatenate rows, padding short ones on the right."""
    sizes = [max(each) for each in zip(*[part.shape[1:] for part in parts], strict=True)]
    rows = parts[0].new_full((sum(map(len, parts)), *sizes), fill)
    begin = 0
    for part in parts:
        end = begin + len(part)
        rows[(slice(begin, end), *map(slice, part.shape[1:]))] = part
        begin = end
    return rows
