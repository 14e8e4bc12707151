"""What happened in the episodes of held-out prompts, besides their rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from litgrpo.evaluation.accuracy import PerPrompt
from litgrpo.types import Rollout

NAMES = ("turns", "called_frac")


class Played(PerPrompt):
    """Turns of an episode, and share of episodes in which a tool was called.

    Args:
        prefix: of the names.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def update(self, index: Tensor, rollout: Rollout) -> None:
        """Add a batch; completions of one turn say nothing.

        Args:
            index: [B] position of each prompt in its data set.
            rollout: G samples of each prompt.
        """
        # Processes agree on what is counted, so single turns are counted, too, as unknown.
        seen = torch.full((len(NAMES), len(rollout.completion_ids)), torch.nan)
        for row, episode in enumerate(rollout.episodes):
            seen[:, row] = torch.tensor(
                [float(len(episode.assistant_texts)), float(bool(episode.calls))]
            )
        means = seen.view(len(NAMES), -1, rollout.group_size).mean(2)
        self.collect(index, means.T.contiguous().to(index.device))

    def compute(self) -> dict[str, Tensor]:
        """{turns, called_frac}, means over prompts; nothing where nothing was played."""
        rows = torch.tensor(self.rows(len(NAMES)), dtype=torch.float64)
        means = rows.view(-1, len(NAMES)).mean(0).float().to(self.device)
        names = [f"{self.prefix}{name}" for name in NAMES]
        return {} if bool(means.isnan().any()) else dict(zip(names, means, strict=True))
