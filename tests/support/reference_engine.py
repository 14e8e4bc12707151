"""No cache, one plain forward pass per token: slow and plainly right."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import CompletionBuffer
from litgrpo.rollout.sampling import Drawn, draw_tokens
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


def episodes(requests: RolloutRequest) -> Rollout:
    """Decode each row separately: generate a turn, wait for the observation, and continue."""
    policy, prompts, listener = requests.policy, requests.prompts, requests.listener
    assert listener is not None
    buffer = CompletionBuffer.empty(requests.uniforms.shape, policy.pad_id, torch.device("cpu"))
    turns = torch.full(requests.uniforms.shape, -1, dtype=torch.int16)
    for row, uniforms in enumerate(requests.uniforms):
        number, first, column = 0, 0, 0
        while column < len(uniforms):
            own = row // requests.group_size
            ids, mask = prompts.prompt_ids[own, None], prompts.prompt_mask[own, None]
            logits = policy.dense_logits(ids, mask, buffer.ids[row, None, :column])[:, -1]
            drawn = draw_tokens(logits, uniforms[None, column], requests.sampling)
            buffer.ids[row, column], buffer.logprobs[row, column] = drawn.tokens, drawn.logprobs
            buffer.mask[row, column], turns[row, column] = True, number
            if drawn.candidate_ids is not None:
                place = (torch.tensor([column]), torch.tensor([row]), drawn.candidate_ids)
                buffer.candidate_ids.append(place)
            column += 1
            said = buffer.ids[row, first:column].tolist()
            stops = requests.stops is not None and requests.stops.found(said)
            ends = said[-1] in requests.end_ids or stops
            buffer.ended[row] = ends
            if not ends and len(said) < listener.max_turn_tokens and column < len(uniforms):
                continue
            listener.on_turn_end(row, said, truncated=not ends)
            heard = listener.take_observations(wait=True)[row]
            if heard is None:
                break
            end = column + len(heard)
            buffer.ids[row, column:end] = torch.tensor(heard, dtype=torch.long)
            buffer.mask[row, column:end] = True
            buffer.ended[row] = True
            number, first, column = number + 1, end, end
    plain = buffer.rollout(prompts, requests.group_size)
    turns = turns[:, : plain.completion_ids.shape[1]]
    return replace(plain, turns=turns)


class ReferenceEngine(RolloutEngine):
    """The oracle that other engines are compared with, token for token."""

    hears = True

    @torch.no_grad()
    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        if requests.listener is not None:
            return episodes(requests)
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
            drawn = draw_tokens(logits, uniforms[:, column], requests.sampling)
            write_column(buffer, column, rows, drawn, eos_ids)
            if bool(buffer.ended.all()):
                break
        return buffer.rollout(prompts, group_size)
