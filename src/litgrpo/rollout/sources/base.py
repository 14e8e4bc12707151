"""Where the completions come from that an iteration trains on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.arguments import find_page
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.rollout.engines.base import RolloutEngine
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.run_options import RunOptions
from litgrpo.types import FRESH, STALE, STORED, PromptBatch, Rollout, Stats

if TYPE_CHECKING:
    from litgrpo.models.loading.load import Precision

EXACT_DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class SourceParts:
    """Parts of a run that a source works with.

    Args:
        rollouter: samples completions.
        next_prompts: returns the prompts of the k-th next iteration, k = 1, 2, ...
        add_policy_logprobs: returns completions with the policy's log-probabilities as those of the
            sampler.
        find_end_token: returns the token that ends a completion of the data.
    """

    rollouter: Rollouter
    next_prompts: Callable[[int], PromptBatch]
    add_policy_logprobs: Callable[[Rollout], Rollout]
    find_end_token: Callable[[], int]


class RolloutSource(ABC):
    """Where the completions come from that an iteration trains on; an option of `GRPO`.

    Evaluations, and stages that need further completions, always sample with the current weights.
    A source has its options as arguments. It gets what it depends on in three calls, each as early
    as that exists, so that a mistake is reported before the work that it would waste:

    1. `check`, when the module is built: the other options.
    2. `setup`, when a fit begins, before the model is loaded: trainer and data.
    3. `connect`, when the model is loaded, and again if it moves to another device.
    """

    # Where its rollouts come from: `fresh` ones are sampled with the current weights, `stale` ones
    # with earlier weights, `stored` ones by another run; those of the `data` were not sampled.
    # Without an annotation, whose names jsonargparse would look up in the modules of subclasses.
    provenance = FRESH
    fixed_shapes = True  # completions are padded to the limit where XLA needs that

    @property
    def is_off_policy(self) -> bool:
        """True if completions are sampled with other weights than those that train on them."""
        return self.provenance in (STALE, STORED)

    def check(self, run: RunOptions) -> None:  # noqa: B027 (optional)
        """Check that the other options of a run go together with this source.

        Raises:
            ValueError: they do not; the message names both options.
        """

    def setup(self, module: Any) -> None:  # noqa: B027 (optional)
        """Check, before a fit loads the model, that completions are there.

        Args:
            module: a `GRPO`, attached to its trainer.

        Raises:
            ValueError: they are not.
        """

    def connect(self, parts: SourceParts) -> None:
        """Use these parts from now on."""
        self.parts = parts

    @abstractmethod
    def take(self, prompts: PromptBatch, iteration: int) -> Rollout:
        """Return the completions of an iteration, with their texts.

        Args:
            prompts: B prompts of the iteration.
            iteration: number of finished iterations.
        """

    def prompts_of(self, rollout: Rollout, prompts: PromptBatch) -> PromptBatch:
        """Return the prompts of the data that a rollout of this source continues.

        Args:
            rollout: result of `take`.
            prompts: those of the iteration.
        """
        return prompts

    def find_end(self, iteration: int) -> str:
        """Return why there are no completions after this many iterations; "" if there are."""
        return ""

    def stats(self, rollout: Rollout, iteration: int) -> Stats:
        """Return what to log about a rollout of this source."""
        return {}

    def state_dict(self, iteration: int) -> list[dict[str, Any]]:
        """Return what an iteration that resumes from a checkpoint needs; every rank must call it.

        Args:
            iteration: number of finished iterations.
        """
        return []

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:  # noqa: B027 (optional)
        """Restore what `state_dict` returned."""

    def close(self) -> None:  # noqa: B027 (optional)
        """End what runs in the background."""


@dataclass
class OnPolicy(RolloutSource):
    """Completions that are sampled with the current weights, the default.

    Example:
        >>> OnPolicy().is_off_policy
        False
    """

    def take(self, prompts: PromptBatch, iteration: int) -> Rollout:
        """Sample completions of the prompts."""
        return self.parts.rollouter.generate(prompts, "train", iteration)


def with_importance_correction(
    objective: Objective, engine: RolloutEngine, source: RolloutSource
) -> Objective:
    """Add an importance correction if the sampler's probabilities are not the trainer's.

    With `old_policy: sampler` the ratio of the objective corrects for them already. The log names
    the terms of the loss that are not corrected.

    Args:
        objective: of the config.
        engine: samples.
        source: of the rollouts.
    """
    if engine.exact_logprobs and not source.is_off_policy:
        return objective
    reason = f"{type(engine).__name__} has its own log-probabilities"
    if source.is_off_policy:
        reason = f"model.source is {type(source).__name__}, so rollouts are off-policy"
    if not objective.corrects_sampler:
        objective = replace(objective, importance_correction=ImportanceCorrection())
    correction = "importance_correction is on"
    if objective.importance_correction is None:
        correction = "old_policy is sampler, so the ratio corrects for it"
    uncorrected = objective.find_uncorrected()
    terms = f"but {', '.join(uncorrected)}" if uncorrected else "of the loss"
    rank_zero_info(
        f"{reason}: model.objective.{correction}. All terms {terms} are corrected "
        f"({find_page('docs/explanation/algorithm.md#off-policy-rollouts')}). Log-probabilities "
        "before the update are recomputed if there are several optimizer steps per rollout."
    )
    return objective


def can_reuse_sampler_logprobs(
    trainer_precision: str,
    precision: Precision,
    engine: RolloutEngine,
    environment: object | None,
    source: RolloutSource,
) -> bool:
    """Return True if the sampler's log-probabilities are the trainer's, up to float32 rounding.

    In lower precision the two round differently enough to move ratios. In episodes the rows that
    are decoded together depend on when observations arrive, and with them rounding does.
    """
    full_precision = trainer_precision == "32-true" and precision.autocast_dtype is None
    full_precision = full_precision and precision.dtype in EXACT_DTYPES
    same_weights = engine.exact_logprobs and not source.is_off_policy
    return full_precision and same_weights and environment is None
