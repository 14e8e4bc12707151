"""How a rollout becomes optimizer steps: what to learn from it, and the exact gradient of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from litgrpo.algorithms.losses import Normalizers, Objective
from litgrpo.algorithms.turns import Turns
from litgrpo.distributed.agreement import on_all
from litgrpo.distributed.comm import Comm, SingleProcess
from litgrpo.distributed.device import Clock, timed, with_halving
from litgrpo.models.policy import Policy
from litgrpo.models.reference import Reference
from litgrpo.rollout.sampling import Sampling
from litgrpo.tensors import whole
from litgrpo.training.micro_batches import (
    Limits,
    MicroBatching,
    Ragged,
    StepSums,
    Totals,
    check_centered,
    mini_batches,
    rows_with_gradient,
)
from litgrpo.training.skipped_steps import OfRow, not_finite
from litgrpo.training.stepper import Stepper
from litgrpo.training.update_config import UpdateConfig
from litgrpo.types import (
    LossOutput,
    RewardTable,
    Rollout,
    RolloutLogprobs,
    Stats,
    StepReport,
    TokenLogprobs,
    TokenRows,
    TrainingBatch,
)

Result = TypeVar("Result")
MISMATCH = "policy/sampler_mismatch"
# Names that end so are extremes, over processes too; everything else is averaged.
SMALLEST, LARGEST = ("_min", "/min"), ("_max", "/max")
# Shares of which an iteration's optimizer steps have extremes, too.
CLIPPED = {"policy/clip_low_frac", "policy/clip_high_frac"}


class Coefficients:
    """The objective, whose coefficients stay as they are; controllers may move them.

    Args:
        objective: what is maximized.
    """

    moves_reference = False

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def follow_entropy(self, rollout: Rollout, comm: Comm) -> None:
        """Called with each rollout, before it is learned from."""

    def follow(
        self, stats: Stats, iteration: int, policy: Policy, reference: Reference | None
    ) -> None:
        """Called after each iteration, with its averages and how many are finished."""

    def stats(self) -> Stats:
        """The coefficients of this iteration, to log."""
        kl_coef = {"policy/kl_coef": torch.tensor(self.objective.kl_coef)}
        return kl_coef if self.objective.needs_reference else {}

    def state_dict(self) -> dict[str, float]:
        """The coefficients that a checkpoint holds."""
        return {"entropy_coef": self.objective.entropy_coef, "kl_coef": self.objective.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing steers them, so they are the recipe's."""


