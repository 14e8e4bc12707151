"""Coefficients of the objective that adapt during training, and a reference that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from litgrpo.algorithms.objective import Objective
from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import above, at_most, require
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.learning.learner import Learner
from litgrpo.learning.stages import Stage
from litgrpo.rollout.servers.reference import ReferenceServers
from litgrpo.rollout.sources.data_completions import DataCompletions
from litgrpo.types import Experience


class EntropyTarget(Stage, Callback):
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

    @check_argument_types()
    def __init__(self, target: float, step: float = 0.005, max_coef: float = 0.1) -> None:
        above("EntropyTarget.target", target, 0)
        above("EntropyTarget.step", step, 0)
        above("EntropyTarget.max_coef", max_coef, 0)
        self.target, self.step, self.max_coef = target, step, max_coef
        # Checkpoints hold the coefficient of the last finished iteration: the current one may be
        # dropped half-way by a signal.
        self.coefficient: float | None = None
        self.current_coefficient = 0.0
        self.learner: Learner

    def next(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient in an iteration whose rollout has this entropy."""
        step = self.step if entropy < self.target else -self.step
        return min(max(coefficient + step, 0.0), self.max_coef)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        _check_module(self, pl_module)
        require(
            not isinstance(pl_module.source, DataCompletions),
            "EntropyTarget measures the entropy of sampled completions, but model.source is "
            "DataCompletions. Leave out the callback, or the source.",
        )
        objective = pl_module.objective
        with_bonus = replace(objective, entropy_coef=1.0)
        uncorrected = {*with_bonus.find_uncorrected()} - {*objective.find_uncorrected()}
        if objective.corrects_sampler and uncorrected:  # the module's own message has no bonus
            rank_zero_info("EntropyTarget: the entropy bonus is not corrected for the sampler.")

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.learner = pl_module.learner
        if self.coefficient is None:
            self.coefficient = pl_module.objective.entropy_coef
        # The start-up checks run before the first rollout: they include the bonus.
        self._set_coefficient(self.next(self.coefficient, 0.0))

    def __call__(self, experience: Experience, iteration: int) -> Experience:
        # The mean of -log p of the sampled tokens is an unbiased estimate that costs nothing.
        assert self.coefficient is not None
        self.current_coefficient = self.coefficient
        rollout = experience.rollout
        # Log-probabilities are 0 for all but generated tokens.
        surprise = torch.stack([-rollout.sampler_logprobs.sum().double(), rollout.lengths.sum()])
        total, count = self.learner.comm.sum(surprise).tolist()
        coefficient = self.coefficient
        if count:  # an iteration without a sampled token changes nothing
            entropy = total / count
            self.current_coefficient = self.next(self.coefficient, entropy)
            coefficient = 0.0 if entropy > self.target else self.current_coefficient
        self._set_coefficient(coefficient)
        stats = experience.stats | {"policy/entropy_coef": torch.tensor(coefficient)}
        return replace(experience, stats=stats)

    def _set_coefficient(self, coefficient: float) -> None:
        self.learner.objective = replace(self.learner.objective, entropy_coef=coefficient)

    def on_train_batch_end(self, *_: Any) -> None:
        self.coefficient = self.current_coefficient

    def state_dict(self) -> dict[str, float | None]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state_dict: dict[str, float | None]) -> None:
        self.coefficient = state_dict["coefficient"]


class KLTarget(Callback):
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

    @check_argument_types()
    def __init__(self, target: float, rate: float = 0.1) -> None:
        above("KLTarget.target", target, 0)
        above("KLTarget.rate", rate, 0)
        self.target, self.rate = target, rate
        self.coefficient: float | None = None

    def next(self, coefficient: float, kl: float) -> float:
        """Return the coefficient after an iteration with this KL."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.rate * error)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        _check_module(self, pl_module)
        _check_kl_term(self, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.coefficient is None:
            self.coefficient = pl_module.objective.kl_coef
        self._set_coefficient(pl_module.learner, self.coefficient)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        averages = outputs["iteration"].averages
        if "policy/kl" not in averages:  # every optimizer step was skipped
            return
        assert self.coefficient is not None
        coefficient = self.next(self.coefficient, float(averages["policy/kl"]))
        self._set_coefficient(pl_module.learner, coefficient)

    def _set_coefficient(self, learner: Learner, coefficient: float) -> None:
        self.coefficient = coefficient
        learner.objective = replace(learner.objective, kl_coef=coefficient)

    def state_dict(self) -> dict[str, float | None]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state_dict: dict[str, float | None]) -> None:
        self.coefficient = state_dict["coefficient"]


class ReferenceSync(Callback):
    """Move the reference towards the policy: ref <- alpha * policy + (1 - alpha) * ref.

    Checkpoints hold the weights of a reference that moves.

    Args:
        every: iterations between updates (TRL: ref_model_sync_steps).
        mixup_alpha: fraction of the policy; 1 copies it (TRL: ref_model_mixup_alpha).

    Example:
        `Trainer(callbacks=[ReferenceSync(every=64)])`

    Source: TR-DPO, arXiv:2404.09656, with its default values.
    """

    @check_argument_types()
    def __init__(self, every: int = 512, mixup_alpha: float = 0.6) -> None:
        above("ReferenceSync.every", every, 0)
        above("ReferenceSync.mixup_alpha", mixup_alpha, 0)
        at_most("ReferenceSync.mixup_alpha", mixup_alpha, 1)
        self.every, self.mixup_alpha = every, mixup_alpha

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        _check_module(self, pl_module)
        _check_kl_term(self, pl_module)
        require(
            not isinstance(pl_module.reference_path, ReferenceServers),
            "ReferenceSync moves the weights of the reference, but model.reference is a vLLM "
            "server, whose weights stay as they are. Leave out the callback, or load the reference "
            "from a folder or Hub id.",
        )
        pl_module.moves_reference = True

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.reference.check_can_mix(pl_module.policy)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.iteration % self.every == 0:
            pl_module.reference.mix_in(pl_module.policy, self.mixup_alpha)


def _check_module(callback: Callback, module: LightningModule) -> None:
    name = type(callback).__name__
    require(
        isinstance(getattr(module, "objective", None), Objective),
        f"{name} adapts the objective of GRPO, and {type(module).__name__} has none. Leave out the "
        "callback.",
    )


def _check_kl_term(callback: Callback, module: Any) -> None:
    require(
        module.objective.kl_coef > 0,
        f"{type(callback).__name__} needs a reference, but model.objective.kl_coef is 0. Set it "
        "above 0, or leave out the callback.",
    )
