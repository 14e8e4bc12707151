"""What a reward is made into before it is added up: compared, gated, faded in and out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from litgrpo.rewards.parts import Normalize, Reward

EPS = 1e-4


def normalized(values: Tensor, how: Normalize, precision: float) -> Tensor:
    """Distance from the mean, in standard deviations.

    Numbers that are equal but for rounding get exactly 0.

    Args:
        values: [B, G]; NaN is left out and stays.
        how: `group` compares each row of the tensor, `batch` all of it, `none` nothing.
        precision: machine epsilon of the arithmetic that the values came in.

    Returns:
        [B, G].
    """
    if how == "none":
        return values
    compared = values if how == "group" else values.reshape(1, -1)
    # (x - mean) / (std + eps), with n - 1 in the standard deviation
    missing = compared.isnan()
    distance = compared - compared.nanmean(1, keepdim=True)
    others = ((~missing).sum(1, keepdim=True) - 1).clamp(min=1)
    std = (distance.square().nansum(1, keepdim=True) / others).sqrt()
    high = compared.masked_fill(missing, -torch.inf).amax(1, keepdim=True)
    low = compared.masked_fill(missing, torch.inf).amin(1, keepdim=True)
    largest = compared.nan_to_num(0.0).abs().amax(1, keepdim=True)
    # Rounding errors would be blown up by a standard deviation that is one itself.
    equal = high - low <= 4 * precision * largest
    result = torch.where(equal & ~missing, 0.0, distance / (std + EPS))
    return result.view(values.shape)


def gated(values: Tensor, gate: Tensor, threshold: float, how: Normalize, eps: float) -> Tensor:
    """The values where the gate is open, 0 where it is closed.

    Only values behind open gates are compared with each other.

    Args:
        values: [B, G].
        gate: [B, G] reward that decides; NaN, nothing is known, gives NaN.
        threshold: the gate is open from here on.
        how: as in `normalized`.
        eps: machine epsilon, as `precision` there.

    Returns:
        [B, G].
    """
    is_open = gate >= threshold
    compared = normalized(values.where(is_open, torch.nan), how, eps)
    return compared.where(is_open, 0.0).where(~gate.isnan(), torch.nan)


def scheduled(schedule: Mapping[int, float], iteration: int) -> float:
    """The factor at an iteration: linear between the given points, constant outside.

    Args:
        schedule: {iteration: factor}; nothing means 1.
        iteration: finished iterations.

    Example:
        >>> scheduled({0: 1.0, 100: 0.0}, 25)
        0.75
    """
    points = sorted(schedule.items()) or [(0, 1.0)]
    # Outside of the points, the nearest one is on both sides.
    start, low = max((p for p in points if p[0] <= iteration), default=points[0])
    end, high = min((p for p in points if p[0] > iteration), default=points[-1])
    return low + (high - low) * (iteration - start) / max(1, end - start)


def shaped(part: Reward, name: str, parts: Mapping[str, Tensor], precision: float) -> Tensor:
    """[B, G] a part as it is weighted.

    Args:
        part: its settings.
        name: its name.
        parts: {name: [B, G]} all of them.
        precision: machine epsilon of the arithmetic that it came in.
    """
    if part.gate is None:
        return normalized(parts[name], part.normalize, precision)
    gate = parts[part.gate]
    return gated(parts[name], gate, part.gate_threshold, part.normalize, precision)
