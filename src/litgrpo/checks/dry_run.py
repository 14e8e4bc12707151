"""The run in small: its module on a few short prompts, without leaving a trace in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from litgrpo.models.policy import Policy
from litgrpo.types import Experience, PromptBatch, Rollout

if TYPE_CHECKING:
    from litgrpo.modules.grpo import GRPO

# A handful of short rows, whatever the size of the run.
PROMPTS, GROUP, PROMPT_LEN, COMPLETION_LEN = 3, 4, 256, 16
EXTRA_PADDING = 3


def first_prompts(module: GRPO) -> PromptBatch | None:
    """The first prompts of the training data, from a loader of our own where there is a choice.

    None if there are none, or something else than prompts, which training complains about.
    """
    # Lightning has no public name for where the loader comes from. A data module makes a new one;
    # the iterator of a loader that was given directly is new, and its generator is put back.
    loader = module.trainer.fit_loop._data_source.dataloader()
    generator = loader.generator if isinstance(loader, DataLoader) else None
    state = None if generator is None else generator.get_state()
    batch = next(iter(loader), None)
    if generator is not None and state is not None:
        generator.set_state(state)
    if not isinstance(batch, PromptBatch):
        return None
    batch = batch.select(range(min(PROMPTS, len(batch))))
    ids, mask = batch.prompt_ids[:, -PROMPT_LEN:], batch.prompt_mask[:, -PROMPT_LEN:]
    return replace(batch, prompt_ids=ids, prompt_mask=mask).to(module.device)


def padded(prompts: PromptBatch) -> PromptBatch:
    """The same prompts with more padding on the left, and something to read in it."""
    filler = int(prompts.prompt_ids[0, -1])
    wider = (EXTRA_PADDING, 0)
    mask = torch.nn.functional.pad(prompts.prompt_mask, wider)
    ids = torch.nn.functional.pad(prompts.prompt_ids, wider).masked_fill(~mask, filler)
    return replace(prompts, prompt_ids=ids, prompt_mask=mask)


def in_small(module: GRPO) -> GRPO:
    """The same module with short completions and small groups; it shares weights and trainer."""
    small = copy.copy(module)
    small._modules = small._modules.copy()  # or the original would get the policy below
    small._trainer = module._trainer  # a copy comes without
    small.policy = copy.copy(module.policy)  # so that other tokens can end a completion
    small.group_size = min(module.group_size, GROUP)
    small.max_completion_len = min(module.max_completion_len, COMPLETION_LEN)
    return small


def some_ends(policy: Policy, rollout: Rollout) -> tuple[int, ...]:
    """End tokens, among them two that were said, so that completions of this kind end early."""
    thirds = (rollout.lengths[0] // 3, rollout.lengths[-1] // 2)
    said = [int(rollout.completion_ids[row, t]) for row, t in zip((0, -1), thirds, strict=True)]
    return tuple(sorted({*policy.eos_ids, *said}))


def has_dropout(module: GRPO) -> bool:
    """Whether the recipe asks for dropout in the update, so that it differs from sampling."""
    return module.precision.dropout or (module.lora is not None and module.lora.dropout > 0)


def tolerance(module: GRPO) -> float:
    """1e-4, or 32 units in the last place of the coarsest arithmetic of the run.

    bfloat16 0.25, float16 and TF32 0.03.
    """
    device = module.device.type
    dtypes = {p.dtype for p in module.policy.parameters() if p.is_floating_point()}  # type: ignore[union-attr]
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    if module.engine.lower_precision is not None:
        dtypes.add(module.engine.lower_precision)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch.get_float32_matmul_precision() != "highest":
        eps = max(eps, torch.finfo(torch.float16).eps)
    return max(1e-4, 32 * eps)


@contextmanager
def modes_kept(module: GRPO) -> Iterator[None]:
    """Put every part back into train or eval mode."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


class Probe:
    """A reward function that remembers what it was asked; what it gives differs in every group."""

    def __call__(
        self, prompts: list[str], completions: list[str], **columns: list[Any]
    ) -> list[float]:
        """0, a half, 1, and again."""
        self.asked = {"prompts": prompts, "completions": completions} | columns
        return [row % 3 / 2 for row in range(len(prompts))]

    def misplaced(self, rollout: Rollout, experience: Experience) -> float:
        """Number of rows that were rewarded, or will be learned from, as another prompt's."""
        own = torch.arange(len(experience)) // rollout.group_size
        right = experience.prompt_of.cpu() == own
        known = {**rollout.prompts.columns, "prompts": rollout.prompts.prompts}
        for row, prompt in enumerate(own.tolist()):
            expected = {name: values[prompt] for name, values in known.items()}
            expected["completions"] = rollout.completions[row]
            right[row] &= expected == {name: self.asked[name][row] for name in expected}
        return float((~right).sum())
