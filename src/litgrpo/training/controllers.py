"""What moves while training goes on: the entropy and KL coefficients, the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from litgrpo.algorithms.losses import Objective
from litgrpo.arguments import above, at_most, require
from litgrpo.distributed.comm import Comm
from litgrpo.models.policy import Policy
from litgrpo.models.reference import FrozenReference, Reference
from litgrpo.training.learner import Coefficients
from litgrpo.types import Rollout, Stats


@dataclass(frozen=True)
class EntropyTarget:
    """An entropy bonus that is only as large as it must be to keep the entropy up.

    Its coefficient starts at `objective.entropy_coef`. Each iteration it grows by `step` where the
    entropy of the rollout is below the target, shrinks by as much elsewhere, and counts only where
    the entropy is not above the target.

    Args:
        target: least mean entropy of a token (nats).
        step: change of the coefficient per iteration.
        largest: bound of the coefficient.

    Source: Skywork-OR1, arXiv:2505.22312, section 4.
    """

    target: float
    step: float = 0.005
    largest: float = 0.1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("target", "step", "largest"):
            above(f"controllers.entropy.{name}", getattr(self, name), 0)

    def next(self, coefficient: float, entropy: float) -> float:
        """The coefficient after an iteration with this entropy."""
        step = self.step if entropy < self.target else -self.step
        return min(max(coefficient + step, 0.0), self.largest)


@dataclass(frozen=True)
class KLTarget:
    """A KL coefficient that keeps the policy about so far from its reference.

    It starts at `objective.kl_coef` and is multiplied after each iteration by
    1 + rate * (KL / target - 1), the bracket within -0.2 and 0.2.

    Args:
        target: mean KL of a token, by the objective's estimator (nats).
        rate: of the change.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    target: float
    rate: float = 0.1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("target", "rate"):
            above(f"controllers.kl.{name}", getattr(self, name), 0)

    def next(self, coefficient: float, kl: float) -> float:
        """The coefficient after an iteration with this KL."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.rate * error)


@dataclass(frozen=True)
class ReferenceSync:
    """A reference that follows the policy: ref <- share * policy + (1 - share) * ref.

    Args:
        every: iterations from one to the next.
        share: of the policy; 1 copies it.

    Source: TR-DPO, arXiv:2404.09656, whose values are these.
    """

    every: int = 512
    share: float = 0.6

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("every", "share"):
            above(f"controllers.reference.{name}", getattr(self, name), 0)
        at_most("controllers.reference.share", self.share, 1)


@dataclass(frozen=True)
class Controllers:
    """What moves while training goes on; nothing, unless asked for. All is in the checkpoint.

    Args:
        entropy: steers the coefficient of the entropy bonus.
        kl: steers the coefficient of the KL term.
        reference: lets the reference follow the policy.
    """

    entropy: EntropyTarget | None = None
    kl: KLTarget | None = None
    reference: ReferenceSync | None = None

    def check(self, objective: Objective) -> None:
        """Refuse to steer what the objective does not have.

        Raises:
            ValueError: there is no KL term.
        """
        require(
            objective.needs_reference or not (self.kl or self.reference),
            "controllers.kl and controllers.reference need a reference, but objective.kl_coef "
            "is 0. Give it a value above 0, or leave them out.",
        )


class SteeredCoefficients(Coefficients):
    """The objective with the coefficients that controllers move.

    Args:
        controllers: move them.
        objective: has them at the start.
    """

    def __init__(self, controllers: Controllers, objective: Objective) -> None:
        super().__init__(objective)
        controllers.check(objective)
        self.controllers = controllers
        self.moves_reference = controllers.reference is not None
        # The bonus counts in some iterations only; this is its coefficient where it does.
        self.entropy_coef = objective.entropy_coef
        self.sampled_entropy = 0.0
        self._finished = self._now()

    def _now(self) -> dict[str, float]:
        return {"entropy_coef": self.entropy_coef, "kl_coef": self.objective.kl_coef}

    def follow_entropy(self, rollout: Rollout, comm: Comm) -> None:
        """Set the entropy bonus by the entropy at sampling, where it has a target.

        That is the mean of -log p of the sampled tokens over all processes: unbiased, free.
        """
        target = self.controllers.entropy
        if target is None:
            return
        # Log-probabilities are 0 off the tokens of the policy.
        surprise = torch.stack([-rollout.sampler_logprobs.sum().double(), rollout.lengths.sum()])
        total, count = comm.sum(surprise).tolist()
        self.sampled_entropy = total / count
        self.entropy_coef = target.next(self.entropy_coef, self.sampled_entropy)
        above = self.sampled_entropy > target.target
        self.objective = replace(self.objective, entropy_coef=0.0 if above else self.entropy_coef)

    def follow(
        self, stats: Stats, iteration: int, policy: Policy, reference: Reference | None
    ) -> None:
        """Set the KL coefficient for the next iteration, and let the reference follow the policy.

        From here on a checkpoint holds these coefficients.
        """
        self.follow_kl(stats)
        self._finished = self._now()
        sync = self.controllers.reference
        if sync is not None and iteration % sync.every == 0:
            assert isinstance(reference, FrozenReference)
            reference.mix_in(policy, sync.share)

    def follow_kl(self, stats: Stats) -> None:
        """Set the KL coefficient by the mean KL of a token (nats), where it has a target."""
        # Where every step was skipped there is no KL.
        if self.controllers.kl is not None and "policy/kl" in stats:
            kl_coef = self.controllers.kl.next(self.objective.kl_coef, float(stats["policy/kl"]))
            self.objective = replace(self.objective, kl_coef=kl_coef)

    def stats(self) -> Stats:
        """The coefficients of this iteration, to log."""
        stats = super().stats()
        if self.controllers.entropy is not None:
            stats["policy/entropy_coef"] = torch.tensor(self.objective.entropy_coef)
        return stats

    def state_dict(self) -> dict[str, float]:
        """The coefficients at the end of the last iteration: one may be dropped on its way."""
        return self._finished

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with saved coefficients; one that nothing steers is the recipe's."""
        if self.controllers.entropy is not None:
            self.entropy_coef = state["entropy_coef"]
        if self.controllers.kl is not None:
            self.objective = replace(self.objective, kl_coef=state["kl_coef"])
        self._finished = self._now()


def coefficients_of(controllers: Controllers, objective: Objective) -> Coefficients:
    """The objective, with what moves its coefficients where anything does."""
    steered = any(vars(controllers).values())
    return SteeredCoefficients(controllers, objective) if steered else Coefficients(objective)