@dataclass
class Learner:
    """Turns rewarded completions into optimizer steps.

    Args:
        policy: learns.
        coefficients: the objective, with coefficients that may change.
        config: how the optimizer uses one rollout.
        sampling: how the completions were sampled.
        group_size: completions of each prompt, G.
        max_completion_length: tokens of a completion at most.
        reference: for the KL term; None without one.
        exact_logprobs: whether the engine's log-probabilities are the policy's own, up to rounding.
        reuse_sampler_logprobs: take the sampler's log-probabilities as those before the update;
            right only where both were computed in the same full precision.
        comm: of the processes that learn together.
        micro_batching: ragged micro-batches, or static ones for devices that compile.
        clock: counts the seconds.
        max_rows: rows at once at most, where memory was short; None: as `config` says.
    """

    policy: Policy
    coefficients: Coefficients
    config: UpdateConfig
    sampling: Sampling
    group_size: int
    max_completion_length: int
    reference: Reference | None = None
    exact_logprobs: bool = True
    reuse_sampler_logprobs: bool = True
    comm: Comm = field(default_factory=SingleProcess)
    micro_batching: MicroBatching = field(default_factory=Ragged)
    clock: Clock = field(default_factory=Clock)
    max_rows: int | None = None

    def __post_init__(self) -> None:
        """Refuse a reference that cannot follow the policy where a controller lets it."""
        if self.reference is not None and self.coefficients.moves_reference:
            self.reference.check_can_mix(self.policy)

    @property
    def objective(self) -> Objective:
        """What is maximized in this iteration."""
        return self.coefficients.objective

    @property
    def limits(self) -> Limits:
        """Of one pass of the policy."""
        return self._limits(self.max_rows, self.policy.shares_prompts)

    # --- before the update ---

    @timed("time/reference_s")
    def old_and_reference_logprobs(self, rollout: Rollout) -> RolloutLogprobs:
        """Log-probabilities that the objective compares with.

        Those before the update are needed only where a rollout is used for several optimizer
        steps: in a single step the policy has not moved yet, and its ratio is 1.

        Args:
            rollout: N completions.
        """
        tokens = rollout.tokens

        def attempt(max_rows: int | None) -> RolloutLogprobs:
            return RolloutLogprobs(
                self._old(rollout, max_rows), self.reference_logprobs(tokens, max_rows)
            )

        return self._within_memory(attempt, tokens)

    def _old(self, rollout: Rollout, max_rows: int | None) -> Tensor | None:
        if self.config.num_steps == 1:
            return None
        if self.reuse_sampler_logprobs and self.exact_logprobs and not self.sampling.greedy:
            return rollout.sampler_logprobs
        limits = self._limits(max_rows, self.policy.shares_prompts)
        return self.micro_batching.scored(rollout.tokens, self.logprobs, limits).logprobs

    def reference_logprobs(self, tokens: TokenRows, max_rows: int | None = None) -> Tensor | None:
        """[N, C] log-probabilities under the reference; None without one."""
        if self.reference is None:
            return None
        temperature = self.sampling.policy_temperature
        return self.logprobs_under(self.reference, tokens, temperature, max_rows)

    def logprobs_under(
        self,
        reference: Reference,
        tokens: TokenRows,
        temperature: float,
        max_rows: int | None = None,
    ) -> Tensor:
        """[N, C] log-probabilities under a frozen model, a micro-batch at a time."""

        def logprobs_of(rows: TokenRows) -> TokenLogprobs:
            with self.policy.autocast():
                return reference.logprobs(rows, temperature=temperature)

        limits = self._limits(max_rows, reference.shares_prompts)
        return self.micro_batching.scored(tokens, logprobs_of, limits).logprobs

    @timed("time/learn_s")
    def experience(
        self, rollout: Rollout, rewards: RewardTable, logprobs: RolloutLogprobs
    ) -> TrainingBatch:
        """Everything that the optimizer steps of this iteration need.

        Args:
            rollout: N completions.
            rewards: [B, G] theirs.
            logprobs: of the same rollout.

        Returns:
            TrainingBatch of all N rows.
        """
        mask = rollout.loss_mask
        self.coefficients.follow_entropy(rollout, self.comm)
        weights = torch.zeros_like(rollout.sampler_logprobs)
        for rows in mini_batches(len(mask), self.group_size, self.config.num_mini_batches):
            weights[rows] = self.objective.token_weights(
                mask[rows], rollout.truncated[rows], self.max_completion_length, self.comm
            )
        turns = None if rollout.turns is None else Turns.of(rollout, rewards)
        advantages = self.objective.token_advantages(rewards, mask, self.comm, turns)
        check_centered(of_completions(advantages).view_as(rewards.total), self.objective)
        tokens = rollout.tokens
        return TrainingBatch(
            **vars(tokens) | {"loss_mask": mask},
            sampler_logprobs=rollout.sampler_logprobs,
            advantages=advantages,
            weights=weights,
            old_logprobs=logprobs.old,
            ref_logprobs=logprobs.ref,
        )

    # --- the update ---

    @timed("time/learn_s")
    def update(self, experience: TrainingBatch, stepper: Stepper) -> list[StepReport]:
        """All optimizer steps of this iteration.

        Args:
            experience: N rows.
            stepper: takes the steps.

        Returns:
            What each step did, in order.
        """
        self.policy.train()
        steps = mini_batches(len(experience), self.group_size, self.config.num_mini_batches)
        reports: list[StepReport] = []
        for _ in range(self.config.epochs_per_rollout):
            for rows in steps:
                report = self.step(self.micro_batching.step_rows(experience, rows), stepper)
                if report.skipped:
                    found = {int(rows[row]): reason for row, reason in report.skipped.items()}
                    report = replace(report, skipped=found)
                if reports:  # the policy has moved away from what sampled
                    report.sums.pop(MISMATCH, None)
                reports.append(report)
        return reports

    def step(self, experience: TrainingBatch, stepper: Stepper) -> StepReport:
        """One step on the exact gradient of these rows; none if a number in it is not finite.

        Args:
            experience: M rows.
            stepper: takes the step.
        """
        sums = self._within_memory(
            lambda max_rows: self._add_up_gradients(experience, stepper, max_rows),
            experience.tokens,
        )
        lr = stepper.lr
        stats = stepper.step(lambda trained: self._finish(experience, sums, trained))
        if stats is None:
            return StepReport(
                lr, skipped=not_finite(experience, self._alone(experience), self.policy)
            )
        return StepReport(lr, stats)

    def _add_up_gradients(
        self, experience: TrainingBatch, stepper: Stepper, max_rows: int | None
    ) -> StepSums:
        """The gradient of these rows, micro-batch by micro-batch."""
        stepper.zero_grad()
        sums = self.micro_batching.sums()
        limits = self._limits(max_rows, self.policy.shares_prompts)
        for output, is_last in self.losses(experience, limits):
            # Gradients are averaged over processes, but the weights count the rows of all.
            stepper.backward(output.loss * self.comm.world_size, last=is_last)
            sums.add(output)
        return sums

    def _finish(
        self, experience: TrainingBatch, sums: StepSums, trained: list[Parameter]
    ) -> Stats | None:
        """Clip the gradient; drop it on all processes if a number on any of them is not finite.

        Returns:
            {name: [2] sum and count}, or None where the gradient was dropped.
        """
        limit = self.config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(trained, torch.inf if limit is None else limit)
        stats, loss, norm = sums.read(whole(norm))
        known = experience.sampler_logprobs.isfinite() & experience.advantages.isfinite()
        finite = known.all() & loss.isfinite() & norm.isfinite()
        if self.comm.sum((~finite).float()) != 0:
            # Optimizers pass over a parameter without a gradient: no moment, no decay.
            for parameter in trained:
                parameter.grad = None
            return None
        one = torch.ones_like(loss)
        # A process knows its share of the loss, and shares are averaged over processes when logged.
        share = torch.stack([loss * self.comm.world_size, one])
        return stats | {"policy/loss": share, "optim/grad_norm": torch.stack([norm, one])}

    def _alone(self, experience: TrainingBatch) -> OfRow:
        """Learns from single rows of a step; for the rare one that was skipped."""
        normalizers = self.normalizers(experience)

        def of_row(row: Tensor) -> tuple[TrainingBatch, TokenLogprobs, Tensor]:
            micro, _ = next(self.micro_batching.split(experience, row, self.limits))
            new = self.logprobs(micro.tokens)
            return micro, new, self.objective.loss(new, micro, normalizers).loss

        return of_row

    def losses(
        self, experience: TrainingBatch, limits: Limits
    ) -> Iterator[tuple[LossOutput, bool]]:
        """What each micro-batch of one optimizer step adds to its loss, and whether it is the last.

        Args:
            experience: M rows that share the step.
            limits: of a micro-batch.
        """
        normalizers = self.normalizers(experience)
        rows = None if self.objective.needs_all_rows else rows_with_gradient(experience)
        for micro, is_last in self.micro_batching.split(experience, rows, limits):
            new = self.logprobs(micro.tokens)
            output = self.objective.loss(new, micro, normalizers)
            output.stats[MISMATCH] = _sampler_mismatch(new, micro)
            yield output, is_last

    def normalizers(self, experience: TrainingBatch) -> Normalizers:
        """What all micro-batches of one optimizer step must agree on."""
        entropy = None
        if self.objective.needs_entropy:
            scored = self.micro_batching.scored(experience.tokens, self.logprobs, self.limits)
            entropy = scored.entropy
        normalizers = self.objective.normalizers(experience.weights, entropy, self.comm)
        return self.micro_batching.on_device(normalizers)

    def logprobs(self, tokens: TokenRows) -> TokenLogprobs:
        """The policy's view of these rows, with gradient."""
        with self.policy.autocast():
            return self.policy.logprobs(
                tokens,
                temperature=self.sampling.policy_temperature,
                entropy_grad=self.objective.entropy_coef != 0,
            )

    # --- after the update ---

    def follow(self, stats: Stats, iteration: int) -> None:
        """Let what is steered follow this iteration.

        Args:
            stats: averages of this iteration.
            iteration: number of finished iterations.
        """
        self.coefficients.follow(stats, iteration, self.policy, self.reference)

    # --- memory ---

    def _limits(self, max_rows: int | None, shared: bool) -> Limits:
        asked = (self.config.micro_batch_size, max_rows)
        given = [rows for rows in asked if rows is not None]
        return Limits(min(given, default=None), self.config.max_tokens, shared)

    def _within_memory(self, attempt: Callable[[int | None], Result], tokens: TokenRows) -> Result:
        """The result of an attempt, repeated with half the rows at once while memory is short.

        The gradient stays the same, up to rounding. Processes repeat together.
        """
        if self.comm.world_size > 1:
            attempt = on_all(attempt, self.comm, repeats=type(self.micro_batching) is Ragged)

        def lower(rows: int) -> None:
            self.max_rows = rows

        return with_halving(
            attempt,
            rows=lambda: max(map(len, self.micro_batching.buckets(tokens, self.limits))),
            limit=self.max_rows,
            on_halved=lower,
            what="learning",
            setting="update.micro_batch_size",
            unchanged="the gradient",
            remedy="shorten completions, or set model.precision.gradient_checkpointing",
        )


