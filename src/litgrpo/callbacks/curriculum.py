"""Feeds the success of an iteration's prompts to the curriculum of the data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from litgrpo.data.modules import curriculum_of
from litgrpo.protocol import RolloutModule


class CurriculumFeedback(Callback):
    """Lets the curriculum know how often the prompts of all ranks were solved.

    Prompts whose groups dynamic sampling replaced count, too, and those that it tried.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: RolloutModule, outputs: Any, *_: Any
    ) -> None:
        order = curriculum_of(trainer)
        if order is None or not isinstance(outputs, dict) or "iteration" not in outputs:
            return
        comm = pl_module.learner.comm
        for rollout, rewards in outputs["iteration"].experience.sampled:
            success = pl_module.evaluator.find_correct(rewards).nanmean(1)  # NaN without a reward
            index = rollout.prompts.index.to(success.device)
            order.record(comm.gather(index), comm.gather(success))
        pl_module.log_dict(order.stats())
