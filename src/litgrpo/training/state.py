"""What a checkpoint of GRPO holds besides the trainer's own state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from litgrpo.models.loading import check_weights
from litgrpo.rollout.async_rollout import AsyncRollouter
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.training import kernel_choice
from litgrpo.training.learner import Learner


def save(
    checkpoint: dict[str, Any], kept: dict[str, Tensor], learner: Learner, rollouter: Rollouter
) -> None:
    """Add what resuming needs, and leave out weights that never change.

    Args:
        checkpoint: with all weights of the module.
        kept: {name: tensor} of the weights that training changes.
        learner: has the coefficients, and limits where memory was short.
        rollouter: has such limits, too.
    """
    weights = checkpoint["state_dict"]
    # Limits on rows at once decide how sums are rounded.
    lowered = {"micro_batch_size": learner.max_rows, "max_rows": rollouter.max_rows}
    if isinstance(rollouter, AsyncRollouter):
        checkpoint["ahead"] = rollouter.state_dict(checkpoint["iteration"])
    checkpoint |= {
        "state_dict": {name: weights[name] for name in weights if name in kept},
        "coefficients": learner.coefficients.state_dict(),
        kernel_choice.KEY: kernel_choice.saved(learner.policy),
        "lowered": {name: rows for name, rows in lowered.items() if rows is not None},
    }


def load(
    checkpoint: dict[str, Any], expected: dict[str, Tensor], learner: Learner, rollouter: Rollouter
) -> None:
    """Take up what `save` added; the weights are loaded by whoever reads the checkpoint.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    check_weights(checkpoint["state_dict"], expected)
    learner.coefficients.load_state_dict(checkpoint["coefficients"])
    learner.max_rows = checkpoint["lowered"].get("micro_batch_size")
    rollouter.max_rows = checkpoint["lowered"].get("max_rows")
    rollouter.forget_weights()
    if isinstance(rollouter, AsyncRollouter):
        rollouter.load_state_dict(checkpoint.get("ahead"))
