"""Advantage estimators of whole completions; those of single turns are in `turns`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from litgrpo.argument_types import check_field_types
from litgrpo.distributed.collectives import Comm
from litgrpo.types import ROUNDING, RewardTable, compare_within_groups

if TYPE_CHECKING:
    from litgrpo.algorithms.turns import Turns

LARGEST_REWARD = 1e20  # counts as infinite: float32 could not hold the loss of a larger one


@dataclass(frozen=True)
class Groups:
    """The rewards of a batch by group, with the statistics that advantages are made of.

    Args:
        table: rewards of B * G completions.
        lengths: [B, G] generated tokens of each completion.
        comm: of the processes that share the batch.
        values: [B, G] float64 rewards in use; NaN for completions without a valid reward.

    Example:
        One group of two completions::

            Groups(
                table=RewardTable(...),
                lengths=tensor([[12, 9]]),
                comm=SingleProcess(),
                values=tensor([[0.0, 1.0]], dtype=float64),
            )
    """

    table: RewardTable
    lengths: Tensor
    comm: Comm
    values: Tensor

    @classmethod
    def from_table(cls, table: RewardTable, lengths: Tensor, comm: Comm) -> Groups:
        """Groups of the total rewards; arguments as of the class."""
        return cls(table, lengths, comm, table.total).with_rewards(table.total, table.valid)

    def with_rewards(self, rewards: Tensor, valid: Tensor) -> Groups:
        """The same groups with other rewards [B, G]; NaN for invalid or infinite ones."""
        usable = valid & (rewards.abs() < LARGEST_REWARD)
        return replace(self, values=rewards.double().where(usable, torch.nan))

    def select(self, rows: Tensor) -> Groups:
        """The groups where `rows` [B] is True."""
        table = self.table

        def of(parts: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: part[rows] for name, part in parts.items()}

        selected = replace(
            table,
            components=of(table.components),
            processed=of(table.processed),
            total=table.total[rows],
            valid=table.valid[rows],
            greedy=None if table.greedy is None else table.greedy[rows.to(table.greedy.device)],
            tasks=list(compress(table.tasks, rows.tolist())),
        )
        return replace(self, table=selected, lengths=self.lengths[rows], values=self.values[rows])

    def group_statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B, G] deviation from the group's mean, [B, 1] standard deviation, [B, 1] n - 1."""
        return compare_within_groups(self.values)

    def batch_statistics(self) -> tuple[Tensor, Tensor]:
        """[B, G] deviation from the mean of all ranks' rewards, [] their standard deviation."""
        count = self.comm.sum((~self.values.isnan()).sum().double())
        mean = self.comm.sum(self.values.nansum()) / count.clamp(min=1)
        squares = self.comm.sum((self.values - mean).square().nansum())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        # Rewards that differ only by rounding deviate by exactly 0.
        differ = std > ROUNDING * mean.abs()
        return torch.where(differ, self.values - mean, 0.0), std.where(differ, 0.0)


