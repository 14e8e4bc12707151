"""The training objective: surrogate loss, loss aggregation, KL penalty, importance correction.

An algorithm is a combination of these choices, not a class: `configs/algorithms` has one config
override for each published algorithm, and docs/explanation/algorithm.md a table of them.

A loss is never a mean over a micro-batch. Each token gets a weight that is computed once for all
rows of an optimizer step (`Objective.loss_weights`), and the loss is the weighted sum over tokens.
So the gradient does not depend on how the step is split into micro-batches and processes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Normalized, OptimalTokenBaseline
from litgrpo.algorithms.aggregation import LOSS_AGGREGATIONS, LossAggregation, LossAggregationName
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.divergences import DIVERGENCES, Divergence, DivergenceName
from litgrpo.algorithms.kl import KL_ESTIMATORS, KLEstimator, KLInReward, KLName
from litgrpo.algorithms.ratios import RATIOS, ImportanceSamplingLevel
from litgrpo.algorithms.surrogates import (
    DPPO,
    Clipped,
    PolicyGradient,
    StepSurrogate,
    Surrogate,
    SurrogateInputs,
)
from litgrpo.algorithms.terms import PositiveNLL
from litgrpo.algorithms.token_selection import (
    token_keys,
)
from litgrpo.algorithms.turns import TurnAdvantages, Turns
from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.tensors import row_mean
from litgrpo.types import LossOutput, RewardTable, TokenLogprobs, TrainingBatch

ALONE = SingleProcess()


RATIO_MAX = "policy/ratio_max"


@dataclass(frozen=True)
class EntropyTotals:
    """Totals of one optimizer step for the entropy bonus and `top_entropy_quantile`.

    All micro-batches and ranks of the step share them. The denominators of the loss are in the loss
    weights of the tokens.

    Args:
        num_tokens: [] tokens that the entropy bonus is a mean over.
        entropy_threshold: [] smallest entropy of a token that contributes to the loss; None: all
            tokens contribute.

    Example:
        A step of 4,096 tokens of which the 20 % of highest entropy contribute::

            EntropyTotals(num_tokens=tensor(819), entropy_threshold=tensor(1.37))
    """

    num_tokens: Tensor
    entropy_threshold: Tensor | None = None


@check_field_types
@dataclass(frozen=True)
class Objective:
    """The training objective. The default is GRPO with a token mean and without a KL penalty.

    Args:
        advantages: advantage estimator; `token_advantages` applies it, and its result is
            `TrainingBatch.advantages`.
        importance_sampling_level: ratio of the policy to the old one per `token`, per `sequence`
            (GSPO), or per `sequence_token` (GSPO-token: the ratio of the sequence, the gradient of
            the token).
        old_policy: the ratio is taken to the policy `before_update`, or to the `sampler`, whose
            weights may be older (staleness) and whose arithmetic may differ (verl: bypass mode).
        surrogate: loss of one token.
        reward_coef: coefficient of the surrogate loss; 0: rewards are measured but not maximized,
            for distillation by the KL term alone (verl: use_task_rewards).
        loss_aggregation: token_mean (DAPO), sequence_mean (the GRPO paper), constant_length (Dr.
            GRPO), sequence_sum (LUSPO, RLOO), micro_batch_token_mean (BNPO), or a LossAggregation.
        log_ratio_coef: coefficient of a penalty s^2, the squared log-ratio of the policy to the old
            one, on every token (Kimi K2.5; prime-rl: kl_tau; DRO: beta / 2, per token as in verl,
            while the paper squares the sum over the completion).
        kl_coef: KL penalty coefficient (TRL: beta); 0: no reference model.
        kl_estimator: of the sampled token: k1, k2, k3, abs, or a function of (ref_logprobs -
            logprobs); or exact over the vocabulary: reverse_kl, forward_kl, jsd, or a Divergence.
            With a teacher as reference these are distillation (docs/howto/distillation.md).
        kl_bias_correction: multiply the KL penalty by the importance ratio (TRL:
            use_bias_correction_kl), which makes the gradient of k1 and k3 unbiased; see below.
            Switch it off with k2 and for the GRPO paper's loss. Without effect on divergences,
            which do not depend on the token that was sampled.
        entropy_coef: coefficient of a bonus for the mean entropy of the tokens in the loss.
        advantage_clip: advantages are limited to [-advantage_clip, advantage_clip]; null: no limit
            (NeMo-RL: advantage_clip_low, advantage_clip_high).
        exclude_zero_variance: leave groups without any advantage out of the loss and of its
            denominators (GPG; SkyRL: zero_variance_filter), so that the gradient does not shrink
            with their number. They have no KL penalty and no entropy bonus then.
        gamma: discount per token, counted from the last token of a completion; 1: none.
        mask_truncated_completions: exclude completions cut off by the length limit from the loss
            (DAPO).
        top_entropy_quantile: fraction of tokens, those of highest entropy, that contribute to the
            loss (arXiv:2506.01939).
        off_policy_mask_threshold: exclude completions of negative advantage whose mean
            log-probability fell by more than this many nats since sampling (arXiv:2512.02556).
        kl_mask_threshold: exclude tokens whose s^2 / 2 exceeds this, in nats, for any
            advantage (torchrl: kl_mask_threshold).
        importance_correction: weights for a sampler that differs from the trainer, of every term
            that is a mean over its samples (see `find_uncorrected`); null: none.
        positive_nll: adds the cross-entropy of correct completions to the loss (VAPO); null: none.
        observation_nll_coef: coefficient of the cross-entropy of the tokens of an environment, the
            mean over those of the optimizer step (ECHO, arXiv:2605.24517; prime-rl: `echo`, alpha
            0.1). It needs an environment, and sampling from all tokens.
        kl_in_reward: subtracts the KL to the reference from the reward; null: the KL is only a term
            of the loss (`kl_coef`).

    Gradient of the KL penalty k3 by l, for one token with d = l_ref - l and w = e^(l - l_old)::

        kl_bias_correction: false    1 - e^d    on average that of KL(reference || policy)
        kl_bias_correction: true     -w d       on average that of KL(policy || reference)

    So the correction changes the gradient on-policy as well, where w = 1 leaves the value as it is:
    training then minimizes the divergence that `policy/kl` shows. The weight 1 - e^d is unbounded
    for tokens that became much less likely than under the reference; -d grows slowly. With several
    optimizer steps per rollout, w also accounts for the tokens having been sampled before them.
    Source: DeepSeek-V3.2, arXiv:2512.02556, "Unbiased KL Estimate".

    Example:
        >>> dr_grpo = Objective(Normalized(scale="none"), loss_aggregation="constant_length")
        >>> dr_grpo.needs_reference
        False
    """

    advantages: Advantages = field(default_factory=Normalized)
    importance_sampling_level: ImportanceSamplingLevel = "token"
    old_policy: Literal["before_update", "sampler"] = "before_update"
    surrogate: Surrogate = field(default_factory=Clipped)
    reward_coef: float = 1.0
    loss_aggregation: LossAggregationName | LossAggregation = "token_mean"
    log_ratio_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLName | DivergenceName | Divergence | Callable = "k3"  # type: ignore[type-arg]
    kl_bias_correction: bool = True
    entropy_coef: float = 0.0
    advantage_clip: float | None = None
    exclude_zero_variance: bool = False
    gamma: float = 1.0
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    kl_mask_threshold: float | None = None
    importance_correction: ImportanceCorrection | None = None
    positive_nll: PositiveNLL | None = None
    observation_nll_coef: float = 0.0
    kl_in_reward: KLInReward | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        self._check_combinations()
        self._check_names()
        for name in ("reward_coef", "kl_coef", "log_ratio_coef", "observation_nll_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 0")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip is {self.advantage_clip}; it must be above 0")
        if self.kl_mask_threshold is not None and not self.kl_mask_threshold >= 0:
            raise ValueError(f"kl_mask_threshold is {self.kl_mask_threshold}; it must be >= 0")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef is {self.entropy_coef}; it must be finite")
        for name in ("gamma", "top_entropy_quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")

    def _check_names(self) -> None:
        """Reject unknown names; a Python caller has no parser to check them."""
        kl_names = (*get_args(KLName), *get_args(DivergenceName))
        aggregations = get_args(LossAggregationName)
        for name, known in (("loss_aggregation", aggregations), ("kl_estimator", kl_names)):
            chosen = getattr(self, name)
            if not callable(chosen) and chosen not in known:
                allowed = ", ".join(known)
                raise ValueError(f"{name} is {chosen!r}; it must be one of {allowed}, or callable")

    def _check_combinations(self) -> None:
        """Reject options that exclude each other, or leave nothing to learn."""
        if not (self.reward_coef or self.kl_coef):
            raise ValueError(
                "reward_coef and kl_coef are 0, so there is nothing to learn. Set reward_coef to "
                "learn from rewards, or kl_coef and a reference to learn from a teacher"
            )
        if self.old_policy == "sampler" and self.importance_correction is not None:
            raise ValueError(
                "old_policy is sampler, so the ratio already corrects for the sampler; set "
                "importance_correction to null, or old_policy to before_update"
            )
        base = self.surrogate
        base = base.surrogate if isinstance(base, StepSurrogate) else base
        if isinstance(base, DPPO) and self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level is {self.importance_sampling_level}, but DPPO limits "
                "the probabilities of single tokens; set it to token"
            )
        self.advantages.check_contained()
        if self.kl_in_reward is not None and not self.advantages.uses_total:
            raise ValueError(
                f"kl_in_reward lowers the total reward, but {type(self.advantages).__name__} "
                "normalizes each reward function separately (GDPO); set kl_in_reward to null and "
                "use kl_coef, or other advantages"
            )

    @property
    def aggregation(self) -> LossAggregation:
        """The loss aggregation, looked up if it was given by name."""
        if isinstance(self.loss_aggregation, str):
            return LOSS_AGGREGATIONS[self.loss_aggregation]
        return self.loss_aggregation

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the rewards need reference log-probabilities."""
        return self.kl_coef > 0 or self.kl_in_reward is not None

    @property
    def needs_reference_logprobs(self) -> bool:
        """True if log-probabilities of the sampled tokens under the reference are needed."""
        return self.kl_in_reward is not None or (self.kl_coef > 0 and self.divergence is None)

    @property
    def adds_nll(self) -> bool:
        """True if the loss has a cross-entropy term, see `nll_weights`."""
        return self.positive_nll is not None or self.observation_nll_coef > 0

    @property
    def divergence(self) -> Divergence | None:
        """Divergence over the vocabulary that is the KL term; None: an estimate, or no KL term."""
        given = self.kl_estimator
        found = DIVERGENCES.get(given) if isinstance(given, str) else given
        return found if self.kl_coef > 0 and isinstance(found, Divergence) else None

    @property
    def corrects_sampler(self) -> bool:
        """True if the loss accounts for completions of another policy than that of the update."""
        return self.importance_correction is not None or self.old_policy == "sampler"

    @property
    def needs_policy_kl(self) -> bool:
        """True if `kl_in_reward` is that of the policy before the update, not of the sampler."""
        return self.kl_in_reward is not None and self.corrects_sampler

    def find_uncorrected(self) -> list[str]:
        """Names of the terms in use that `importance_correction` or `old_policy` do not weight.

        A term of the sampled token has its weight. A term of a position (a divergence over the
        vocabulary, the entropy, an observation) has that of the completion, if there is one. With
        `old_policy: sampler` only terms with the ratio are weighted.
        """
        base = self.surrogate
        base = base.surrogate if isinstance(base, StepSurrogate) else base
        sampled, by_position = self.importance_correction is not None, False
        if self.importance_correction is not None:
            by_position = self.importance_correction.level != "token"
        to_sampler = self.old_policy == "sampler"
        kl = by_position if self.divergence else sampled or (to_sampler and self.kl_bias_correction)
        # {name: (is in use, is weighted)}
        terms = {
            "the surrogate loss": (
                self.reward_coef > 0,
                sampled or (to_sampler and not isinstance(base, PolicyGradient)),
            ),
            "kl_coef": (self.kl_coef > 0, kl),
            "log_ratio_coef": (self.log_ratio_coef > 0, sampled),
            "entropy_coef": (self.entropy_coef != 0, by_position),
            "positive_nll": (self.positive_nll is not None, sampled),
            "observation_nll_coef": (self.observation_nll_coef > 0, by_position),
        }
        return [name for name, (used, weighted) in terms.items() if used and not weighted]

    @property
    def needs_all_rows(self) -> bool:
        """True if a row with zero advantages can still have a gradient, from an added term."""
        return self.kl_coef > 0 or self.entropy_coef != 0 or self.log_ratio_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """True if `entropy_totals` needs every token's entropy before the step."""
        return self.top_entropy_quantile < 1

    @property
    def selects_tokens(self) -> bool:
        """True if `select_tokens` needs every token's log-probability before the step."""
        return isinstance(self.surrogate, StepSurrogate)

    def token_advantages(
        self,
        rewards: RewardTable,
        mask: Tensor,
        comm: Comm = ALONE,
        turns: Turns | None = None,
        score_norms: Tensor | None = None,
    ) -> Tensor:
        """[N, C] float32 advantage of every token of a rollout, 0 off `mask`.

        Args:
            rewards: of N = B * G completions.
            mask: [N, C] True marks a generated token.
            comm: of the ranks that share the batch.
            turns: of the episodes; None: every completion is one turn.
            score_norms: [N, C] see `TokenLogprobs`; needed only by `OptimalTokenBaseline`.
        """
        device, mask = mask.device, mask.to(rewards.total.device)
        lengths = mask.sum(1).view_as(rewards.total)
        if turns is not None and isinstance(self.advantages, TurnAdvantages):
            values = self.advantages.per_token(rewards, lengths, comm, turns)
        elif isinstance(self.advantages, OptimalTokenBaseline) and score_norms is not None:
            norms = score_norms.to(mask.device)
            values = self.advantages.per_token(rewards, mask, comm, norms)
        else:
            values = self.advantages(rewards, lengths, comm).reshape(-1, 1)
        if self.advantage_clip is not None:
            values = values.clamp(-self.advantage_clip, self.advantage_clip)
        # The last token has the whole advantage; each token before it gamma times that of the next.
        remaining = (mask.flip(1).cumsum(1).flip(1) - 1).clamp(min=0)
        discounted = torch.where(mask, values * self.gamma ** remaining.double(), 0.0)
        return discounted.to(device, torch.float32)

    def loss_weights(
        self,
        loss_mask: Tensor,
        truncated: Tensor,
        max_completion_length: int,
        comm: Comm = ALONE,
        dtype: torch.dtype = torch.float32,
        informative: Tensor | None = None,
    ) -> Tensor:
        """[M, C] weight of every token of an optimizer step; exactly 0 for tokens not in the loss.

        Args:
            loss_mask: [M, C] True marks a generated token.
            truncated: [M] True if the length limit stopped the completion.
            max_completion_length: that limit, in tokens.
            comm: of the ranks that share the step.
            dtype: of the weights.
            informative: [M] True for completions of a group with an advantage; used by
                `exclude_zero_variance`. None: all.
        """
        counted = torch.ones_like(truncated)
        if self.exclude_zero_variance and informative is not None:
            counted = informative
        if self.mask_truncated_completions:
            loss_mask = loss_mask & ~truncated[:, None]
        mask = (loss_mask & counted[:, None]).to(dtype)
        # Masked truncated completions count in N: otherwise the few others would get large weights.
        num_completions = comm.sum(counted.to(dtype).sum()).clamp(min=1)
        num_tokens = comm.sum(mask.sum()).clamp(min=1)
        return self.aggregation(mask, num_completions, num_tokens, max_completion_length)

    def subtract_kl(
        self, rewards: RewardTable, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor
    ) -> RewardTable:
        """Return the rewards without the KL of `kl_in_reward`; the same ones without that option.

        Args:
            rewards: of N = B * G completions.
            logprobs: [N, C] at sampling; before the update if `needs_policy_kl`.
            ref_logprobs: [N, C] under the reference; needed only with `kl_in_reward`.
            mask: [N, C] True marks a generated token.
        """
        if self.kl_in_reward is None:
            return rewards
        assert ref_logprobs is not None, "kl_in_reward needs reference log-probs"
        kl = self.kl_in_reward.token_kl(logprobs, ref_logprobs, mask).sum(1).to(rewards.total)
        total = rewards.total - self.kl_in_reward.coef * kl.view_as(rewards.total)
        return replace(rewards, total=total)

    def nll_weights(
        self, loss_mask: Tensor, observed: Tensor, correct: Tensor, comm: Comm = ALONE
    ) -> Tensor:
        """[M, C] weight of -log p of every token of an optimizer step; 0 for tokens without it.

        Args:
            loss_mask: [M, C] True marks a generated token.
            observed: [M, C] True marks a token of the environment.
            correct: [M] True for completions that `positive_nll` imitates.
            comm: of the ranks that share the step.
        """
        imitated = 0.0 if self.positive_nll is None else self.positive_nll.coef
        terms = (imitated, loss_mask & correct[:, None]), (self.observation_nll_coef, observed)
        # coef / number of the term's tokens in the step, on all ranks
        scales = [coef / comm.sum(mask.sum()).clamp(min=1) for coef, mask in terms]
        return scales[0] * terms[0][1] + scales[1] * terms[1][1]

    def entropy_totals(
        self, weights: Tensor, entropy: Tensor | None = None, comm: Comm = ALONE
    ) -> EntropyTotals:
        """Compute the totals that all micro-batches of an optimizer step share.

        Args:
            weights: [M, C] of all rows of the step on this rank.
            entropy: [M, C] before the step; needed only if `needs_entropy`.
            comm: of the ranks that share the step.
        """
        in_loss, threshold = weights != 0, None
        if self.needs_entropy:
            assert entropy is not None, "top_entropy_quantile < 1 needs entropies"
            # float32: a quantile that falls on a token must not miss it by rounding in 1 - share.
            counted = entropy.detach().float()
            flat = counted.masked_fill(~in_loss, torch.nan).flatten()
            threshold = comm.gather(flat).nanquantile(1 - self.top_entropy_quantile)
            in_loss = in_loss & (counted >= threshold)
        return EntropyTotals(comm.sum(in_loss.sum()).clamp(min=1), threshold)

    def select_tokens(
        self, batch: TrainingBatch, new: TokenLogprobs | None = None, comm: Comm = ALONE
    ) -> TrainingBatch:
        """Return all rows of an optimizer step with the tokens that its surrogate selects.

        Args:
            batch: all rows of the step on this rank.
            new: [M, C] before the step; needed only if `selects_tokens`.
            comm: of the ranks that share the step.
        """
        if not isinstance(self.surrogate, StepSurrogate):
            return batch
        assert new is not None, f"{type(self.surrogate).__name__} needs log-probabilities"
        with torch.no_grad():
            inputs = self._surrogate_inputs(new, batch)
            return replace(batch, selected=self.surrogate.select(inputs, token_keys(batch), comm))

    def loss(
        self, new: TokenLogprobs, batch: TrainingBatch, totals: EntropyTotals | None = None
    ) -> LossOutput:
        """Loss of a micro-batch; the losses of an optimizer step's micro-batches add up.

        Args:
            new: [M, C] current log-probabilities and entropies, with gradient.
            batch: M completions; without `old_logprobs` the current policy is the old one: there is
                one optimizer step per rollout.
            totals: of the step, for the entropy bonus and mask; None if these are all its
                rows. If they are given, the batch has passed `select_tokens`.
        """
        if totals is None:
            totals = self.entropy_totals(batch.loss_weights, new.entropy)
            batch = self.select_tokens(batch, new)
        inputs = self._surrogate_inputs(new, batch)
        in_loss = batch.loss_weights != 0
        entropy = torch.where(in_loss, new.entropy, 0.0)
        # `kept` selects tokens of the policy-gradient term. The KL term holds for all tokens.
        kept = in_loss
        if totals.entropy_threshold is not None:
            kept = kept & (entropy.detach().float() >= totals.entropy_threshold)
        position_weights = self._position_weights(inputs.old_logprobs, batch, in_loss)
        bonus = (position_weights * torch.where(kept, entropy, 0.0)).sum()
        if self.off_policy_mask_threshold is not None:
            # Mean of log p_sampler - log p over a completion. A completion of negative advantage
            # that became much less likely has been pushed far enough: its tokens are left out.
            drift = torch.where(in_loss, batch.sampler_logprobs - inputs.logprobs.detach(), 0.0)
            drift = row_mean(drift.nan_to_num(0.0), in_loss)
            kept = kept & ((inputs.advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        if self.kl_mask_threshold is not None:
            kept = kept & (inputs.log_ratio.detach().square() / 2 <= self.kl_mask_threshold)
        token_loss = self.reward_coef * torch.where(kept, self.surrogate(inputs), 0.0)
        stats = {"policy/entropy_trained": entropy, "policy/log_ratio": inputs.log_ratio}
        low, high = self.surrogate.find_clipped(inputs)
        stats["policy/clip_low_frac"], stats["policy/clip_high_frac"] = low, high
        if kept is not in_loss:
            stats["policy/kept_frac"] = kept
        if inputs.selected is not None:
            stats["policy/selected_frac"] = inputs.selected
        if self.importance_correction is not None:
            stats["policy/sampler_weight"] = inputs.correction
        if self.log_ratio_coef > 0:
            penalty = inputs.log_ratio.square() * inputs.correction
            token_loss = token_loss + self.log_ratio_coef * penalty
        if self.kl_coef > 0:
            if new.divergence is None:
                penalty = self._kl_estimate(inputs, batch)
            else:
                penalty = position_weights * torch.where(in_loss, new.divergence, 0.0)
            token_loss, stats["policy/kl"] = token_loss + self.kl_coef * penalty, penalty
        # loss = sum_t u_t (reward_coef surrogate_t + log_ratio_coef s_t^2 + kl_coef KL_t)
        #        - entropy_coef * mean entropy.
        # The loss weights u contain the denominators of the whole optimizer step, so micro-batches
        # add up.
        weights = self.aggregation.rescale_micro_batch(batch.loss_weights, in_loss)
        loss = (weights * token_loss).sum() - self.entropy_coef * bonus / totals.num_tokens
        sums = {name: (value.detach() * in_loss).sum() for name, value in stats.items()}
        pairs = {name: torch.stack([x, in_loss.sum()]) for name, x in sums.items()}
        largest = inputs.ratio.detach().max()
        pairs[RATIO_MAX] = torch.stack([largest, in_loss.any().to(largest)])
        if batch.nll_weights is not None:
            nll, nll_pairs = self._nll(new, batch, batch.nll_weights)
            loss, pairs = loss + nll, pairs | nll_pairs
        return LossOutput(loss, pairs)

    def _nll(
        self, new: TokenLogprobs, batch: TrainingBatch, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the [] weighted sum of -log p, and {name: [2] its sum and count} by term."""
        nll = torch.where(weights != 0, -new.logprobs, 0.0)
        if self.importance_correction is not None:
            # Of all generated tokens: those without a weight in the loss may be imitated.
            old = new.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
            arguments = old, batch.sampler_logprobs, batch.loss_mask
            sampled = self.importance_correction(*arguments)
            by_position = self.importance_correction.position_weights(*arguments)
            weights = weights * torch.where(batch.loss_mask, sampled, by_position)
        terms = {"positive": batch.loss_mask} if self.positive_nll is not None else {}
        if self.observation_nll_coef > 0:
            terms["observation"] = ~batch.loss_mask
        pairs = {}
        for name, mask in terms.items():
            counted = mask & (weights != 0)
            total = torch.where(counted, nll.detach(), 0.0).sum()
            pairs[f"policy/{name}_nll"] = torch.stack([total, counted.sum()])
        return (weights * nll).sum(), pairs

    def _position_weights(self, old: Tensor, batch: TrainingBatch, mask: Tensor) -> Tensor:
        """[M, 1] weights of terms of a position, see `ImportanceCorrection.position_weights`."""
        if self.importance_correction is None:
            return torch.ones_like(old[:, :1])
        return self.importance_correction.position_weights(old, batch.sampler_logprobs, mask)

    def _kl_estimate(self, inputs: SurrogateInputs, batch: TrainingBatch) -> Tensor:
        """[M, C] KL estimate of each token, with gradient."""
        assert batch.ref_logprobs is not None, "kl_coef > 0 needs reference log-probs"
        # d = l_ref - l; k3 = e^d - d - 1 >= 0 (DeepSeekMath, eq. 4). Its gradient on-policy is
        # that of KL(reference || policy); times the ratio w, of KL(policy || reference).
        d = torch.where(inputs.mask, batch.ref_logprobs, 0.0) - inputs.logprobs
        given = self.kl_estimator
        estimator: KLEstimator = KL_ESTIMATORS[given] if isinstance(given, str) else given
        penalty = estimator(d) * inputs.correction
        return penalty * inputs.ratio if self.kl_bias_correction else penalty

    def _surrogate_inputs(self, new: TokenLogprobs, batch: TrainingBatch) -> SurrogateInputs:
        """Prepare the inputs of the surrogate, with zeros on padding.

        `torch.where` comes before any arithmetic: the gradient of 0 * NaN would be NaN.
        """
        in_loss = batch.loss_weights != 0
        logprobs = torch.where(in_loss, new.logprobs, 0.0)
        given = batch.sampler_logprobs if self.old_policy == "sampler" else batch.old_logprobs
        # Without one the ratio is 1, and its gradient that of the log-probability.
        old = logprobs.detach() if given is None else torch.where(in_loss, given, 0.0)
        # s = l - l_old, w = e^s. On-policy w is 1, and its gradient is that of l.
        log_ratio, correction = logprobs - old, torch.ones_like(logprobs)
        if self.importance_correction is not None:
            correction = self.importance_correction(old, batch.sampler_logprobs, in_loss)
        ratio = RATIOS[self.importance_sampling_level](log_ratio, in_loss)
        advantages = torch.where(in_loss, batch.advantages, 0.0)
        return SurrogateInputs(
            logprobs, log_ratio, ratio, advantages, in_loss, correction, batch.selected
        )
