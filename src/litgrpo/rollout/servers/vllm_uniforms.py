"""Logits processor for vLLM servers: samples with the random numbers of each request.

Start the server with `--logits-processors litgrpo.rollout.servers.vllm_uniforms:Uniforms`, in an
environment with vLLM and this package; of its dependencies, only torch and numpy are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from litgrpo.rollout.sampling import Sampling, draw_tokens


class Uniforms(LogitsProcessor):
    """Masks all tokens of a row but the one that `litgrpo.rollout.sampling.draw_tokens` draws.

    Token t of a request is drawn with entry t of `extra_args["uniforms"]`; requests without it do
    not change. After masking the drawn token has probability 1, so the server must return
    log-probabilities from before it: `--logprobs-mode raw_logprobs`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[list[float], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the drawn token is often not the most likely one."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Apply the batch changes in vLLM's order: removed, added, moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, generated in batch_update.added:
            self.rows.pop(index, None)
            numbers = (params.extra_args or {}).get("uniforms")
            if numbers is not None:
                self.rows[index] = (numbers, generated)
        for source, target, how in batch_update.moved:
            one, other = self.rows.pop(source, None), self.rows.pop(target, None)
            swapped = {target: one, source: other if how == MoveDirectionality.SWAP else None}
            self.rows |= {index: row for index, row in swapped.items() if row is not None}

    def apply(self, logits: Tensor) -> Tensor:
        """Set all logits [n, V] to minus infinity except those of the drawn tokens."""
        if not self.rows:
            return logits
        places = torch.tensor(list(self.rows), device=logits.device)
        numbers = [numbers[len(generated)] for numbers, generated in self.rows.values()]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        tokens = draw_tokens(logits[places], uniforms, Sampling()).tokens
        drawn_logits = logits[places, tokens]
        logits[places] = -torch.inf
        logits[places, tokens] = drawn_logits
        return logits
