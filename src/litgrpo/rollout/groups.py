"""Groups of rollouts: join, select and replace them, and hold them as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.types import Episode, PromptBatch, Rollout, stack_rows

# Tensors of a rollout with one entry per row, and the value of missing columns.
FILLS = {
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


def row_tensors(rollout: Rollout) -> dict[str, Tensor]:
    """Return {field: [N, ...]} of the tensors that a rollout has."""
    return {name: value for name in FILLS if (value := getattr(rollout, name)) is not None}


def rows_of_groups(groups: Tensor, group_size: int) -> Tensor:
    """Return [k * G] the numbers of the rows of groups [k]."""
    return (groups[:, None] * group_size + torch.arange(group_size)).flatten()


def join_rollouts(parts: Sequence[Rollout]) -> Rollout:
    """Return the groups of several rollouts of the same G and kind as one, padded to one size."""
    if any(part.segments is not None for part in parts):
        parts = [_with_segments(part) for part in parts]
    if any(part.token_versions is not None for part in parts):
        parts = [with_token_versions(part) for part in parts]
    lists: dict[str, Any] = {
        name: [value for part in parts for value in getattr(part, name)] for name in LISTS
    }
    tensors: dict[str, Any] = {
        name: stack_rows([getattr(part, name) for part in parts], FILLS[name])
        for name in row_tensors(parts[0])
    }
    prompts = _join_prompts([part.prompts for part in parts])
    return replace(parts[0], prompts=prompts, **lists, **tensors)


def _join_prompts(parts: Sequence[PromptBatch]) -> PromptBatch:
    # `stack_rows` pads on the right, prompts are padded on the left: flip them and back.
    ids, mask = (
        stack_rows([getattr(part, name).flip(1) for part in parts], 0).flip(1)
        for name in ("prompt_ids", "prompt_mask")
    )
    columns = {
        name: [value for part in parts for value in part.columns[name]] for name in parts[0].columns
    }
    texts = [text for part in parts for text in part.prompts]
    return PromptBatch(ids, mask, texts, columns, torch.cat([part.index for part in parts]))


def _with_segments(rollout: Rollout) -> Rollout:
    if rollout.segments is not None:
        return rollout
    # Every row is one segment.
    return replace(rollout, segments=torch.zeros_like(rollout.completion_ids, dtype=torch.int16))


def with_token_versions(rollout: Rollout) -> Rollout:
    """Return a rollout with the version of the weights of each token."""
    if rollout.token_versions is not None:
        return rollout
    versions = torch.full_like(rollout.completion_ids, rollout.policy_version, dtype=torch.int32)
    return replace(rollout, token_versions=versions)


def select_groups(rollout: Rollout, groups: Sequence[int]) -> Rollout:
    """Return some groups of a rollout, without columns that none of them uses."""
    selected = _take_groups(rollout, groups, rollout.prompts.select(groups))
    width = max(1, int(selected.completion_mask.sum(1).max()))
    trimmed: dict[str, Any] = {
        name: value[:, :width] for name, value in row_tensors(selected).items() if value.dim() > 1
    }
    return replace(selected, **trimmed)


def with_groups(
    rollout: Rollout, replaced: Tensor, new_rollout: Rollout, donors: Tensor
) -> Rollout:
    """Replace groups `replaced` [k] of a rollout by groups `donors` [k] of another one.

    Both are padded to one size, and no column is trimmed: shapes of static-shape devices stay.
    """
    joined = join_rollouts([rollout, new_rollout])
    groups = _replace_numbers(len(rollout.prompts), replaced, donors).tolist()
    return _take_groups(joined, groups, joined.prompts.select(groups, trim=False))


def put_rows(values: Tensor, into: Tensor, new_values: Tensor, rows: Tensor) -> Tensor:
    """Return `values` with rows `into` [k] replaced by rows `rows` [k] of `new_values`.

    Both are padded to one size.
    """
    joined = stack_rows([values, new_values], 0)
    return joined[_replace_numbers(len(values), into, rows).to(joined.device)]


def _replace_numbers(count: int, replaced: Tensor, donors: Tensor) -> Tensor:
    """Return [count] numbers 0, 1, ...; the `replaced` ones are `donors` that follow `count`."""
    numbers = torch.arange(count)
    numbers[replaced.cpu()] = count + donors.cpu()
    return numbers


def _take_groups(rollout: Rollout, groups: Sequence[int], prompts: PromptBatch) -> Rollout:
    """Return some groups of a rollout with all columns, and with these prompts of theirs."""
    rows = rows_of_groups(torch.tensor(groups, dtype=torch.long), rollout.group_size)
    lists: dict[str, Any] = {
        name: [values[row] for row in rows.tolist()] if (values := getattr(rollout, name)) else []
        for name in LISTS
    }
    tensors: dict[str, Any] = {
        name: value[rows.to(value.device)] for name, value in row_tensors(rollout).items()
    }
    return replace(rollout, prompts=prompts, **lists, **tensors)


def move_rollout(rollout: Rollout, device: torch.device | str) -> Rollout:
    """Return a rollout with its tensors on a device."""
    moved: dict[str, Any] = {name: value.to(device) for name, value in row_tensors(rollout).items()}
    return replace(rollout, prompts=rollout.prompts.to(device), **moved)


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as plain values and tensors; columns and episodes have only plain values."""
    values = {field.name: getattr(rollout, field.name) for field in fields(Rollout)}
    values["prompts"] = vars(rollout.prompts)
    values["episodes"] = [vars(episode) for episode in rollout.episodes]
    return values


def unpack_rollout(values: dict[str, Any], device: torch.device | str) -> Rollout:
    """Rebuild a rollout from the result of `pack_rollout`, on a device."""
    values = values | {
        "prompts": PromptBatch(**values["prompts"]),
        "episodes": [Episode(**episode) for episode in values["episodes"]],
    }
    return move_rollout(Rollout(**values), device)
