"""No cache, one plain forward pass per token: slow and plainly right."""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.interface import RolloutEngine, Transcript
from litgrpo.rollout.sampling import Sampling, sample
from litgrpo.types import PromptBatch, Rollout


class ReferenceEngine(RolloutEngine):
    """The oracle that other engines are compared with, token for token."""

    @torch.no_grad()
    def generate(
        self,
        policy: Policy,
        prompts: PromptBatch,
        group_size: int,
        uniforms: Tensor,
        sampling: Sampling,
    ) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        device = prompts.prompt_ids.device
        prompt_ids = prompts.prompt_ids.repeat_interleave(group_size, 0)
        prompt_mask = prompts.prompt_mask.repeat_interleave(group_size, 0)
        said = Transcript.empty(uniforms.shape, policy.pad_id, device)
        rows = torch.arange(len(uniforms), device=device)
        eos_ids = torch.tensor(policy.eos_ids, device=device)
        uniforms = uniforms.to(device)
        for column in range(uniforms.shape[1]):
            logits = policy.dense_logits(prompt_ids, prompt_mask, said.ids[:, :column])[:, -1]
            said.add(column, rows, sample(logits, uniforms[:, column], sampling), eos_ids)
            if bool(said.ended.all()):
                break
        return said.rollout(prompts, group_size)