def _sampler_mismatch(new: TokenLogprobs, rows: TrainingBatch) -> Tensor:
    """[2] sum and count of the distance (nats) of the sampler from the policy."""
    gap = (new.logprobs.detach() - rows.sampler_logprobs).abs()
    return torch.stack([torch.where(rows.loss_mask, gap, 0.0).sum(), rows.loss_mask.sum()])


def averages(seen: Stats, reports: list[StepReport], comm: Comm, device: torch.device) -> Stats:
    """Averages and extremes over processes and optimizer steps of one iteration, to log.

    Args:
        seen: {name: [] number, or [2] sum and count} of this process; all report the same names.
        reports: of its optimizer steps.
        comm: of the processes.
        device: where the numbers are put together.
    """
    totals = Totals()
    extremes = _extremes(seen, reports, device)
    for name, value in seen.items():
        if value.dim():
            totals.add({name: value})
        elif not name.endswith(SMALLEST + LARGEST):
            totals.add_value(name, value)
    totals.add_steps(reports)
    averaged = totals.averages(comm, device)
    known = comm.max(torch.stack(list(extremes.values()))) if extremes else torch.zeros(0)
    for name, value in zip(extremes, known, strict=True):
        signed = -value if name.endswith(SMALLEST) else value
        averaged[name] = signed.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return averaged


