"""Which rows share an optimizer step, which go through the model together, which teach nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from litgrpo.algorithm.advantages import DecoupledNormalized, Normalized
from litgrpo.algorithm.objective import Objective
from litgrpo.learner.config import UpdateConfig
from litgrpo.learner.static_batches import Rows
from litgrpo.tensors import family_buckets, length_buckets
from litgrpo.types import Experience, TokenLogprobs


def mini_batches(num_rows: int, group_size: int, num_steps: int) -> list[Tensor]:
    """The rows of each optimizer step: whole groups in order, the same in every inner epoch.

    Args:
        num_rows: N.
        group_size: G.
        num_steps: optimizer steps of one pass over the rollout.

    Returns:
        Lists of row numbers, together every row once.
    """
    groups = torch.arange(num_rows).view(-1, group_size)
    return [part.flatten() for part in groups.tensor_split(num_steps) if part.numel()]


def micro_batches(experience: Experience, learning: UpdateConfig, *, shared: bool) -> list[Tensor]:
    """Rows that go through the model together, within the limits of one pass.

    Args:
        experience: M rows.
        learning: the limits.
        shared: whether the model reads a prompt once for all of its rows: then rows of a prompt
            stay together and real tokens count; else rows of similar length do, and padded tokens
            count, the prompt's in each row.

    Returns:
        Lists of row numbers, together every row once.
    """
    limits = {"max_rows": learning.micro_batch_size, "max_tokens": learning.max_tokens}
    if shared:
        prompts = experience.prompt_mask.sum(1)
        return family_buckets(experience.lengths, prompts, experience.prompt_of, **limits)
    return length_buckets(experience.lengths + experience.prompt_mask.shape[1], **limits)


def rows_that_teach(experience: Experience) -> Tensor:
    """Rows whose tokens have both weight and advantage.

    Without a KL or entropy term the gradient of the others is 0; their tokens stay in the
    denominators of the weights. One row is always kept, so that every process takes part in every
    optimizer step.

    Args:
        experience: M rows.

    Returns:
        [m] row numbers, at least one.
    """
    teaches = ((experience.advantages != 0) & (experience.weights != 0)).any(1)
    teaches[0] |= ~teaches.any()
    return teaches.nonzero().squeeze(1)


def check_centered(advantages: Tensor, objective: Objective, tolerance: float = 1e-4) -> None:
    """Make sure that comparing a group with itself left nothing over.

    Args:
        advantages: [B, G] of the first token of each completion.
        objective: what they were computed by; one without a group baseline, with a discount or
            with a filter need not be centered.
        tolerance: largest mean of a group, in units of its largest advantage or 1.

    Raises:
        RuntimeError: a group's advantages do not sum to zero.
    """
    kind = objective.advantages
    by_group = isinstance(kind, Normalized | DecoupledNormalized)
    if not (by_group and kind.compares and objective.gamma == 1):
        return
    off = advantages.mean(1).abs() / advantages.abs().amax(1).clamp(min=1)
    if bool((off > tolerance).any()):
        worst = int(off.argmax())
        raise RuntimeError(
            f"The advantages of prompt {worst} of this batch average {float(off[worst]):.3g} "
            f"instead of 0: {advantages[worst].tolist()}. Rewards and completions are misaligned."
        )


@torch.no_grad()
def scored(
    experience: Experience,
    learning: UpdateConfig,
    logprobs_of: Callable[[Experience], TokenLogprobs],
    *,
    shared: bool = False,
    device: torch.device | None = None,
) -> TokenLogprobs:
    """Log-probabilities of all rows without gradient, a micro-batch at a time.

    Args:
        experience: M rows.
        learning: the limits of a micro-batch.
        logprobs_of: what to ask about a micro-batch.
        shared: see `micro_batches`.
        device: where micro-batches of one shape go; None: they are where the experience is, and
            as small as can be.

    Returns:
        [M, C] log-probabilities and entropies.
    """
    logprobs = torch.zeros_like(experience.sampler_logprobs)
    entropy = torch.zeros_like(logprobs)
    if device is not None:
        return Rows(experience, learning, device).scored(logprobs_of)
    for rows in micro_batches(experience, learning, shared=shared):
        part = logprobs_of(experience.select(rows))
        used = part.logprobs.shape[1]
        logprobs[rows, :used] = part.logprobs.to(logprobs.dtype)
        entropy[rows, :used] = part.entropy.to(entropy.dtype)
    return TokenLogprobs(logprobs, entropy)
