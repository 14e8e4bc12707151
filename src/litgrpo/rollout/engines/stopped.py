"""Any engine, with completions that end at stop strings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.types import Rollout


@dataclass(frozen=True)
class Stopped(RolloutEngine):
    """An engine whose completions end behind the token that completes a stop string.

    What it samples beyond that is cut off. No token depends on later ones, so that is the same as
    not having sampled it, whatever the engine knows of stop strings.

    Args:
        engine: samples.
        stops: where completions end.
    """

    engine: RolloutEngine
    stops: StopStrings

    @property
    def exact_logprobs(self) -> bool:
        """As the engine."""
        return self.engine.exact_logprobs

    @property
    def static_shapes(self) -> bool:
        """As the engine."""
        return self.engine.static_shapes

    @property
    def row_limit(self) -> int | None:
        """As the engine."""
        return self.engine.row_limit

    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        rollout = self.engine.generate(requests)
        ids, device = rollout.token_lists(), rollout.completion_ids.device
        ends = torch.tensor([self.stops.length(row) for row in ids], device=device)
        places = torch.arange(rollout.completion_ids.shape[1], device=device)
        mask = rollout.completion_mask & (places < ends[:, None])
        # Ragged shapes lose the columns that are empty now; fixed ones are fixed.
        used = len(places) if self.static_shapes else max(1, int(mask.sum(1).max()))
        found = ends <= torch.tensor([len(row) for row in ids], device=device)
        kept, candidates = mask[:, :used], rollout.candidate_ids
        filled = rollout.completion_ids[:, :used].masked_fill(~kept, requests.policy.pad_id)
        if candidates is not None:
            candidates = candidates[:, :used].masked_fill(~kept[..., None], -1)
        return replace(
            rollout,
            completion_ids=filled,
            completion_mask=kept,
            loss_mask=kept,
            sampler_logprobs=rollout.sampler_logprobs[:, :used].masked_fill(~kept, 0.0),
            truncated=rollout.truncated & ~found,
            candidate_ids=candidates,
        )
