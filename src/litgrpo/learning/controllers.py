"""Coefficients of the objective that change during training, and a reference that follows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.argument_types import check_field_types
from litgrpo.arguments import above, at_most
from litgrpo.distributed.collectives import Comm
from litgrpo.models.policy import Policy
from litgrpo.models.reference import FrozenReference, Reference
from litgrpo.types import Rollout, Stats


@check_field_types
@dataclass(frozen=True)
class EntropyTarget:
    """Adaptive entropy bonus, as large as needed to keep the entropy at the target.

    The coefficient starts at `objective.entropy_coef`. Each iteration it increases by `step` if the
    entropy of the rollout is below the target and decreases by `step` otherwise; the bonus is
    applied only while the entropy is not above the target.

    Args:
        target: smallest mean entropy of a token (nats).
        step: change of the coefficient per iteration.
        max_coef: upper bound of the coefficient.

    Example:
        >>> EntropyTarget(target=0.5).next(coefficient=0.01, entropy=0.4)
        0.015

    Source: Skywork-OR1, arXiv:2505.22312, section 4.
    """

    target: float
    step: float = 0.005
    max_coef: float = 0.1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("target", "step", "max_coef"):
            above(f"model.controllers.entropy.{name}", getattr(self, name), 0)

    def next(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient after an iteration with this entropy."""
        step = self.step if entropy < self.target else -self.step
        return min(max(coefficient + step, 0.0), self.max_coef)


@check_field_types
@dataclass(frozen=True)
class KLTarget:
    """Adaptive KL coefficient that keeps the KL to the reference near the target.

    The coefficient starts at `objective.kl_coef` and is multiplied after each iteration by
    1 + rate * clip(KL / target - 1, -0.2, 0.2).

    Args:
        target: mean KL of a token, by the objective's estimator (nats).
        rate: of the change.

    Example:
        >>> KLTarget(target=0.1).next(coefficient=1.0, kl=0.2)
        1.02

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    target: float
    rate: float = 0.1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("target", "rate"):
            above(f"model.controllers.kl.{name}", getattr(self, name), 0)

    def next(self, coefficient: float, kl: float) -> float:
        """Return the coefficient after an iteration with this KL."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.rate * error)


@check_field_types
@dataclass(frozen=True)
class ReferenceSync:
    """Move the reference towards the policy: ref <- alpha * policy + (1 - alpha) * ref.

    Args:
        every: iterations between updates (TRL: ref_model_sync_steps).
        mixup_alpha: fraction of the policy; 1 copies it (TRL: ref_model_mixup_alpha).

    Example:
        >>> ReferenceSync(every=64)
        ReferenceSync(every=64, mixup_alpha=0.6)

    Source: TR-DPO, arXiv:2404.09656, with its default values.
    """

    every: int = 512
    mixup_alpha: float = 0.6

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("every", "mixup_alpha"):
            above(f"model.controllers.reference.{name}", getattr(self, name), 0)
        at_most("model.controllers.reference.mixup_alpha", self.mixup_alpha, 1)


@check_field_types
@dataclass(frozen=True)
class Controllers:
    """Coefficients that adapt during training; by default none does. Their state is checkpointed.

    Args:
        entropy: adapts the coefficient of the entropy bonus.
        kl: adapts the coefficient of the KL term.
        reference: moves the reference towards the policy.

    Example:
        >>> Controllers(kl=KLTarget(target=0.05)).kl.target
        0.05
    """

    entropy: EntropyTarget | None = None
    kl: KLTarget | None = None
    reference: ReferenceSync | None = None