class Advantages(ABC):
    """Advantage estimator: how much better a completion is than expected.

    Example:
        An estimator is a frozen dataclass; its fields are the options of the config::

            @dataclass(frozen=True)
            class MeanCentered(Advantages):
                def estimate(self, groups):
                    return groups.values - groups.values.nanmean(1, keepdim=True)
    """

    # Tokens that share an advantage: of a completion, a turn, or one token. It has no annotation,
    # which jsonargparse would look up in the module of every subclass.
    granularity = "completion"

    @property
    def contained(self) -> dict[str, Advantages]:
        """{option: estimator} whose advantages this one changes; {} without one."""
        options = vars(self).items()
        tasks = [
            (f"task {task!r}", estimator)
            for _, value in options
            if isinstance(value, dict)
            for task, estimator in value.items()
        ]
        return {name: x for name, x in [*tasks, *options] if isinstance(x, Advantages)}

    def check_contained(self) -> None:
        """Check that contained estimators have one advantage per completion: others are lost."""
        outer = type(self).__name__
        for option, estimator in self.contained.items():
            if estimator.granularity != "completion":
                inner = type(estimator).__name__
                swapped = f", or {outer} as {inner}.advantages" if estimator.contained else ""
                raise ValueError(
                    f"{inner} of {option} has one advantage per {estimator.granularity}, but "
                    f"{outer} takes estimators of whole completions. Set {inner} as "
                    f"model.objective.advantages{swapped}."
                )
            estimator.check_contained()

    @property
    def needs_group(self) -> bool:
        """True if a prompt needs at least two completions."""
        return not self.contained or any(x.needs_group for x in self.contained.values())

    @property
    def needs_greedy(self) -> bool:
        """True if each prompt needs a greedy completion as well, see `RewardTable.greedy`."""
        return any(x.needs_greedy for x in self.contained.values())

    @property
    def needs_score_norms(self) -> bool:
        """True if `per_token` needs `TokenLogprobs.score_norms` of the policy before the update."""
        return False

    @property
    def uses_total(self) -> bool:
        """True if the advantages follow the total reward, not each reward function separately."""
        return all(x.uses_total for x in self.contained.values())

    def __call__(self, table: RewardTable, lengths: Tensor, comm: Comm) -> Tensor:
        """[B, G] float64 advantages, 0 for rows without a valid reward.

        Args:
            table: rewards of B * G completions.
            lengths: [B, G] generated tokens of each completion.
            comm: of the processes that share the batch.
        """
        groups = Groups.from_table(table, lengths, comm)
        return torch.where(groups.values.isnan(), 0.0, self.estimate(groups)).nan_to_num(0.0)

    def per_token(
        self,
        table: RewardTable,
        mask: Tensor,
        comm: Comm,
        turns: Turns | None = None,
        score_norms: Tensor | None = None,
    ) -> Tensor:
        """[N, C] or [N, 1] float64 advantages of tokens, anything off `mask`.

        Args:
            table: rewards of N = B * G completions.
            mask: [N, C] True marks a generated token.
            comm: of the processes that share the batch.
            turns: of the episodes; None: every completion is one turn.
            score_norms: [N, C] squared norms, see `TokenLogprobs`.
        """
        return self(table, mask.sum(1).view_as(table.total), comm).reshape(-1, 1)

    @abstractmethod
    def estimate(self, groups: Groups) -> Tensor:
        """[B, G] advantages; NaN is none: it counts as 0, and in no statistic of `Whitened`."""


@check_field_types
@dataclass(frozen=True)
class Normalized(Advantages):
    """Reward minus a baseline, divided by a scale: (r - baseline) / scale.

    GRPO: group, group (arXiv:2402.03300). Dr. GRPO: group, none (arXiv:2503.20783). RLOO: others,
    none (arXiv:2402.14740). REINFORCE: none | batch, none. REINFORCE++: batch, batch (2501.03262),
    where a completion counts once; OpenRLHF, verl and NeMo-RL count it as often as it has tokens.
    MaxRL: group, mean (arXiv:2602.02710), for rewards that are not negative. OPO: length_weighted,
    none (arXiv:2505.23585).

    Args:
        baseline: mean of the `group`, of the `others` in it, of the `batch`, or `none`;
            `length_weighted`: mean of the group in which a completion counts as much as it is long.
        scale: standard deviation (n - 1) of the `group` or `batch`, its absolute `mean`, or
            `none`.
        eps: added to a standard deviation; the smallest absolute mean. A standard deviation of 0,
            and with `eps: 0` a mean of 0, gives zero advantages.

    Example:
        >>> from litgrpo.distributed.collectives import SingleProcess
        >>> rewards = torch.tensor([[0.0, 1.0]])
        >>> table = RewardTable({"r": rewards}, {"r": 1.0}, rewards, torch.ones(1, 2).bool())
        >>> Normalized(eps=0.0)(table, torch.tensor([[3, 5]]), SingleProcess())
        tensor([[-0.7071,  0.7071]], dtype=torch.float64)
    """

    baseline: Literal["group", "others", "length_weighted", "batch", "none"] = "group"
    scale: Literal["group", "batch", "mean", "none"] = "group"
    eps: float = 1e-4

    @property
    def needs_group(self) -> bool:
        return self.baseline not in ("batch", "none") or self.scale == "group"

    def estimate(self, groups: Groups) -> Tensor:
        deviation, std, degrees_of_freedom = groups.group_statistics()
        match self.baseline:
            case "group":
                centered = deviation
            case "others":
                # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
                centered = deviation * (degrees_of_freedom + 1) / degrees_of_freedom
            case "length_weighted":
                # r - sum(n r) / sum(n), with deviations: exactly 0 if all rewards are equal
                lengths = groups.lengths.where(~deviation.isnan(), 0)
                weighted = (lengths * deviation.nan_to_num(0.0)).sum(1, keepdim=True)
                centered = deviation - weighted / lengths.sum(1, keepdim=True).clamp(min=1)
            case "batch":
                centered = groups.batch_statistics()[0]
            case "none":
                centered = groups.values
        match self.scale:
            case "group":
                return _divide(centered, std, self.eps)
            case "batch":
                return _divide(centered, groups.batch_statistics()[1], self.eps)
            case "mean":
                mean = groups.values.nanmean(1, keepdim=True)
                return _divide(centered, mean.abs().clamp(min=self.eps), 0.0)
            case "none":
                return centered


