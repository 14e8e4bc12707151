"""What moves while training goes on: the entropy and KL coefficients, the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

from litgrpo.algorithm.objective import Objective


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
        _positive("controllers.entropy", target=self.target, step=self.step, largest=self.largest)

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
        _positive("controllers.kl", target=self.target, rate=self.rate)

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
        _positive("controllers.reference", every=self.every, share=self.share)
        if self.share > 1:
            raise ValueError(f"controllers.reference.share is {self.share}; it must be at most 1.")


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
        if not objective.needs_reference and (self.kl or self.reference):
            raise ValueError(
                "controllers.kl and controllers.reference need a reference, but objective.kl_coef "
                "is 0. Give it a value above 0, or leave them out."
            )


class Steering:
    """The coefficients that controllers move.

    Args:
        controllers: move them.
        objective: has them at the start.
    """

    def __init__(self, controllers: Controllers, objective: Objective) -> None:
        """Start where the recipe does."""
        self.controllers = controllers
        self.entropy_coef, self.kl_coef = objective.entropy_coef, objective.kl_coef

    def by_entropy(self, objective: Objective, entropy: float) -> Objective:
        """The objective of an iteration whose rollout has this mean entropy of a token (nats)."""
        target = self.controllers.entropy
        if target is None:
            return objective
        self.entropy_coef = target.next(self.entropy_coef, entropy)
        return replace(
            objective, entropy_coef=self.entropy_coef if entropy <= target.target else 0.0
        )

    def by_kl(self, objective: Objective, kl: float) -> Objective:
        """The objective after an iteration with this mean KL of a token (nats)."""
        if self.controllers.kl is None:
            return objective
        self.kl_coef = self.controllers.kl.next(self.kl_coef, kl)
        return replace(objective, kl_coef=self.kl_coef)

    def state_dict(self) -> dict[str, float]:
        """The coefficients."""
        return {"entropy_coef": self.entropy_coef, "kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, float], objective: Objective) -> Objective:
        """Go on with saved coefficients; one that nothing steers is the recipe's."""
        if self.controllers.entropy is not None:
            self.entropy_coef = state["entropy_coef"]
        if self.controllers.kl is not None:
            self.kl_coef = state["kl_coef"]
        return replace(objective, kl_coef=self.kl_coef)


def _positive(group: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{group}.{name} is {value}; it must be above 0.")