def _extremes(seen: Stats, reports: list[StepReport], device: torch.device) -> Stats:
    """{name: [] largest so far, smallest ones negated}, so that one maximum serves both."""
    found = {
        name: [-value if name.endswith(SMALLEST) else value]
        for name, value in seen.items()
        if name.endswith(SMALLEST + LARGEST) and not value.dim()
    }
    for report in reports:
        for name in CLIPPED & report.sums.keys():
            total, count = report.sums[name].unbind()
            share = total / count.clamp(min=1)
            found.setdefault(f"{name}_min", []).append(-share)
            found.setdefault(f"{name}_max", []).append(share)
    # float64: Totals counts in it, too.
    on_device = {n: [v.to(device, torch.float64) for v in values] for n, values in found.items()}
    return {name: torch.stack(values).max().float() for name, values in on_device.items()}


def of_completions(advantages: Tensor) -> Tensor:
    """[N] the advantage of each completion from those of its tokens [N, C].

    Without a discount all tokens of the policy have the same; others have 0.
    """
    return advantages.gather(1, advantages.abs().argmax(1, keepdim=True)).squeeze(1)


def advantages_of(experience: TrainingBatch, rewards: RewardTable) -> Tensor:
    """[B, G] the advantage of each completion, on the host."""
    return of_completions(experience.advantages).view_as(rewards.total).cpu()


def advantage_stats(experience: TrainingBatch) -> Stats:
    """Mean and spread of the advantages of completions."""
    advantages = of_completions(experience.advantages)
    return {
        "policy/advantage_mean": advantages.mean(),
        "policy/advantage_std": advantages.std(correction=0),
    }