class FixedCoefficients:
    """Holds the objective, with the coefficients of the config.

    Args:
        objective: of the run; `AdaptiveCoefficients` replaces it during training.
    """

    moves_reference = False

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def update_entropy_coef(self, rollout: Rollout, comm: Comm) -> None:
        """Called with each rollout, before it is trained on."""

    def update(
        self, stats: Stats, iteration: int, policy: Policy, reference: Reference | None
    ) -> None:
        """Called after each iteration, with its averages and the number of finished iterations."""

    def stats(self) -> Stats:
        """Return the coefficients of this iteration, for logging."""
        if not self.objective.kl_coef > 0:
            return {}
        return {"policy/kl_coef": torch.tensor(self.objective.kl_coef)}

    def state_dict(self) -> dict[str, float]:
        """Return the coefficients for a checkpoint."""
        return {"entropy_coef": self.objective.entropy_coef, "kl_coef": self.objective.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the config's coefficients: nothing adapts them."""


class AdaptiveCoefficients(FixedCoefficients):
    """The objective with coefficients that controllers adapt.

    Args:
        controllers: adapt the coefficients.
        objective: has their initial values.

    Raises:
        ValueError: a controller needs a KL term, and the objective has none.
    """

    def __init__(self, controllers: Controllers, objective: Objective) -> None:
        super().__init__(objective)
        if (controllers.kl or controllers.reference) and not objective.kl_coef > 0:
            raise ValueError(
                "model.controllers.kl and model.controllers.reference need a reference, but "
                "model.objective.kl_coef is 0. Set it above 0, or remove them."
            )
        self.controllers = controllers
        self.moves_reference = controllers.reference is not None
        # The objective has 0 in iterations without the bonus; this is the coefficient with it.
        self.entropy_coef = objective.entropy_coef
        self.sampled_entropy = 0.0
        # An iteration may be dropped half-way by a signal: checkpoints hold the last finished one.
        self._after_last_iteration = self._coefficients()

    def _coefficients(self) -> dict[str, float]:
        return {"entropy_coef": self.entropy_coef, "kl_coef": self.objective.kl_coef}

    def update_entropy_coef(self, rollout: Rollout, comm: Comm) -> None:
        """Set the entropy bonus from the entropy at sampling, if it has a target.

        The entropy is the mean of -log p of the sampled tokens over all ranks: an unbiased estimate
        that costs nothing.
        """
        target = self.controllers.entropy
        if target is None:
            return
        # Log-probabilities are 0 for all but generated tokens.
        surprise = torch.stack([-rollout.sampler_logprobs.sum().double(), rollout.lengths.sum()])
        total, count = comm.sum(surprise).tolist()
        if not count:  # an iteration without a sampled token changes nothing
            return
        self.sampled_entropy = total / count
        self.entropy_coef = target.next(self.entropy_coef, self.sampled_entropy)
        above_target = self.sampled_entropy > target.target
        coefficient = 0.0 if above_target else self.entropy_coef
        self.objective = replace(self.objective, entropy_coef=coefficient)

    def update(
        self, stats: Stats, iteration: int, policy: Policy, reference: Reference | None
    ) -> None:
        """Set the KL coefficient of the next iteration, and move the reference if it is due."""
        # "policy/kl" is missing if every step was skipped.
        if self.controllers.kl is not None and "policy/kl" in stats:
            kl_coef = self.controllers.kl.next(self.objective.kl_coef, float(stats["policy/kl"]))
            self.objective = replace(self.objective, kl_coef=kl_coef)
        self._after_last_iteration = self._coefficients()
        sync = self.controllers.reference
        if sync is not None and iteration % sync.every == 0:
            assert isinstance(reference, FrozenReference)
            reference.mix_in(policy, sync.mixup_alpha)

    def stats(self) -> Stats:
        """Return the coefficients of this iteration, for logging."""
        stats = super().stats()
        if self.controllers.entropy is not None:
            stats["policy/entropy_coef"] = torch.tensor(self.objective.entropy_coef)
        return stats

    def state_dict(self) -> dict[str, float]:
        """Return the coefficients after the last finished iteration."""
        return self._after_last_iteration

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore adaptive coefficients; fixed ones are the config's."""
        if self.controllers.entropy is not None:
            self.entropy_coef = state["entropy_coef"]
        if self.controllers.kl is not None:
            self.objective = replace(self.objective, kl_coef=state["kl_coef"])
        self._after_last_iteration = self._coefficients()
