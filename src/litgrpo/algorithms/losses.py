"""The objective: a few choices and the loss they make. Algorithms are rows of a table, not code."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from litgrpo.algorithms import importance, kl
from litgrpo.algorithms.advantages import Advantages, Normalized
from litgrpo.algorithms.turns import Turns
from litgrpo.distributed.collectives import Comm, SingleProcess
from litgrpo.tensors import bounded_exp, row_mean
from litgrpo.types import LossOutput, RewardTable, TokenLogprobs, TrainingBatch

ALONE = SingleProcess()
RATIO_MAX = "policy/ratio_max"


@dataclass(frozen=True)
class Tokens:
    """What a surrogate may look at; every field is finite, 0 or 1 on padding.

    Args:
        logprobs: [M, C] l, log-probability now, with gradient.
        log_ratio: [M, C] s, log-probability now minus before the update, with gradient.
        ratio: [M, C] or [M, 1] w, importance ratio of the update, with gradient.
        advantages: [M, C] A, how much better than expected.
        mask: [M, C] tokens that count.
        correction: [M, C] or [M, 1] weight of the trainer over the sampler.
    """

    logprobs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    mask: Tensor
    correction: Tensor


class Surrogate(ABC):
    """The loss of one token."""

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] loss of each token, corrected for the sampler."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Ratios below and above which a token pushed further loses gradient; for statistics."""
        return 0.0, torch.inf


@dataclass(frozen=True)
class Clipped(Surrogate):
    """GRPO, DAPO, GSPO: -min(min(w, cap) A, clip(w, 1 - clip_low, 1 + clip_high) A).

    Source: PPO, arXiv:1707.06347; clip-higher: DAPO, arXiv:2503.14476 (0.2, 0.28); GSPO,
    arXiv:2507.18071 (3e-4, 4e-4 with `ratio: sequence`); cap: INTELLECT-2, arXiv:2505.07291.

    Args:
        clip_low: how far below 1 the ratio may go.
        clip_high: how far above 1 the ratio may go.
        cap: two-sided clip: largest ratio of a bad token that became likely; not given: none.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float | None = None

    def __post_init__(self) -> None:
        """Check the range."""
        if min(self.clip_low, self.clip_high) < 0:
            raise ValueError(f"clip_low {self.clip_low}, clip_high {self.clip_high}: must be >= 0")

    def __call__(self, tokens: Tokens) -> Tensor:
        """[M, C] clipped loss."""
        free = tokens.ratio.clamp(max=torch.inf if self.cap is None else self.cap)
        clipped = tokens.ratio.clamp(*self.clip_range)
        worst = torch.minimum(free * tokens.advantages, clipped * tokens.advantages)
        return -worst * tokens.correction

    @property
    def clip_range(self) -> tuple[float, float]:
        """The range of the clip."""
        return 1 - self.clip_low, 1 + self.clip_high


class LossAggregation(ABC):
    """How much each token counts in the loss of one optimizer step, which is then a plain sum."""

    @abstractmethod
    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] weights, 0 off `mask`; the step has `rows` and `tokens` over all processes."""

    def within(self, weights: Tensor, mask: Tensor) -> Tensor:
        """[M, C] weights inside one micro-batch: the same, or they would depend on the split."""
        return weights


