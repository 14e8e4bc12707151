"""A word where many iterations in a row had nothing to learn from."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer

from litgrpo.distributed.messages import rank_zero_info


class NothingLearned(Callback):
    """Says, after 10 iterations without any advantage, then after 20, 40, ..., what may help.

    Args:
        patience: iterations in a row until it says so for the first time.
    """

    def __init__(self, patience: int = 10) -> None:
        self.patience = self.next = patience
        self.in_a_row = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count anew."""
        self.next, self.in_a_row = self.patience, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count iterations in which every advantage was 0, in all processes."""
        if not isinstance(outputs, dict) or "advantages" not in outputs:
            return  # a training step of the user's own
        equal = not bool(outputs["advantages"].any())
        if not trainer.strategy.reduce_boolean_decision(equal, all=True):
            self.next, self.in_a_row = self.patience, 0
            return
        self.in_a_row += 1
        if self.in_a_row == self.next:
            self.next *= 2
            rank_zero_info(self.line(outputs["rewards"]))

    def line(self, rewards: Any) -> str:
        """What was seen, and what may help.

        Args:
            rewards: table of the last iteration.
        """
        none = float((~rewards.valid).double().mean())
        seen = f"the same reward, lately {rewards.stats()['reward/mean']:.3g}"
        cause = "no reward at all (None)" if none == 1 else seen
        remedy = "let a reward judge these completions, which samples/ shows"
        if none < 1:
            remedy = (
                "take easier prompts, a reward with partial credit, a larger model.group_size or a "
                "higher model.sampling.temperature; samples/ shows the completions"
            )
        return (
            f"No group taught anything in {self.in_a_row} iterations: all completions of each "
            f"prompt got {cause}. To learn, {remedy}."
        )
