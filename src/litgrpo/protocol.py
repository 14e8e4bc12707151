"""Attributes of a module that callbacks and checkpoints read; `GRPO` and `SFT` have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from litgrpo.evaluation.evaluator import Evaluator
    from litgrpo.learning.learner import Learner
    from litgrpo.learning.update_config import UpdateConfig
    from litgrpo.models.policy import Policy


@runtime_checkable
class TrainedModule(Protocol):
    """A LightningModule that counts iterations and reports its evaluations."""

    @property
    def iteration(self) -> int:
        """Number of finished iterations, those before a resume included."""

    @property
    def max_iterations(self) -> int | None:
        """Iterations of the whole run; None if something else limits it."""

    @property
    def evaluation_report(self) -> dict[str, float]:
        """Metrics of the newest evaluation, such as `{"val/avg@4": 0.5, "val/avg@4_low": 0.4}`."""

    @property
    def success(self) -> dict[str, Any]:
        """Reward and threshold that make a completion correct; {} if nothing is sampled."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    def log(self, name: str, value: Any) -> None:
        """Log one number; see LightningModule."""

    def log_dict(self, dictionary: Mapping[str, Any]) -> None:
        """Log several numbers; see LightningModule."""

    def print(self, *args: Any) -> None:
        """Print on rank 0, above a progress bar."""


@runtime_checkable
class RolloutModule(TrainedModule, Protocol):
    """A `TrainedModule` that samples completions, as `GRPO` does.

    Its `training_step` returns `{"iteration": Iteration}`.
    """

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""

    @property
    def learner(self) -> Learner:
        """Takes the optimizer steps; its `comm` connects the ranks."""

    @property
    def evaluator(self) -> Evaluator:
        """Scores held-out prompts."""

    @property
    def update(self) -> UpdateConfig:
        """Options of the optimizer step."""

    @property
    def task_names(self) -> list[str]:
        """Tasks whose metrics are logged."""

    @property
    def precision(self) -> Any:
        """Precision options of the model."""
