"""Inside of a vLLM server: draws with the random numbers of the one who asks.

`--logits-processors litgrpo.rollout.engines.vllm_uniforms:Uniforms`, in an environment where vLLM
and this package can be imported; torch and numpy are all that it needs besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from litgrpo.rollout.sampling import Sampling, sample


class Uniforms(LogitsProcessor):
    """Leaves of each row the one token that `litgrpo.rollout.sampling.sample` draws.

    Token t of a request is drawn with entry t of `extra_args["uniforms"]`; requests without it are
    left as they are. Log-probabilities have to be those before: `--logprobs-mode raw_logprobs`.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[list[float], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """What is drawn is seldom the most likely token."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the rows: removed, added, moved, in this order."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self.rows.pop(place, None)
        for place, params, _, said in batch_update.added:
            self.rows.pop(place, None)
            numbers = (params.extra_args or {}).get("uniforms")
            if numbers is not None:
                self.rows[place] = (numbers, said)
        for source, target, how in batch_update.moved:
            one, other = self.rows.pop(source, None), self.rows.pop(target, None)
            swapped = {target: one, source: other if how == MoveDirectionality.SWAP else None}
            self.rows |= {place: row for place, row in swapped.items() if row is not None}

    def apply(self, logits: Tensor) -> Tensor:
        """[n, V] with all but the drawn tokens at minus infinity."""
        if not self.rows:
            return logits
        places = torch.tensor(list(self.rows), device=logits.device)
        numbers = [numbers[len(said)] for numbers, said in self.rows.values()]
        uniforms = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        tokens = sample(logits[places], uniforms, Sampling()).tokens
        kept = logits[places, tokens]
        logits[places] = -torch.inf
        logits[places, tokens] = kept
        return logits
