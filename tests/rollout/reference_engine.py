"""No cache, one plain forward pass per token: slow and plainly right."""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.rollout.engines.local import CompletionBuffer
from litgrpo.rollout.interface import Requests, RolloutEngine
from litgrpo.rollout.sampling import Drawn, sample
from litgrpo.types import Rollout


def write_column(
    buffer: CompletionBuffer, column: int, rows: Tensor, drawn: Drawn, eos_ids: Tensor
) -> None:
    """Write one token of each of the rows [n]; rows that have ended stay as they are."""
    active, tokens = ~buffer.ended[rows], drawn.tokens
    buffer.ids[rows, column] = torch.where(active, tokens, buffer.ids[rows, column])
    buffer.logprobs[rows, column] = torch.where(active, drawn.logprobs.float(), 0.0)
    buffer.mask[rows, column] = active
    if drawn.candidate_ids is not None:
        columns = torch.full_like(rows[active], column)
        buffer.candidate_ids.append((columns, rows[active], drawn.candidate_ids[active]))
    buffer.ended[rows] |= torch.isin(tokens, eos_ids)


class ReferenceEngine(RolloutEngine):
    """The oracle that other engines are compared with, token for token."""

    @torch.no_grad()
    def generate(self, requests: Requests) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        policy, prompts, group_size = requests.policy, requests.prompts, requests.group_size
        device = prompts.prompt_ids.device
        prompt_ids = prompts.prompt_ids.repeat_interleave(group_size, 0)
        prompt_mask = prompts.prompt_mask.repeat_interleave(group_size, 0)
        uniforms = requests.uniforms.to(device)
        buffer = CompletionBuffer.empty(uniforms.shape, policy.pad_id, device)
        rows = torch.arange(len(uniforms), device=device)
        eos_ids = torch.tensor(requests.end_ids, device=device)
        for column in range(uniforms.shape[1]):
            logits = policy.dense_logits(prompt_ids, prompt_mask, buffer.ids[:, :column])[:, -1]
            drawn = sample(logits, uniforms[:, column], requests.sampling)
            write_column(buffer, column, rows, drawn, eos_ids)
            if bool(buffer.ended.all()):
                break
        return buffer.rollout(prompts, group_size)