@dataclass(frozen=True)
class SequenceMean(LossAggregation):
    """GRPO: every completion counts the same, m / length / N. Source: arXiv:2402.03300."""

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / length / N."""
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / rows


@dataclass(frozen=True)
class TokenMean(LossAggregation):
    """DAPO: every token counts the same, m / tokens. Source: arXiv:2503.14476, section 3.3."""

    def __call__(self, mask: Tensor, rows: Tensor, tokens: Tensor, limit: int) -> Tensor:
        """[N, C] m / tokens."""
        return mask / tokens


@dataclass(frozen=True)
class Normalizers:
    """Numbers over all micro-batches and processes of one optimizer step.

    Args:
        num_tokens: [] tokens that the entropy bonus is a mean over.
        entropy_threshold: [] least entropy of a token to learn from; None for all tokens.
    """

    num_tokens: Tensor
    entropy_threshold: Tensor | None = None


@dataclass(frozen=True)
class Objective:
    """What training maximizes. The defaults are GRPO without a KL penalty.

    Args:
        advantages: how much better a completion is than expected.
        ratio: compare the policy with its past self per `token` or per `sequence` (GSPO).
        surrogate: the loss of one token.
        loss_aggregation: how much one token counts.
        kl_coef: weight of the penalty for leaving the reference; 0 loads no reference.
        kl: estimator of that penalty, a function of litgrpo.algorithms.kl: k1, k2, k3, absolute.
        kl_bias_correction: multiply it by the importance ratio (DeepSeek-V3.2, arXiv:2512.02556).
        entropy_coef: weight of a bonus for the mean entropy of the tokens that are learned from.
        gamma: an advantage shrinks by this factor per token before the last one; 1: not at all.
        mask_truncated_completions: learn nothing from completions cut off by the length limit
            (DAPO).
        top_entropy_quantile: learn from this share of tokens, of highest entropy
            (arXiv:2506.01939).
        off_policy_mask_threshold: drop bad completions that lost more nats per token
            (arXiv:2512.02556).
        importance_correction: weights for a sampler that differs from the trainer; not given: none.
    """

    advantages: Advantages = field(default_factory=Normalized)
    ratio: Literal["token", "sequence"] = "token"
    surrogate: Surrogate = field(default_factory=Clipped)
    loss_aggregation: LossAggregation = field(default_factory=SequenceMean)
    kl_coef: float = 0.0
    kl: Callable[..., Any] = kl.k3
    kl_bias_correction: bool = False
    entropy_coef: float = 0.0
    gamma: float = 1.0
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    importance_correction: importance.ImportanceCorrection | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.kl_coef < 0 or not 0 <= self.gamma <= 1 or not 0 <= self.top_entropy_quantile <= 1:
            given = f"{self.kl_coef}, {self.gamma} and {self.top_entropy_quantile}"
            raise ValueError(f"kl_coef (>= 0), gamma and top_entropy_quantile (0 to 1) are {given}")

    @property
    def needs_reference(self) -> bool:
        """Whether the experience must hold reference log-probabilities."""
        return self.kl_coef > 0

    @property
    def needs_all_rows(self) -> bool:
        """Whether a row of zero advantages can still have a gradient."""
        return self.kl_coef > 0 or self.entropy_coef != 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `normalizers` must see every token's entropy before the update."""
        return self.top_entropy_quantile < 1

    def token_advantages(
        self, rewards: RewardTable, mask: Tensor, comm: Comm = ALONE, turns: Turns | None = None
    ) -> Tensor:
        """[N, C] float32 advantage of every token of a rollout, 0 off `mask`.

        Args:
            rewards: what the N = B * G completions earned.
            mask: [N, C] True marks a token of the policy.
            comm: of the processes that share the batch.
            turns: of the episodes; None: every completion is one turn.
        """
        device, mask = mask.device, mask.to(rewards.total.device)
        lengths = mask.sum(1).view_as(rewards.total)
        if turns is None:
            found = self.advantages(rewards, lengths, comm).reshape(-1, 1)
        else:
            found = self.advantages.of_tokens(rewards, lengths, comm, turns)
        # The last token has the whole advantage: gamma ** (tokens of the policy after this one).
        to_come = (mask.flip(1).cumsum(1).flip(1) - 1).clamp(min=0)
        discounted = torch.where(mask, found * self.gamma ** to_come.double(), 0.0)
        return discounted.to(device, torch.float32)

    def token_weights(
        self,
        loss_mask: Tensor,
        truncated: Tensor,
        max_completion_length: int,
        comm: Comm = ALONE,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """[N, C] weight of every token of an optimizer step; exactly 0 where a token has no part.

        Args:
            loss_mask: [N, C] True marks a token of the policy.
            truncated: [N] True where the length limit stopped the completion.
            max_completion_length: that limit, in tokens.
            comm: of the processes that share the step.
            dtype: of the weights.
        """
        mask = (loss_mask & ~(truncated[:, None] & self.mask_truncated_completions)).to(dtype)
        rows = comm.sum(torch.ones_like(truncated, dtype=dtype).sum()).clamp(min=1)
        return self.loss_aggregation(
            mask, rows, comm.sum(mask.sum()).clamp(min=1), max_completion_length
        )

    def normalizers(
        self, weights: Tensor, entropy: Tensor | None = None, comm: Comm = ALONE
    ) -> Normalizers:
        """What the micro-batches of one optimizer step must agree on.

        Args:
            weights: [N, C] of all rows of the step on this process.
            entropy: [N, C] before the update; needed only if `needs_entropy`.
            comm: of the processes that share the step.
        """
        active, threshold = weights != 0, None
        if self.needs_entropy:
            assert entropy is not None, "top_entropy_quantile < 1 needs entropies"
            # float32: a quantile that falls on a token must not miss it by rounding in 1 - share.
            counted = entropy.detach().float()
            flat = counted.masked_fill(~active, torch.nan).flatten()
            threshold = comm.gather(flat).nanquantile(1 - self.top_entropy_quantile)
            active = active & (counted >= threshold)
        return Normalizers(comm.sum(active.sum()).clamp(min=1), threshold)

    def loss(
        self, new: TokenLogprobs, experience: TrainingBatch, normalizers: Normalizers | None = None
    ) -> LossOutput:
        """The share of a micro-batch in the loss of its optimizer step; the shares add up.

        Args:
            new: log-probabilities and entropies [M, C] now, with gradient.
            experience: M completions; no `old_logprobs`: the policy has not moved since sampling.
            normalizers: of the step, for the entropy bonus and mask; None if these rows are all
                of it.
        """
        if normalizers is None:
            normalizers = self.normalizers(experience.weights, new.entropy)
        tokens, active = self._tokens(new, experience), experience.weights != 0
        entropy, keep = torch.where(active, new.entropy, 0.0), active
        if normalizers.entropy_threshold is not None:
            keep = keep & (entropy.detach().float() >= normalizers.entropy_threshold)
        bonus = torch.where(keep, entropy, 0.0).sum()
        if self.off_policy_mask_threshold is not None:
            drift = torch.where(active, experience.sampler_logprobs - tokens.logprobs.detach(), 0.0)
            drift = row_mean(drift.nan_to_num(0.0), active)
            keep = keep & ((tokens.advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        token_loss = torch.where(keep, self.surrogate(tokens), 0.0)
        stats = {"policy/entropy_trained": entropy, "policy/log_ratio": tokens.log_ratio}
        low, high = self.surrogate.clip_range
        stats["policy/clip_low_frac"] = (tokens.ratio < low) & (tokens.advantages < 0)
        stats["policy/clip_high_frac"] = (tokens.ratio > high) & (tokens.advantages > 0)
        if keep is not active:
            stats["policy/kept_frac"] = keep
        if self.importance_correction is not None:
            stats["policy/sampler_weight"] = tokens.correction
        if self.needs_reference:
            assert experience.ref_logprobs is not None, "kl_coef > 0 needs reference log-probs"
            penalty = self.kl(torch.where(active, experience.ref_logprobs, 0.0) - tokens.logprobs)
            penalty = penalty * tokens.ratio if self.kl_bias_correction else penalty
            token_loss, stats["policy/kl"] = token_loss + self.kl_coef * penalty, penalty
        loss = (self.loss_aggregation.within(experience.weights, active) * token_loss).sum()
        loss = loss - self.entropy_coef * bonus / normalizers.num_tokens
        sums = {name: (value.detach() * active).sum() for name, value in stats.items()}
        pairs = {name: torch.stack([x, active.sum()]) for name, x in sums.items()}
        largest = tokens.ratio.detach().max()
        return LossOutput(
            loss, pairs | {RATIO_MAX: torch.stack([largest, torch.ones_like(largest)])}
        )

    def _tokens(self, new: TokenLogprobs, experience: TrainingBatch) -> Tokens:
        """What the surrogate sees; padding is cut off first, so that not even NaN in it matters."""
        active = experience.weights != 0
        logprobs, old = torch.where(active, new.logprobs, 0.0), experience.old_logprobs
        old = logprobs.detach() if old is None else torch.where(active, old, 0.0)
        s, correction = logprobs - old, torch.ones_like(logprobs)
        if self.importance_correction is not None:
            correction = self.importance_correction(old, experience.sampler_logprobs, active)
        w = bounded_exp(s if self.ratio == "token" else row_mean(s, active))
        advantages = torch.where(active, experience.advantages, 0.0)
        return Tokens(logprobs, s, w, advantages, active, correction)