def _divide(centered: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Divide by scale + eps; 0 if the scale is 0."""
    # The mean of a group without variance may differ from the mean of the batch. That difference,
    # divided by eps alone, would be an advantage whose size depends on eps only.
    return torch.where(scale > 0, centered / (scale + eps), 0.0)


@check_field_types
@dataclass(frozen=True)
class ReMax(Advantages):
    """ReMax: the reward minus that of the prompt's greedy completion.

    Each iteration generates one more completion per prompt, at temperature 0, which is not trained
    on. A group may be a single completion. Source: arXiv:2310.10505; verl: `remax`.

    Example:
        >>> from litgrpo.distributed.collectives import SingleProcess
        >>> rewards, valid = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2).bool()
        >>> table = RewardTable(
        ...     {"r": rewards}, {"r": 1.0}, rewards, valid, greedy=torch.tensor([0.8])
        ... )
        >>> ReMax()(table, torch.tensor([[3, 5]]), SingleProcess())
        tensor([[-0.8000,  0.2000]], dtype=torch.float64)
    """

    @property
    def needs_group(self) -> bool:
        return False

    @property
    def needs_greedy(self) -> bool:
        return True

    def estimate(self, groups: Groups) -> Tensor:
        greedy = groups.table.greedy
        # The start-up checks generate no greedy completions: their baseline is 0.
        return (
            groups.values if greedy is None else groups.values - greedy[:, None].to(groups.values)
        )


@check_field_types
@dataclass(frozen=True)
class OptimalTokenBaseline(Advantages):
    """Optimal token baseline: the reward minus a baseline of each token that weights the group.

    A_it = r_i - sum_j W_jt r_j / sum_j W_jt, over the completions j of the group that have a token
    t; W_jt = sum of |score_jk|^2 over its tokens k <= t, and |score|^2 = 1 - 2 p + sum_v p_v^2, the
    squared gradient of log p by the logits. This baseline minimizes the variance of the gradient by
    the logits if scores of different tokens are uncorrelated. Tokens beyond the end of all other
    completions of the group have no advantage. In episodes, t counts generated tokens. It takes
    one more forward pass before the update. Source: arXiv:2602.07078; verl:
    `optimal_token_baseline`, with episodes `tir_optimal_token_baseline`.

    Example:
        >>> from litgrpo.distributed.collectives import SingleProcess
        >>> rewards, valid = torch.tensor([[0.0, 1.0]]).double(), torch.ones(1, 2).bool()
        >>> table = RewardTable({"r": rewards}, {"r": 1.0}, rewards, valid)
        >>> norms = torch.tensor([[0.3, 0.3], [0.1, 0.1]])
        >>> OptimalTokenBaseline().per_token(table, norms > 0, SingleProcess(), score_norms=norms)
        tensor([[-0.2500, -0.2500],
                [ 0.7500,  0.7500]], dtype=torch.float64)
    """

    granularity = "token"

    @property
    def needs_score_norms(self) -> bool:
        return True

    def estimate(self, groups: Groups) -> Tensor:
        raise ValueError(
            "OptimalTokenBaseline gives each token an advantage, so other advantages cannot "
            "contain it. Set it as model.objective.advantages."
        )

    def per_token(
        self,
        table: RewardTable,
        mask: Tensor,
        comm: Comm,
        turns: Turns | None = None,
        score_norms: Tensor | None = None,
    ) -> Tensor:
        assert score_norms is not None, "OptimalTokenBaseline needs score norms"
        lengths = mask.sum(1).view_as(table.total)
        # Deviations from the group's mean: exactly 0 if all rewards are equal.
        deviation = Groups.from_table(table, lengths, comm).group_statistics()[0][..., None]
        valid = ~deviation.isnan()
        # Column t holds the t-th generated token of each completion.
        token_number = (mask.cumsum(1) - 1).clamp(min=0)
        norms = score_norms.to(mask.device).double().where(mask, 0.0)
        packed = (
            torch.zeros_like(norms).scatter_add(1, token_number, norms).view(*lengths.shape, -1)
        )
        exists = torch.arange(mask.shape[1], device=mask.device) < lengths[..., None]
        weights = packed.cumsum(2).where(exists & valid, 0.0)
        deviation = deviation.nan_to_num(0.0)
        total = weights.sum(1, keepdim=True)
        baseline = (weights * deviation).sum(1, keepdim=True) / total.where(total > 0, 1.0)
        alone = (exists & valid).sum(1, keepdim=True) == 1
        advantages = (deviation - baseline).masked_fill(alone | ~valid, 0.0)
        return advantages.flatten(0, 1).gather(1, token_number).where(mask, 0.0)


@check_field_types
@dataclass(frozen=True)
class GDPO(Advantages):
    """GDPO: each reward function normalized in its group, weighted, summed, scaled by the batch.

    A reward function of small spread then counts as much as one of large spread. Source:
    arXiv:2601.05242. TRL: `multi_objective_aggregation: normalize_then_sum`.

    Args:
        eps: added to each standard deviation.
    """

    eps: float = 1e-4

    @property
    def uses_total(self) -> bool:
        return False

    def estimate(self, groups: Groups) -> Tensor:
        table, total = groups.table, torch.zeros_like(groups.values)
        valid = ~groups.values.isnan()  # GFPO may have left completions out
        for name, component in table.processed.items():
            deviation, std, _ = groups.with_rewards(component, valid).group_statistics()
            total = total + table.weights[name] * (deviation / (std + self.eps)).nan_to_num(0.0)
        # Every component sums to 0 in each group, so the mean over the batch is 0 already.
        _, std = groups.with_rewards(total, valid).batch_statistics()
        return total / (std + self.eps)


@check_field_types
@dataclass(frozen=True)
class GFPO(Advantages):
    """GFPO: only the best completions of each group, and ties, keep their advantage.

    Source: arXiv:2508.09726, which ranks by `shortest` or `reward_per_token`, with
    `normalize_kept_only`.

    Args:
        keep_frac: fraction of the group that keeps its advantage.
        rank_by: highest `reward`, `shortest` completion, or highest `reward_per_token`.
        normalize_kept_only: compute the advantages from the kept completions, not from the group.
        advantages: advantage estimator.
    """

    keep_frac: float = 0.5
    rank_by: Literal["reward", "shortest", "reward_per_token"] = "reward"
    normalize_kept_only: bool = False
    advantages: Advantages = field(default_factory=Normalized)

    @property
    def needs_group(self) -> bool:
        return True

    def __post_init__(self) -> None:
        self.check_contained()
        if not 0 < self.keep_frac <= 1:
            raise ValueError(f"keep_frac is {self.keep_frac}; it must be above 0 and at most 1")

    def estimate(self, groups: Groups) -> Tensor:
        rewards, lengths = groups.values, groups.lengths.clamp(min=1)
        scores = {"reward": rewards, "shortest": -lengths, "reward_per_token": rewards / lengths}
        score = scores[self.rank_by].double().masked_fill(rewards.isnan(), -torch.inf)
        num_kept = max(1, round(self.keep_frac * score.shape[1]))
        passes = score >= score.topk(num_kept).values[:, -1:]
        if self.normalize_kept_only:
            groups = groups.with_rewards(rewards, passes)
        return self.advantages.estimate(groups).masked_fill(~passes, torch.nan)


@check_field_types
@dataclass(frozen=True)
class PassAtK(Advantages):
    """Pass@k: only the best completion of a group has an advantage, r_max - r_second.

    It is the leave-one-out advantage of the group's largest reward: max of all - max of the others,
    which is 0 for every other completion, and for all if two are best. Source: arXiv:2503.19595;
    verl: `grpo_passk`.

    Args:
        scale: divide by the standard deviation (n - 1) of the `group`, as verl does, or `none`.
        eps: added to the standard deviation.
    """

    scale: Literal["group", "none"] = "none"
    eps: float = 1e-4

    def estimate(self, groups: Groups) -> Tensor:
        deviation, std, _ = groups.group_statistics()
        rewards = deviation.nan_to_num(nan=-torch.inf)
        second = rewards.topk(2).values[:, 1:]
        lead = torch.where((rewards > second) & second.isfinite(), rewards - second, 0.0)
        return _divide(lead, std, self.eps) if self.scale == "group" else lead


@check_field_types
@dataclass(frozen=True)
class Whitened(Advantages):
    """REINFORCE++-baseline: advantages normalized over all tokens of the batch.

    (A - mean) / (std + eps), where a completion counts as often as it has tokens, and std is taken
    with n - 1 tokens. Completions without an advantage (those that GFPO filters out) are left out
    and stay without one. Source: arXiv:2501.03262; verl: `reinforce_plus_plus_baseline`.

    Args:
        advantages: advantage estimator.
        eps: added to the standard deviation; a standard deviation of 0 gives zero advantages.
    """

    advantages: Advantages = field(default_factory=lambda: Normalized(scale="none"))
    eps: float = 1e-4

    def __post_init__(self) -> None:
        self.check_contained()

    def estimate(self, groups: Groups) -> Tensor:
        values = self.advantages.estimate(groups).double()
        values = values.masked_fill(groups.values.isnan(), torch.nan)
        tokens = groups.lengths.double().where(~values.isnan(), 0.0)
        count = groups.comm.sum(tokens.sum())
        mean = groups.comm.sum((tokens * values.nan_to_num(0.0)).sum()) / count.clamp(min=1)
        squares = groups.comm.sum((tokens * (values - mean).nan_to_num(0.0).square()).sum())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        differ = std > ROUNDING * mean.abs()
        return _divide(values - mean, std.where(differ, 0.0), self.eps)


@check_field_types
@dataclass(frozen=True)
class TaskAdvantages(Advantages):
    """Another advantage estimator for each of several tasks in one run.

    An estimator sees the groups of its tasks alone: batch means and standard deviations are over
    them. The loss weights are those of the objective, over all tasks.

    Args:
        tasks: {task: its estimator}.
        others: estimator of all tasks that are not listed.

    Example:
        >>> TaskAdvantages({"chat": Normalized(scale="none")}).others.scale  # of all but `chat`
        'group'
    """

    tasks: dict[str, Advantages]
    others: Advantages = field(default_factory=Normalized)

    def __post_init__(self) -> None:
        self.check_contained()

    def estimate(self, groups: Groups) -> Tensor:
        result = torch.zeros_like(groups.values)
        is_other = torch.ones(len(result), dtype=torch.bool, device=result.device)
        # Every rank asks every estimator, also without a group: some of them sum over the ranks.
        for task, estimator in self.tasks.items():
            of_task = torch.zeros_like(is_other)
            of_task[[row for row, name in enumerate(groups.table.tasks) if name == task]] = True
            result[of_task] = estimator.estimate(groups.select(of_task)).to(result)
            is_other &= ~of_task
        result[is_other] = self.others.estimate(groups.select(is_other)).to(result)
        return result


def check_centered(
    values: Tensor, estimator: Advantages, gamma: float = 1.0, tolerance: float = 1e-4
) -> None:
    """Check that advantages with a group baseline sum to zero in every group.

    Args:
        values: [B, G] advantage of each completion.
        estimator: computed them; without a group baseline, or with a filter, advantages need not be
            centered.
        gamma: discount per token, see `Objective`; below 1, advantages need not be centered.
        tolerance: largest mean of a group, in units of its largest advantage or 1.

    Raises:
        RuntimeError: a group's advantages do not sum to zero.
    """
    by_group = isinstance(estimator, Normalized) and estimator.baseline in ("group", "others")
    if not (by_group or isinstance(estimator, GDPO)) or gamma != 1:
        return
    off = values.mean(1).abs() / values.abs().amax(1).clamp(min=1)
    if bool((off > tolerance).any()):
        worst = int(off.argmax())
        raise RuntimeError(
            f"The advantages of prompt {worst} of this batch average {float(off[worst]):.3g} "
            f"instead of 0: {values[worst].tolist()}. Rewards and completions are misaligned."
        )
