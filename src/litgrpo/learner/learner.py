"""How a rollout becomes optimizer steps: what to learn from it, and the exact gradient of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from litgrpo.algorithm.objective import Objective, Whole
from litgrpo.learner.config import UpdateConfig
from litgrpo.learner.guarding import drop_gradient, halved, offending
from litgrpo.learner.metrics import Totals
from litgrpo.learner.micro_batches import (
    check_centered,
    micro_batches,
    mini_batches,
    rows_that_teach,
    scored,
)
from litgrpo.learner.static_batches import Rows, Unread, check_fits, check_repeats, whole_rows
from litgrpo.models.loading import Precision
from litgrpo.modules.answering import AnsweringModule
from litgrpo.parallel.device import free_memory, is_out_of_memory, mark_step, number_to
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import (
    Experience,
    LossOutput,
    ReportsSteps,
    RewardTable,
    Rollout,
    Skipped,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from litgrpo.models.reference import Reference

# The sampler's log-probabilities are the learning step's only where both compute in full precision.
EXACT_DTYPES = ("float32", "float64")
Result = TypeVar("Result")


class LearningModule(AnsweringModule, ReportsSteps):
    """Turns rewarded completions into optimizer steps.

    Args:
        objective: what is maximized.
        group_size: completions of each prompt, G.
        sampling: how the completions were sampled.
        learning: how the optimizer uses one rollout.
        precision: of the weights.
        answering: arguments of `AnsweringModule`.
    """

    def __init__(
        self,
        *,
        objective: Objective,
        group_size: int,
        sampling: Sampling,
        learning: UpdateConfig,
        precision: Precision,
        **answering: Any,
    ) -> None:
        """Hold the settings; the reference comes with `configure_model`."""
        super().__init__(**answering)
        self.automatic_optimization = False
        self.objective = objective
        self.group_size = group_size
        self.sampling = sampling
        self.learning = learning
        self.precision = precision
        self.reference: Reference | None = None
        self.grad_norm = torch.zeros(())
        self.steps: list[Skipped | None] = []
        self._finite = torch.ones((), dtype=torch.bool)  # every loss of the step at hand
        self._at_once = 0  # rows of the newest pass through the model
        self._unread = Unread()
        self._learned = Totals()  # of the step at hand

    def setup(self, stage: str) -> None:
        """Refuse, too, what the device cannot compute in fixed shapes.

        Raises:
            ValueError: see `check_fits` and `check_repeats`.
        """
        check_repeats(self.precision, self.trainer.strategy.root_device)
        check_fits(self.engine, self.objective, self.trainer.strategy.root_device)
        super().setup(stage)

    def collect(
        self, rollout: Rollout, rewards: RewardTable, unjudged: Experience | None = None
    ) -> Experience:
        """Everything that the optimizer steps of this iteration need.

        Args:
            rollout: N completions.
            rewards: [B, G] their rewards.
            unjudged: see there, if it is known already.

        Returns:
            Experience of all N rows.
        """
        unjudged = self.unjudged(rollout) if unjudged is None else unjudged
        mask = rollout.completion_mask
        weights = torch.zeros_like(rollout.sampler_logprobs)
        for rows in mini_batches(len(mask), self.group_size, self.learning.num_mini_batches):
            weights[rows] = self.objective.token_weights(
                mask[rows], rollout.truncated[rows], self.max_completion_len, self._sum
            )
        advantages = self.objective.token_advantages(rewards, mask, self._sum)
        check_centered(advantages[:, 0].view(rewards.total.shape), self.objective)
        return replace(unjudged, advantages=advantages, weights=weights)

    def unjudged(self, rollout: Rollout) -> Experience:
        """What of an experience does not depend on rewards; advantages and weights are 0.

        That includes the log-probabilities of the reference and of the policy before the update.

        Args:
            rollout: N completions.

        Returns:
            Experience of all N rows.
        """
        mask, zero = rollout.completion_mask, torch.zeros_like(rollout.sampler_logprobs)
        experience = Experience(
            prompt_ids=rollout.prompts.prompt_ids,
            prompt_mask=rollout.prompts.prompt_mask,
            prompt_of=torch.arange(len(mask), device=mask.device) // rollout.group_size,
            completion_ids=rollout.completion_ids,
            completion_mask=mask,
            sampler_logprobs=rollout.sampler_logprobs,
            advantages=zero,
            weights=zero,
            support=rollout.support,
        )
        return self._within_memory(
            lambda: replace(
                experience,
                old_logprobs=self._old_logprobs(experience),
                ref_logprobs=self._ref_logprobs(experience),
            )
        )

    def update(self, experience: Experience) -> Totals:
        """All optimizer steps of this iteration.

        Args:
            experience: N rows.

        Returns:
            Sums and counts over everything that was learned from.
        """
        assert self.policy is not None
        self.policy.train()
        self.steps = []
        totals = Totals()
        steps = mini_batches(len(experience), self.group_size, self.learning.num_mini_batches)
        for _ in range(self.learning.inner_epochs):
            for rows in steps:
                reasons = self._optimizer_step(self._rows(experience, rows), totals)
                if reasons is not None:
                    reasons = {int(rows[row]): reason for row, reason in reasons.items()}
                self.steps.append(None if reasons is None else Skipped(reasons))
        return totals

    def _optimizer_step(self, experience: Experience, totals: Totals) -> dict[int, str] | None:
        """One step on the exact gradient of these rows; none if a number in it is not finite.

        Args:
            experience: M rows.
            totals: gets what was learned from, and the size of the gradient.

        Returns:
            None, or what was wrong with which row.
        """
        optimizer: Any = self.optimizers()
        self._within_memory(lambda: self._add_up_gradients(experience, optimizer))
        learning_rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()
        totals.add_value("optim/lr", torch.as_tensor(learning_rate, device=self.counts_on))
        if not self._finite:
            return offending(self, experience)
        totals.add(self._learned.sums)
        totals.add_value("optim/grad_norm", self.grad_norm)
        return None

    def _add_up_gradients(self, experience: Experience, optimizer: Any) -> None:
        """The gradient of these rows, micro-batch by micro-batch."""
        optimizer.zero_grad()
        self._learned, self._unread = Totals(), Unread()
        known = experience.sampler_logprobs.isfinite() & experience.advantages.isfinite()
        self._finite = known.all()
        loss = torch.zeros((), device=self.counts_on)
        for output, is_last in self.losses(experience, self.learning):
            with optimizer.toggle_model(sync_grad=is_last):
                # Gradients are averaged over processes, but the weights count all of them.
                self.manual_backward(output.loss * self.trainer.world_size)
            if self.fixed_on is not None:
                self._unread.add(output)
                mark_step(self.fixed_on)
                continue
            self._learned.add(output.stats)
            loss += output.loss.detach()
        if self.fixed_on is None:
            self._count(loss)

    def _count(self, loss: Tensor) -> None:
        """Take down the loss of the step at hand, which is this process's share of it."""
        self._finite = self._finite & loss.isfinite()
        self._learned.add_value("policy/loss", loss * self.trainer.world_size)

    def _within_memory(self, attempt: Callable[[], Result]) -> Result:
        """The result of an attempt, repeated with half the rows at once while memory is short.

        The gradient stays the same, up to rounding. Processes cannot repeat a step alone: the
        others wait in the middle of theirs.
        """
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.trainer.world_size > 1:
                    raise
                instead = "shorten completions, or set model.precision.gradient_checkpointing"
                rows = halved(self._at_once, error, "learning", instead)
            self.lower({"micro_batch_size": rows})
            free_memory()
            rank_zero_warn(
                f"out of memory in learning: micro_batch_size is {rows} from now on "
                "(the gradient is the same)"
            )

    def lower(self, limits: dict[str, int]) -> None:
        """Take on lower limits on rows at once; a resumed run needs them, too: they round sums."""
        self.lowered |= limits
        if "micro_batch_size" in limits:
            self.learning = replace(self.learning, micro_batch_size=limits["micro_batch_size"])
        if "max_rows" in limits and isinstance(self.engine, LocalEngine):
            self.engine = replace(self.engine, max_rows=limits["max_rows"])

    def losses(
        self, experience: Experience, learning: UpdateConfig
    ) -> Iterator[tuple[LossOutput, bool]]:
        """What each micro-batch of one optimizer step adds to its loss, and whether it is the last.

        Args:
            experience: M rows that share the step.
            learning: the limits of a micro-batch.
        """
        whole = self._whole(experience)
        if self.fixed_on is not None:
            rows = Rows(experience, learning, self.fixed_on)
            everything = self.objective.needs_all_rows
            teaching = torch.arange(len(experience)) if everything else rows_that_teach(experience)
            buckets = rows.split(teaching)
            micro_of: Callable[[Tensor], Experience] = rows.micro
        else:
            if not self.objective.needs_all_rows:
                experience = experience.select(rows_that_teach(experience))
            buckets = micro_batches(experience, learning, shared=self._shared)
            micro_of = experience.select
        for number, chosen in enumerate(buckets, start=1):
            micro = micro_of(chosen)
            new = self._logprobs(micro)
            output = self.objective.loss(new, micro, whole)
            if self.engine.lower_precision is not None:
                output.stats["policy/sampler_gap"] = _sampler_gap(new, micro)
            yield output, number == len(buckets)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip here: gradients are unscaled and reduced over processes by now."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        limit = self.learning.max_grad_norm
        limit = float("inf") if limit is None else limit
        self.grad_norm = torch.nn.utils.clip_grad_norm_(trained, limit)
        if self.fixed_on is not None:
            mark_step(self.fixed_on)
            loss, (self.grad_norm,) = self._unread.read(self._learned, self.grad_norm)
            self._count(loss)
        self._finite = self._sum((~(self._finite & self.grad_norm.isfinite())).float()) == 0
        if not self._finite:
            drop_gradient(trained)

    # --- parts of an iteration ---

    def _rows(self, experience: Experience, rows: Tensor) -> Experience:
        """Some of the rows: without useless columns, unless shapes are fixed."""
        return experience.select(rows) if self.fixed_on is None else whole_rows(experience, rows)

    @property
    def _shared(self) -> bool:
        return self.policy is not None and self.policy.shares_prompts

    def _logprobs(self, rows: Experience) -> TokenLogprobs:
        """The policy's view of these rows, with gradient."""
        assert self.policy is not None
        self._at_once = len(rows)
        with self._arithmetic():
            return self.policy.logprobs(
                *rows.tokens,
                support=rows.support,
                temperature=self.sampling.policy_temperature,
                entropy_grad=self.objective.entropy_coef != 0,
            )

    def _old_logprobs(self, experience: Experience) -> Tensor | None:
        """Log-probabilities before the update: none on-policy, the sampler's if exact."""
        if self.learning.num_steps == 1:
            return None
        full = self.trainer.precision == "32-true" and self.precision.dtype in EXACT_DTYPES
        full = full and self.engine.lower_precision is None and self.precision.compute is None
        if full and not self.sampling.greedy:
            return experience.sampler_logprobs
        return self._scored(experience).logprobs

    def _scored(self, experience: Experience) -> TokenLogprobs:
        """The policy's view of all rows, without gradient."""
        return scored(
            experience, self.learning, self._logprobs, shared=self._shared, device=self.fixed_on
        )

    def _ref_logprobs(self, experience: Experience) -> Tensor | None:
        """Log-probabilities under the reference, if there is one."""
        reference = self.reference
        if reference is None:
            return None
        temperature = self.sampling.policy_temperature

        def logprobs_of(rows: Experience) -> TokenLogprobs:
            self._at_once = len(rows)
            with self._arithmetic():
                return reference.logprobs(
                    *rows.tokens, support=rows.support, temperature=temperature
                )

        shared = reference.shares_prompts
        found = scored(experience, self.learning, logprobs_of, shared=shared, device=self.fixed_on)
        return found.logprobs

    def _whole(self, experience: Experience) -> Whole:
        """What all micro-batches of one optimizer step must agree on."""
        entropy = experience.sampler_logprobs  # looked at only if the objective needs it
        if self.objective.needs_entropy:
            entropy = self._scored(experience).entropy
        whole = self.objective.whole(experience.weights, entropy, self._sum, self._gathered)
        if self.fixed_on is None:
            return whole
        threshold = whole.entropy_threshold
        return Whole(
            number_to(whole.num_tokens, self.fixed_on),
            None if threshold is None else number_to(threshold, self.fixed_on),
        )

    def _sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.trainer.world_size == 1:
            return value
        return self.trainer.strategy.reduce(value.to(self.device), reduce_op="sum").to(value.device)

    def _gathered(self, values: Tensor) -> Tensor:
        """A flat tensor of every process, one after another, filled up with NaN."""
        if self.trainer.world_size == 1:
            return values
        gather: Any = self.all_gather
        longest = int(gather(torch.tensor(len(values), device=self.device)).max())
        return gather(
            torch.nn.functional.pad(values, (0, longest - len(values)), value=torch.nan)
        ).flatten()


def _sampler_gap(new: TokenLogprobs, rows: Experience) -> Tensor:
    """[2] sum and count of the distance (nats) of the sampler from the policy before the update."""
    before = new.logprobs.detach() if rows.old_logprobs is None else rows.old_logprobs
    gap = (before - rows.sampler_logprobs).abs() * rows.completion_mask
    return torch.stack([gap.sum(), rows.completion_mask.sum()])
