"""The training objective: surrogate loss, loss aggregation, KL penalty, importance correction.

An algorithm is a combination of these choices, not a class: `published` has them by name, and
docs/explanation/algorithm.md a table of them.

A loss is never a mean over a micro-batch. Each token gets a weight that is computed once for all
rows of an optimizer step (`Objective.loss_weights`), and the loss is the weighted sum over tokens.
So the gradient does not depend on how the step is split into micro-batches and processes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from litgrpo.algorithms.advantages import Advantages, Normalized
from litgrpo.algorithms.aggregation import LOSS_AGGREGATIONS, LossAggregation, LossAggregationName
from litgrpo.algorithms.correction import CORRECTIONS, CorrectionName, ImportanceCorrection
from litgrpo.algorithms.divergences import DIVERGENCES, Divergence, DivergenceName
from litgrpo.algorithms.inputs import LossInputs, Need
from litgrpo.algorithms.kl import KL_ESTIMATORS, KLInReward, KLName
from litgrpo.algorithms.masks import (
    CompletionMask,
    Completions,
    KeepTopEntropy,
    Mask,
    MaskLargeKL,
    MaskOffPolicy,
    MaskTruncated,
    MaskZeroVariance,
    StepMask,
    TokenMask,
)
from litgrpo.algorithms.ratios import RATIOS, ImportanceSamplingLevel
from litgrpo.algorithms.surrogates import Clipped, Surrogate
from litgrpo.algorithms.terms import (
    EntropyBonus,
    KLDivergence,
    KLEstimate,
    LogRatioPenalty,
    MeanTerm,
    ObservationNLL,
    PositiveNLL,
    StepTokens,
    Term,
)
from litgrpo.algorithms.token_selection import token_keys
from litgrpo.algorithms.turns import Turns
from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.run_options import RunOptions
from litgrpo.types import LossOutput, RewardTable, TokenLogprobs, TrainingBatch

ALONE = SingleProcess()


RATIO_MAX = "policy/ratio_max"


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
            that is a mean over its samples (see `find_uncorrected`): tis, icepop, mis, or an
            ImportanceCorrection; null: none.
        positive_nll: adds the cross-entropy of correct completions to the loss (VAPO); null: none.
        observation_nll_coef: coefficient of the cross-entropy of the tokens of an environment, the
            mean over those of the optimizer step (ECHO, arXiv:2605.24517; prime-rl: `echo`, alpha
            0.1). It needs an environment, and sampling from all tokens.
        kl_in_reward: subtracts the KL to the reference from the reward; null: the KL is only a term
            of the loss (`kl_coef`).
        masks: further masks, of your own classes: `CompletionMask`, `TokenMask` or `StepMask`.
        terms: further terms of the loss, of your own classes: `Term` or `MeanTerm`.

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
    importance_correction: CorrectionName | ImportanceCorrection | None = None
    positive_nll: PositiveNLL | None = None
    observation_nll_coef: float = 0.0
    kl_in_reward: KLInReward | None = None
    masks: tuple[Mask, ...] = ()
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        self._check_names()
        for name in ("reward_coef", "kl_coef", "log_ratio_coef", "observation_nll_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 0")
        if self.advantage_clip is not None and not self.advantage_clip > 0:
            raise ValueError(f"advantage_clip is {self.advantage_clip}; it must be above 0")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef is {self.entropy_coef}; it must be finite")
        for name in ("gamma", "top_entropy_quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 0 to 1")
        assert self.needs is not None  # builds the masks and terms, which check their values
        self._check_combinations()

    def _check_names(self) -> None:
        """Reject unknown names; a Python caller has no parser to check them."""
        names = {
            "loss_aggregation": get_args(LossAggregationName),
            "kl_estimator": (*get_args(KLName), *get_args(DivergenceName)),
            "importance_correction": (None, *get_args(CorrectionName)),
        }
        for option, allowed_names in names.items():
            value = getattr(self, option)
            if not callable(value) and value not in allowed_names:
                allowed = ", ".join(filter(None, allowed_names))
                raise ValueError(f"{option} is {value!r}; it must be one of {allowed}, or callable")

    def _check_combinations(self) -> None:
        """Reject options that exclude each other, or leave nothing to learn."""
        imitates = self.positive_nll is not None or self.observation_nll_coef
        if not (self.reward_coef or self.kl_coef or imitates or self.terms):
            raise ValueError(
                "reward_coef and kl_coef are 0, so there is nothing to learn. Set reward_coef to "
                "learn from rewards, or kl_coef and a reference to learn from a teacher"
            )
        if self.old_policy == "sampler" and self.importance_correction is not None:
            raise ValueError(
                "old_policy is sampler, so the ratio already corrects for the sampler; set "
                "importance_correction to null, or old_policy to before_update"
            )
        if self.surrogate.is_per_token and self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level is {self.importance_sampling_level}, but "
                f"{type(self.surrogate).__name__} limits the probabilities of single tokens; set "
                "it to token"
            )
        self.advantages.check_contained()
        if self.kl_in_reward is not None and not self.advantages.uses_total:
            raise ValueError(
                f"kl_in_reward lowers the total reward, but {type(self.advantages).__name__} "
                "normalizes each reward function separately (GDPO); set kl_in_reward to null and "
                "use kl_coef, or other advantages"
            )
        by_metric: dict[str, Term] = {}
        for term in self.all_terms:
            if term.metric and by_metric.setdefault(term.metric, term) is not term:
                names = f"{name_of(by_metric[term.metric])} and {name_of(term)}"
                raise ValueError(
                    f"{names} are both logged as policy/{term.metric}; leave one of them out, or "
                    "give its class another metric"
                )
        compared = [name_of(term) for term in self.all_terms if term.of_vocabulary is not None]
        if len(compared) > 1:
            raise ValueError(
                f"{' and '.join(compared)} each compare the policy with the reference over the "
                "vocabulary, but one objective can have one such term; leave one of them out"
            )

    def check(self, run: RunOptions) -> None:
        """Check that the other options of a run give this objective what it learns from.

        Raises:
            ValueError: they do not; the message names both options.
        """
        name = type(self.advantages).__name__
        if run.group_size == 1 and self.reward_coef and self.advantages.needs_group:
            raise ValueError(
                "group_size is 1, but this objective compares completions of the same prompt. Set "
                "group_size to 2 or more, or model.objective.advantages.baseline and .scale to "
                "batch or none."
            )
        if self.advantages.needs_greedy:
            if run.dynamic_sampling_attempts:
                raise ValueError(
                    f"model.objective.advantages is {name}, whose baseline is a greedy completion: "
                    "groups of equal rewards have an advantage. Set "
                    "model.dynamic_sampling_attempts to 0."
                )
            for key, reward in run.rewards.items():
                if reward.normalize != "none":
                    raise ValueError(
                        f"model.objective.advantages is {name}, whose baseline is the reward of a "
                        f"single greedy completion, but model.rewards.{key}.normalize is "
                        f"{reward.normalize}. Set it to none."
                    )
        if self.observation_nll_coef:
            self._check_observations(run)

    def _check_observations(self, run: RunOptions) -> None:
        """Check that there are observations, with log-probabilities over all tokens."""
        setting = f"model.objective.observation_nll_coef is {self.observation_nll_coef}"
        if run.environment is None:
            raise ValueError(
                f"{setting}, but there is no model.environment, so no observations to predict. Set "
                "it to 0, or set an environment."
            )
        if run.has_segments:
            raise ValueError(
                f"{setting}, but model.environment is an Agent, whose observations include replies "
                "of the policy in other segments. Set it to 0."
            )
        if run.sampling.has_filters:
            raise ValueError(
                f"{setting}, but model.sampling has top_k, top_p or min_p: log-probabilities are "
                "then over the tokens that could be sampled, and observations were not sampled. "
                "Remove the filters, or set it to 0."
            )

    # --- its parts ---

    @property
    def resolved_aggregation(self) -> LossAggregation:
        """The loss aggregation, looked up if it was given by name."""
        if isinstance(self.loss_aggregation, str):
            return LOSS_AGGREGATIONS[self.loss_aggregation]
        return self.loss_aggregation

    @property
    def resolved_correction(self) -> ImportanceCorrection | None:
        """The importance correction, looked up if it was given by name."""
        if isinstance(self.importance_correction, str):
            return CORRECTIONS[self.importance_correction]
        return self.importance_correction

    @cached_property
    def all_terms(self) -> tuple[Term, ...]:
        """All terms in use beside the surrogate loss: those of options, then `terms`."""
        kl: Term
        estimator = self.kl_estimator
        if isinstance(estimator, str):
            estimator = DIVERGENCES.get(estimator) or KL_ESTIMATORS[estimator]
        if isinstance(estimator, Divergence):
            kl = KLDivergence(self.kl_coef, estimator)
        else:
            kl = KLEstimate(self.kl_coef, estimator, self.kl_bias_correction)
        options = (
            kl,
            LogRatioPenalty(self.log_ratio_coef),
            EntropyBonus(self.entropy_coef),
            *([] if self.positive_nll is None else [self.positive_nll]),
            ObservationNLL(self.observation_nll_coef),
        )
        return (*(term for term in options if term.coef != 0), *self.terms)

    @cached_property
    def mean_terms(self) -> tuple[MeanTerm, ...]:
        """Terms that are means over tokens of their own, in the order of their weights."""
        return tuple(term for term in self.all_terms if isinstance(term, MeanTerm))

    @cached_property
    def all_masks(self) -> tuple[Mask, ...]:
        """All masks in use: those of options, then `masks`."""
        options: list[Mask] = []
        if self.mask_truncated_completions:
            options.append(MaskTruncated())
        if self.exclude_zero_variance:
            options.append(MaskZeroVariance())
        if self.top_entropy_quantile < 1:
            options.append(KeepTopEntropy(self.top_entropy_quantile))
        if self.off_policy_mask_threshold is not None:
            options.append(MaskOffPolicy(self.off_policy_mask_threshold))
        if self.kl_mask_threshold is not None:
            options.append(MaskLargeKL(self.kl_mask_threshold))
        return (*options, *self.masks)

    @cached_property
    def needs(self) -> frozenset[Need]:
        """All that the surrogate, masks, terms and the KL in the reward need."""
        needs = self.surrogate.needs.union(
            *(mask.needs for mask in self.all_masks), *(term.needs for term in self.all_terms)
        )
        if self.kl_in_reward is not None:
            needs |= self.kl_in_reward.needs
            if self.corrects_sampler:
                needs |= {"policy_logprobs"}
        return needs

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the rewards are computed with a reference model."""
        return not self.needs.isdisjoint({"ref_logprobs", "ref_hidden"})

    @property
    def divergence(self) -> Divergence | None:
        """Divergence over the vocabulary that a term needs; None: no term does."""
        divergences = (term.of_vocabulary for term in self.all_terms)
        return next((divergence for divergence in divergences if divergence is not None), None)

    @property
    def corrects_sampler(self) -> bool:
        """True if the loss accounts for completions of another policy than that of the update."""
        return self.importance_correction is not None or self.old_policy == "sampler"

    def find_uncorrected(self) -> list[str]:
        """Names of the terms in use that `importance_correction` or `old_policy` do not weight.

        A term of the sampled token has its weight. A term of a position (a divergence over the
        vocabulary, the entropy, an observation) has that of the completion, if there is one. With
        `old_policy: sampler` only terms with the ratio are weighted.
        """
        correction, to_sampler = self.resolved_correction, self.old_policy == "sampler"

        def is_weighted(part: Surrogate | Term) -> bool:
            if part.ignores_token:
                return correction is not None and correction.level != "token"
            return correction is not None or (to_sampler and part.uses_ratio)

        parts: dict[str, Surrogate | Term] = {}
        if self.reward_coef > 0:
            parts["the surrogate loss"] = self.surrogate
        parts |= {name_of(term): term for term in self.all_terms}
        return [name for name, part in parts.items() if not is_weighted(part)]

    # --- before the update ---

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
            score_norms: [N, C] see `TokenLogprobs`; needed if `advantages.needs_score_norms`.
        """
        device, mask = mask.device, mask.to(rewards.total.device)
        values = self.advantages.per_token(rewards, mask, comm, turns, score_norms)
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
        completions = Completions(truncated, counted if informative is None else informative)
        for completion_mask in self.all_masks:
            if isinstance(completion_mask, CompletionMask):
                in_loss = completion_mask(completions)
                loss_mask = loss_mask & in_loss[:, None]
                counted = counted if completion_mask.is_counted else counted & in_loss
        mask = loss_mask.to(dtype)
        num_completions = comm.sum(counted.to(dtype).sum()).clamp(min=1)
        num_tokens = comm.sum(mask.sum()).clamp(min=1)
        return self.resolved_aggregation(mask, num_completions, num_tokens, max_completion_length)

    def subtract_kl(
        self, rewards: RewardTable, logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor
    ) -> RewardTable:
        """Return the rewards without the KL of `kl_in_reward`; the same ones without that option.

        Args:
            rewards: of N = B * G completions.
            logprobs: [N, C] at sampling; before the update if `needs` has `policy_logprobs`.
            ref_logprobs: [N, C] under the reference; needed only with `kl_in_reward`.
            mask: [N, C] True marks a generated token.
        """
        if self.kl_in_reward is None:
            return rewards
        assert ref_logprobs is not None, "kl_in_reward needs reference log-probs"
        kl = self.kl_in_reward.token_kl(logprobs, ref_logprobs, mask).sum(1).to(rewards.total)
        total = rewards.total - self.kl_in_reward.coef * kl.view_as(rewards.total)
        return replace(rewards, total=total)

    def term_weights(
        self, tokens: StepTokens, comm: Comm = ALONE, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[M, C, K] weights of the K `mean_terms` in an optimizer step; there is at least one.

        Args:
            tokens: of the step.
            comm: of the ranks that share the step.
            dtype: of the weights.
        """
        selected = [term.select(tokens).to(dtype) for term in self.mean_terms]
        return torch.stack([_mean_weights(mask, comm) for mask in selected], -1)

    def prepare_step(
        self,
        batch: TrainingBatch,
        step_logprobs: TokenLogprobs | None = None,
        comm: Comm = ALONE,
    ) -> TrainingBatch:
        """Return all rows of an optimizer step with what depends on all of its tokens.

        These are the weights of means, the tokens that the surrogate selects, and those that step
        masks keep. The denominators of the loss weights are those of the step already.

        Args:
            batch: all rows of the step on this rank.
            step_logprobs: [M, C] log-probabilities and entropies before the step; needed only if
                `needs` has `before_step`.
            comm: of the ranks that share the step.
        """
        if batch.term_weights is None and self.mean_terms:
            observed = batch.tokens.completion_mask & ~batch.loss_mask
            tokens = StepTokens(batch.loss_mask, observed, in_loss=batch.loss_weights != 0)
            dtype = batch.loss_weights.dtype
            batch = batch.with_term_weights(self.term_weights(tokens, comm, dtype))
        if "before_step" not in self.needs:
            return batch
        assert step_logprobs is not None, (
            "the surrogate or a mask needs log-probabilities of the step"
        )
        with torch.no_grad():
            inputs = self._inputs(step_logprobs, batch)
            selected, step_mask = None, inputs.mask
            if "before_step" in self.surrogate.needs:
                selected = self.surrogate.select(inputs, token_keys(batch.tokens), comm)
            for mask in self.all_masks:
                if isinstance(mask, StepMask):
                    step_mask = step_mask & mask(inputs, comm)
            if batch.term_weights is not None:
                weights = self._renormalize(batch.term_weights, step_mask, comm)
                batch = batch.with_term_weights(weights)
        return replace(batch, selected=selected, step_mask=step_mask)

    def _renormalize(self, weights: Tensor, step_mask: Tensor, comm: Comm) -> Tensor:
        """[M, C, K] weights of means, of which some are over tokens of the step masks only."""
        by_term = list(weights.unbind(-1))
        for number, term in enumerate(self.mean_terms):
            if term.follows_masks:
                counted = step_mask & (by_term[number] != 0)
                by_term[number] = _mean_weights(counted.to(weights.dtype), comm)
        return torch.stack(by_term, -1)

    # --- the loss ---

    def loss(self, new: TokenLogprobs, batch: TrainingBatch) -> LossOutput:
        """Loss of a micro-batch; the losses of an optimizer step's micro-batches add up.

        Args:
            new: [M, C] current log-probabilities and entropies, with gradient.
            batch: M completions; without `old_logprobs` the current policy is the old one: there is
                one optimizer step per rollout. If it needs `prepare_step` and has not passed it,
                these are all rows of the step.
        """
        if not self._is_prepared(batch):
            batch = self.prepare_step(batch, new)
        inputs = self._inputs(new, batch)
        in_loss = inputs.mask
        # Masks leave tokens out of the policy-gradient term, and of means that follow step masks.
        surrogate_mask = self._surrogate_mask(inputs)
        low, high = self.surrogate.find_clipped(inputs)
        stats = {
            "policy/entropy_trained": inputs.entropy,
            "policy/log_ratio": inputs.log_ratio,
            "policy/clip_low_frac": low,
            "policy/clip_high_frac": high,
        }
        if surrogate_mask is not in_loss:
            stats["policy/kept_frac"] = surrogate_mask
        if inputs.selected is not None:
            stats["policy/selected_frac"] = inputs.selected
        if self.importance_correction is not None:
            stats["policy/sampler_weight"] = inputs.sampler_weight
        # loss = sum_t u_t (reward_coef surrogate_t + sum over terms of coef value_t)
        #        + sum over mean terms of coef sum_t v_t value_t.
        # The weights u and v contain the denominators of the whole optimizer step, so micro-batches
        # add up.
        token_loss = self.reward_coef * torch.where(surrogate_mask, self.surrogate(inputs), 0.0)
        for term in self.all_terms:
            if not isinstance(term, MeanTerm):
                value = term(inputs) * self._sampler_weight(term, inputs)
                token_loss = token_loss + term.coef * value
                if term.metric:
                    stats[f"policy/{term.metric}"] = value
        weights = self.resolved_aggregation.rescale_micro_batch(batch.loss_weights, in_loss)
        loss = (weights * token_loss).sum()
        count = in_loss.sum()
        pairs = {
            name: torch.stack([(value.detach() * in_loss).sum(), count])
            for name, value in stats.items()
        }
        largest = inputs.ratio.detach().max()
        pairs[RATIO_MAX] = torch.stack([largest, in_loss.any().to(largest)])
        for number, mean_term in enumerate(self.mean_terms):
            assert batch.term_weights is not None
            weights = batch.term_weights[..., number] * self._sampler_weight(mean_term, inputs)
            value = torch.where(weights != 0, mean_term(inputs), 0.0)
            loss = loss + mean_term.coef * (weights * value).sum()
            if mean_term.metric:
                numbers = [value.detach().sum(), (weights != 0).sum()]
                pairs[f"policy/{mean_term.metric}"] = torch.stack(numbers)
        return LossOutput(loss, pairs)

    def _is_prepared(self, batch: TrainingBatch) -> bool:
        """Return False if the loss needs what `prepare_step` adds, and the rows do not have it."""
        has_weights = not self.mean_terms or batch.term_weights is not None
        return has_weights and ("before_step" not in self.needs or batch.step_mask is not None)

    def _surrogate_mask(self, inputs: LossInputs) -> Tensor:
        """[M, C] tokens with a surrogate loss; `inputs.mask` itself without a mask of tokens."""
        surrogate_mask = inputs.mask
        for mask in self.all_masks:
            if isinstance(mask, StepMask):
                assert inputs.batch.step_mask is not None
                surrogate_mask = surrogate_mask & inputs.batch.step_mask
            elif isinstance(mask, TokenMask):
                surrogate_mask = surrogate_mask & mask(inputs)
        return surrogate_mask

    @staticmethod
    def _sampler_weight(term: Term, inputs: LossInputs) -> Tensor:
        """[M, C] or [M, 1] importance weight of a term's value; 1 without a correction."""
        return inputs.completion_weight if term.ignores_token else inputs.sampler_weight

    def _inputs(self, new: TokenLogprobs, batch: TrainingBatch) -> LossInputs:
        """Prepare the inputs of surrogate, masks and terms, with zeros on padding."""
        in_loss = batch.loss_weights != 0
        # Zeros come before any arithmetic: the gradient of 0 * NaN would be NaN.
        logprobs = torch.where(in_loss, new.logprobs, 0.0)
        old = batch.sampler_logprobs if self.old_policy == "sampler" else batch.old_logprobs
        # s = l - l_old, w = e^s. On-policy there is no l_old: w is 1, and its gradient that of l.
        log_ratio = logprobs - (
            logprobs.detach() if old is None else torch.where(in_loss, old, 0.0)
        )
        sampler_weight = torch.ones_like(logprobs)
        completion_weight = torch.ones_like(logprobs[:, :1])
        correction = self.resolved_correction
        if correction is not None:
            # Of all generated tokens: those without a weight in the loss may be imitated.
            trainer_logprobs = batch.old_logprobs
            if trainer_logprobs is None:
                trainer_logprobs = new.logprobs.detach()
            arguments = trainer_logprobs, batch.sampler_logprobs, batch.loss_mask
            sampler_weight = correction(*arguments)
            completion_weight = correction.completion_weight(*arguments)
        return LossInputs(
            logprobs=logprobs,
            log_ratio=log_ratio,
            ratio=RATIOS[self.importance_sampling_level](log_ratio, in_loss),
            advantages=torch.where(in_loss, batch.advantages, 0.0),
            mask=in_loss,
            sampler_weight=sampler_weight,
            selected=batch.selected,
            entropy=torch.where(in_loss, new.entropy, 0.0),
            completion_weight=completion_weight,
            new=new,
            batch=batch,
        )


def _mean_weights(mask: Tensor, comm: Comm) -> Tensor:
    """[M, C] 1 / number of tokens of the optimizer step on all ranks, 0 off the mask."""
    return mask / comm.sum(mask.sum()).clamp(min=1)


def name_of(term: Term) -> str:
    """Return the option that a term comes from, or its class."""
    return term.setting or type(term).__name__
