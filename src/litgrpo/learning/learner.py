"""The learning step: training batches from rollouts and rewards, exact gradients, steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from litgrpo.algorithms.advantages import check_centered
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.terms import StepTokens
from litgrpo.algorithms.turns import Turns
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.distributed.device import Clock, time_phase
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.memory import (
    Attempt,
    NotEnoughMemory,
    RowLimit,
    is_out_of_memory,
)
from litgrpo.learning.micro_batches import (
    BatchLimits,
    FieldsOf,
    MicroBatch,
    MicroBatching,
    RaggedBatches,
    mini_batches,
    rows_with_gradient,
)
from litgrpo.learning.steppers import Stepper, clip_to_norm, drop_gradients
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.metrics import StepSums, completion_advantages
from litgrpo.models.policy import Policy
from litgrpo.models.reference import Reference
from litgrpo.rollout.sampling import Sampling
from litgrpo.tensors import ComparedModel
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
STATE_DOES_NOT_FIT = (
    "Out of memory in the optimizer step: weights, gradients and optimizer state do not fit, and "
    "smaller micro-batches do not change that. Train adapters (model.lora.rank 16), choose an "
    "optimizer with less state, or shard over several devices (configs/hardware/fsdp2.yaml). "
    "`plan` estimates the memory of each."
)


def learning_row_limit() -> RowLimit:
    """Return the limit on rows of a micro-batch, lowered after out-of-memory errors."""
    remedy = "shorten completions, or set model.precision.gradient_checkpointing"
    return RowLimit("model.update.micro_batch_size", remedy)


@dataclass
class Learner:
    """Turns rewarded completions into optimizer steps.

    The gradient of an optimizer step does not depend on how its rows are split into micro-batches,
    on padding or on the number of ranks: every token has its weight in the loss before the split.

    Args:
        policy: is trained.
        objective: is minimized; callbacks may replace it by one with other coefficients.
        update_config: how the optimizer uses one rollout.
        sampling: how the completions were sampled.
        group_size: completions per prompt, G.
        max_completion_length: limit on the tokens of a completion.
        reference: for the KL term; None without one.
        reuse_sampler_logprobs: use the sampler's log-probabilities as those before the update,
            which is correct only if the engine is exact and computes in the same full precision.
        comm: collectives of the ranks.
        micro_batching: ragged micro-batches, or static ones for XLA devices.
        clock: measures the phases.
        row_limit: rows of a micro-batch after out-of-memory errors.
    """

    policy: Policy
    objective: Objective
    update_config: UpdateConfig
    sampling: Sampling
    group_size: int
    max_completion_length: int
    reference: Reference | None = None
    reuse_sampler_logprobs: bool = True
    comm: Comm = field(default_factory=SingleProcess)
    micro_batching: MicroBatching = field(default_factory=RaggedBatches)
    clock: Clock = field(default_factory=Clock)
    row_limit: RowLimit = field(default_factory=learning_row_limit)

    # --- before the update ---

    @time_phase("time/logprobs_s")
    def old_and_reference_logprobs(self, rollout: Rollout) -> RolloutLogprobs:
        """Compute the log-probabilities that the objective compares with.

        `old` is None with one optimizer step per rollout: the current policy is the old one (ratio
        1). It is also None with `old_policy: sampler`. With several steps it costs a forward pass,
        unless the sampler's are the same (`reuse_sampler_logprobs`). Some objectives need this
        pass even with one step: advantages with `needs_score_norms`, and `kl_in_reward` if the
        sampler is not the policy. `importance_correction` handles a stale or inexact sampler.

        `ref` is None without a KL term.
        """
        self.policy.eval()  # a rollout that was not sampled now leaves it as the update left it
        return self.retry(partial(self._before_update, rollout), rollout.tokens)

    def _before_update(self, rollout: Rollout, max_rows: int | None) -> RolloutLogprobs:
        needs, reference = self.objective.needs, self.reference
        needs_norms = self.objective.advantages.needs_score_norms
        needs_old = self._updates_from_old or "policy_logprobs" in needs
        needs_pass = needs_old and not self.reuse_sampler_logprobs
        old = rollout.sampler_logprobs if needs_old else None
        norms = ref = hidden = None
        if needs_norms or needs_pass:
            policy = self.policy_logprobs(rollout.tokens, max_rows, score_norms=needs_norms)
            norms = policy.score_norms
            old = policy.logprobs if needs_pass else old
        if reference is None:
            return RolloutLogprobs(old, score_norms=norms)
        tokens, temperature = rollout.reference_tokens, self.sampling.policy_temperature
        if "ref_logprobs" in needs:
            ref = self._reference_logprobs(reference, tokens, temperature, max_rows)
        if "ref_hidden" in needs:
            states_of = partial(_hidden_fields, reference)
            hidden = self._reference_fields(reference, states_of, tokens, max_rows)["hidden"]
        return RolloutLogprobs(old, ref, hidden, norms)

    @property
    def _updates_from_old(self) -> bool:
        """True if the ratio needs the log-probabilities before the update, see `old_policy`."""
        return self.update_config.num_steps > 1 and self.objective.old_policy != "sampler"

    def _kl_logprobs(self, rollout: Rollout, logprobs: RolloutLogprobs) -> Tensor:
        """Return the [N, C] log-probabilities that `kl_in_reward` compares with the reference."""
        if "policy_logprobs" not in self.objective.needs:
            return rollout.sampler_logprobs
        assert logprobs.old is not None
        return logprobs.old

    def add_policy_logprobs(self, rollout: Rollout) -> Rollout:
        """Return given completions with the policy's log-probabilities as those of the sampler."""
        self.policy.eval()
        new = self.retry(partial(self.policy_logprobs, rollout.tokens), rollout.tokens)
        return replace(rollout, sampler_logprobs=new.logprobs)

    def logprobs_under(self, reference: Reference, tokens: TokenRows, temperature: float) -> Tensor:
        """Return [N, C] log-probabilities under a frozen model, computed in micro-batches.

        A rank that runs out of memory repeats it with fewer rows at once, without the other ranks,
        unless their weights are needed for it.
        """
        compute = partial(self._reference_logprobs, reference, tokens, temperature)
        if not self.micro_batching.computes_alone:
            return compute(self.row_limit.max_rows)
        return self.row_limit.run(compute, partial(self._count_rows_at_once, tokens))

    def policy_logprobs(
        self, tokens: TokenRows, max_rows: int | None, *, score_norms: bool = False
    ) -> TokenLogprobs:
        """Return [N, C] log-probabilities under the policy, without gradient, in micro-batches."""
        compute = partial(self.logprobs, score_norms=score_norms)
        limits = self._limits(max_rows, self.policy.computes_prompts_once)
        return self.micro_batching.compute_logprobs(tokens, compute, limits)

    def _reference_logprobs(
        self, reference: Reference, tokens: TokenRows, temperature: float, max_rows: int | None
    ) -> Tensor:
        """Return [N, C] log-probabilities under a frozen model."""

        def fields_of(rows: TokenRows) -> dict[str, Tensor]:
            return reference.logprobs(rows, temperature=temperature).row_fields()

        return self._reference_fields(reference, fields_of, tokens, max_rows)["logprobs"]

    def _reference_fields(
        self, reference: Reference, fields_of: FieldsOf, tokens: TokenRows, max_rows: int | None
    ) -> dict[str, Tensor]:
        """Return {name: [N, C, ...]} under a frozen model, in micro-batches if it is here."""

        def compute(rows: TokenRows) -> dict[str, Tensor]:
            with self.policy.autocast():
                return fields_of(rows)

        if reference.computes_elsewhere:
            return compute(tokens)
        limits = self._limits(max_rows, reference.computes_prompts_once)
        return self.micro_batching.compute_fields(tokens, compute, limits)

    @time_phase("time/learn_s")
    def build_batch(
        self, rollout: Rollout, rewards: RewardTable, logprobs: RolloutLogprobs
    ) -> TrainingBatch:
        """Build the training batch of an iteration: per-token advantages and loss weights."""
        mask = rollout.loss_mask
        # Before the KL term of the rewards: a positive one marks a completion to imitate.
        earned = rewards.total.masked_fill(~rewards.valid, torch.nan).flatten()
        policy_logprobs = self._kl_logprobs(rollout, logprobs)
        rewards = self.objective.subtract_kl(rewards, policy_logprobs, logprobs.ref, mask)
        turns = None if rollout.turns is None else Turns.from_rollout(rollout, rewards)
        # A[n, t] = (R_n - mean of the group) / (std of the group + eps) for every generated token
        # of completion n (`Normalized`; DeepSeekMath, section 4.1.2), or per turn with a
        # TurnAdvantages.
        advantages = self.objective.token_advantages(
            rewards, mask, self.comm, turns, logprobs.score_norms
        )
        has_advantage = (advantages != 0).view(-1, self.group_size * advantages.shape[1]).any(1)
        informative = has_advantage.repeat_interleave(self.group_size)
        # u[n, t]: weight of a token in the loss of its optimizer step, for example 1 / tokens of
        # the step (token_mean). It is computed before the step is split, so the gradient does not
        # depend on micro-batches.
        loss_weights = torch.zeros_like(rollout.sampler_logprobs)
        term_weights = None
        if self.objective.mean_terms:
            term_weights = loss_weights.new_zeros(*mask.shape, len(self.objective.mean_terms))
        observed = rollout.completion_mask & ~mask
        for rows in mini_batches(len(mask), self.group_size, self.update_config.num_mini_batches):
            loss_weights[rows] = self.objective.loss_weights(
                mask[rows],
                rollout.truncated[rows],
                self.max_completion_length,
                self.comm,
                informative=informative[rows],
            )
            if term_weights is not None:
                in_loss = loss_weights[rows] != 0
                step = StepTokens(mask[rows], observed[rows], in_loss, earned[rows])
                term_weights[rows] = self.objective.term_weights(step, self.comm)
        batch = TrainingBatch(
            rollout.tokens,
            loss_mask=mask,
            sampler_logprobs=rollout.sampler_logprobs,
            advantages=advantages,
            loss_weights=loss_weights,
            old_logprobs=logprobs.old if self._updates_from_old else None,
            ref_logprobs=logprobs.ref,
            ref_hidden=logprobs.ref_hidden,
        )
        return batch if term_weights is None else batch.with_term_weights(term_weights)

    def group_advantages(self, batch: TrainingBatch, rewards: RewardTable) -> Tensor:
        """Return [B, G] the advantage of each completion, on the host.

        Raises:
            RuntimeError: those of a group do not sum to zero, as the estimator's must.
        """
        advantages = completion_advantages(batch.advantages, batch.loss_mask).cpu()
        advantages = advantages.view_as(rewards.total)
        if self.objective.advantage_clip is None:
            # An agent may end without a call: a row without tokens shows no advantage.
            shown = batch.loss_mask.any(1).cpu().view_as(rewards.total).all(1)
            check_centered(advantages[shown], self.objective.advantages, self.objective.gamma)
        return advantages

    def reward_kl_stats(self, rollout: Rollout, logprobs: RolloutLogprobs) -> Stats:
        """Return {name: [2] sum over tokens and count} of the KL that is taken off the rewards.

        Empty without `kl_in_reward`.
        """
        option, mask = self.objective.kl_in_reward, rollout.loss_mask
        if option is None or logprobs.ref is None:
            return {}
        kl = option.token_kl(self._kl_logprobs(rollout, logprobs), logprobs.ref, mask)
        return {"policy/kl_in_reward": torch.stack([kl.sum(), mask.sum()])}

    # --- the update ---

    @time_phase("time/learn_s")
    def update(self, batch: TrainingBatch, stepper: Stepper) -> list[StepReport]:
        """Take all optimizer steps of an iteration on N rows; report each, in order."""
        self.policy.train()
        mini_batch_rows = mini_batches(
            len(batch), self.group_size, self.update_config.num_mini_batches
        )
        reports: list[StepReport] = []
        for _ in range(self.update_config.epochs_per_rollout):
            for rows in mini_batch_rows:
                mini_batch = self.micro_batching.select_mini_batch(batch, rows)
                report = self.take_optimizer_step(mini_batch, stepper)
                if report.skipped:  # its row numbers are those of the mini-batch
                    numbers = {int(rows[row]): why for row, why in report.skipped.items()}
                    report = replace(report, skipped=numbers)
                if reports:  # later steps would show the update, not the sampler
                    report.sums.pop(MISMATCH, None)
                reports.append(report)
        return reports

    def take_optimizer_step(self, batch: TrainingBatch, stepper: Stepper) -> StepReport:
        """Take one optimizer step with the exact gradient of these rows.

        If a loss or gradient on any rank is not finite, the gradient is dropped on all ranks: the
        weights stay as they are, and the schedule moves on.
        """
        # {name: [2] sum over rows or tokens, and the count to divide it by}, and the losses.
        sums = self.retry(partial(self._accumulate_gradients, batch, stepper), batch.tokens)
        lr = stepper.lr  # before the schedule moves
        # Clipping runs inside of optimizer.step(), when gradients are reduced and unscaled:
        # TrainerStepper.step -> Lightning -> GRPO.on_before_optimizer_step
        # -> TrainerStepper.clip_before_step -> _clip_gradients, whose result `step` returns.
        try:
            stats = stepper.step(partial(self._clip_gradients, batch, sums))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # Not repeatable: a part of the weights may have been updated.
            raise NotEnoughMemory(STATE_DOES_NOT_FIT) from error
        if stats is None:
            return StepReport(lr, skipped=self._find_non_finite(batch))
        return StepReport(lr, stats)

    def _accumulate_gradients(
        self, batch: TrainingBatch, stepper: Stepper, max_rows: int | None
    ) -> StepSums:
        stepper.zero_grad()
        sums = self.micro_batching.sums()
        limits = self._limits(max_rows, self.policy.computes_prompts_once)
        with self._reference_head():
            for output, micro in self.losses(batch, limits):
                # Gradients are averaged over ranks, while the weights count the rows of all ranks.
                stepper.backward(output.loss * self.comm.world_size, is_last=micro.is_last)
                if not micro.is_filler:
                    sums.add(output)
        return sums

    def _reference_head(self) -> AbstractContextManager[None]:
        """Return the context in which divergences can be computed, backward passes included."""
        if self.reference is None or "ref_hidden" not in self.objective.needs:
            return nullcontext()
        return self.reference.head_in_memory()

    def losses(
        self, batch: TrainingBatch, limits: BatchLimits
    ) -> Iterator[tuple[LossOutput, MicroBatch]]:
        """Yield the loss of each micro-batch; their sum is the loss of the optimizer step."""
        batch = self.prepare_step(batch)
        # Rows with zero advantage have no gradient, unless a term has one: skip their pass.
        rows = None if "all_rows" in self.objective.needs else rows_with_gradient(batch)
        for micro in self.micro_batching.split(batch, rows, limits):
            new = self.logprobs(micro.rows.tokens, micro.rows.ref_hidden)
            output = self.objective.loss(new, micro.rows)
            output.stats[MISMATCH] = _sampler_mismatch(new, micro.rows)
            yield output, micro

    def _clip_gradients(
        self, batch: TrainingBatch, sums: StepSums, trained: list[Parameter]
    ) -> Stats | None:
        """Clip the gradient, or drop it on all ranks if a number on any rank is not finite.

        Returns:
            {name: [2] sum and count}, or None if the gradient was dropped.
        """
        stats, loss, norm = sums.read(clip_to_norm(trained, self.update_config.max_grad_norm))
        inputs = batch.sampler_logprobs.isfinite() & batch.advantages.isfinite()
        finite = inputs.all() & loss.isfinite() & norm.isfinite()
        if self.comm.sum((~finite).float()) != 0:
            drop_gradients(trained)
            return None
        one = torch.ones_like(loss)
        # `loss` is this rank's share of the sum over ranks, and logged numbers are averaged.
        loss_of_step = torch.stack([loss * self.comm.world_size, one])
        return stats | {"policy/loss": loss_of_step, "optim/grad_norm": torch.stack([norm, one])}

    def prepare_step(self, batch: TrainingBatch) -> TrainingBatch:
        """Add what depends on all rows of an optimizer step, before it is split."""
        # A quantile, or a selection of tokens, needs all of them before the first backward pass.
        step_logprobs = None
        if "before_step" in self.objective.needs:
            step_logprobs = self.policy_logprobs(batch.tokens, self.row_limit.max_rows)
        return self.objective.prepare_step(batch, step_logprobs, self.comm)

    def logprobs(
        self, tokens: TokenRows, ref_hidden: Tensor | None = None, *, score_norms: bool = False
    ) -> TokenLogprobs:
        """Compute [M, C] log-probabilities and entropies under the policy, with gradient.

        With the reference's hidden states [M, C, E] also divergences.
        """
        compared, divergence = None, self.objective.divergence
        if ref_hidden is not None and divergence is not None:
            assert self.reference is not None
            compared = ComparedModel(ref_hidden, self.reference.head, divergence)
        with self.policy.autocast():
            return self.policy.logprobs(
                tokens,
                temperature=self.sampling.policy_temperature,
                entropy_grad="entropy_gradient" in self.objective.needs,
                compared=compared,
                score_norms=score_norms,
            )

    def _find_non_finite(self, batch: TrainingBatch) -> dict[int, str]:
        """Return {row: its first number that is not finite}.

        Repeats a forward and a backward pass for each row, which only happens after a skipped step.
        """
        causes: dict[int, str] = {}
        batch = self.prepare_step(batch)
        # Ranks have unequal numbers of rows.
        with gathered(self.policy), self._reference_head():
            trained = [p for p in self.policy.parameters() if p.requires_grad]
            for row in (batch.loss_weights != 0).any(1).nonzero():
                micro = next(self.micro_batching.split(batch, row, self.limits)).rows
                new = self.logprobs(micro.tokens, micro.ref_hidden)
                loss = self.objective.loss(new, micro).loss
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                numbers = {
                    "advantage": micro.advantages,
                    "log-probability at sampling": micro.sampler_logprobs,
                    "log-probability": new.logprobs,
                    "loss": loss,
                    "gradient": torch.stack([g.abs().max() for g in gradients if g is not None]),
                }
                bad = [name for name, values in numbers.items() if not values.isfinite().all()]
                if bad:
                    causes[int(row)] = bad[0]
        return causes

    # --- memory ---

    @property
    def limits(self) -> BatchLimits:
        """Limits of a micro-batch of the policy."""
        return self._limits(self.row_limit.max_rows, self.policy.computes_prompts_once)

    def _limits(self, max_rows: int | None, shared: bool) -> BatchLimits:
        row_limits = [
            rows for rows in (self.update_config.micro_batch_size, max_rows) if rows is not None
        ]
        return BatchLimits(min(row_limits, default=None), self.update_config.max_tokens, shared)

    def retry(self, attempt: Attempt[Result], tokens: TokenRows) -> Result:
        """Return the result of an attempt on rows, in smaller micro-batches if memory needs it."""
        return self.row_limit.run(
            attempt,
            partial(self._count_rows_at_once, tokens),
            comm=self.comm,
            computes_alone=self.micro_batching.computes_alone,
        )

    def _count_rows_at_once(self, tokens: TokenRows) -> int:
        return max(map(len, self.micro_batching.buckets(tokens, self.limits)))


def _hidden_fields(reference: Reference, rows: TokenRows) -> dict[str, Tensor]:
    return {"hidden": reference.hidden_states(rows)}


def _sampler_mismatch(new: TokenLogprobs, batch: TrainingBatch) -> Tensor:
    """Return [2] sum and count of |log p_policy - log p_sampler| (nats)."""
    gap = (new.logprobs.detach() - batch.sampler_logprobs).abs()
    return torch.stack([torch.where(batch.loss_mask, gap, 0.0).sum(), batch.loss_mask.sum()])
