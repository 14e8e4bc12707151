"""Prompts read once per group, finished rows dropped: the engine for CPU and CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from litgrpo.policies.policy import DecodeState, Policy
from litgrpo.rollout.engine import RolloutEngine, Transcript
from litgrpo.rollout.sampling import Sampling, sample
from litgrpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class EagerEngine(RolloutEngine):
    """Decodes all rows at once, each prompt's keys and values shared by its group.

    Args:
        max_rows: rows that decode at the same time at most, in whole groups; lower it when
            keys and values do not fit into memory. None decodes all.
        drop_frac: finished rows leave the batch when they are this fraction of it.
    """

    max_rows: int | None = None
    drop_frac: float = 0.125

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
        said = Transcript.empty(uniforms.shape, policy.pad_id, device)
        uniforms = uniforms.to(device)
        at_once = len(prompts)
        if self.max_rows is not None:
            at_once = max(1, self.max_rows // group_size)
        for first in range(0, len(prompts), at_once):
            part = slice(first, first + at_once)
            logits, state = policy.prefill(
                prompts.prompt_ids[part],
                prompts.prompt_mask[part],
                group_size,
                capacity=uniforms.shape[1],
            )
            logits = logits.repeat_interleave(group_size, 0)
            rows = torch.arange(len(logits), device=device) + first * group_size
            self._decode(policy, state, logits, rows, said, uniforms, sampling)
        return said.rollout(prompts, group_size)

    def _decode(
        self,
        policy: Policy,
        state: DecodeState,
        logits: Tensor,
        rows: Tensor,
        said: Transcript,
        uniforms: Tensor,
        sampling: Sampling,
    ) -> None:
        """Sample and feed until every row has ended or is full."""
        eos_ids = torch.tensor(policy.eos_ids, device=logits.device)
        last = uniforms.shape[1] - 1
        for column in range(last + 1):
            drawn = sample(logits, uniforms[rows, column], sampling)
            said.add(column, rows, drawn, eos_ids)
            live = ~said.ended[rows]
            num_live = int(live.sum())
            if num_live == 0 or column == last:
                return
            tokens = drawn.tokens
            if len(rows) - num_live >= self.drop_frac * len(rows):
                kept = live.nonzero().squeeze(-1)
                state.select(kept)
                rows, tokens = rows[kept], tokens[kept]
            logits = policy.step(tokens, state)
