"""Data passed between the stages of an iteration, and the shape legend.

Shape legend, used in every docstring:

    B prompts          G completions per prompt   N = B * G rows, row n belongs to prompt n // G
    P prompt length    C completion length        T = P + C    M rows of a micro-batch
    V vocabulary       L layers                   H key/value heads    D head size

Prompts are padded on the left, completions on the right. Masks are bool, True marks a real token,
and a completion's mask includes its end token. `logprobs[n, t]` is the log-probability of
`completion_ids[n, t]`. Log-probabilities and losses are float32 (nats), rewards float64.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor

Stats = dict[str, Tensor]
Rows = TypeVar("Rows", "TokenRows", "TrainingBatch")


# Fields of one entry per prompt; every other tensor of a carrier of rows has one entry per row.
PROMPT_FIELDS = ("prompt_ids", "prompt_mask")


def _check(name: str, value: Tensor, *shape: int) -> None:
    assert tuple(value.shape) == shape, f"{name} has shape {tuple(value.shape)}, expected {shape}"


def row_fields(carrier: Any) -> dict[str, Tensor]:
    """{name: [M, C, ...]} the fields of a carrier of rows that are given, one entry per row."""
    values = {field.name: getattr(carrier, field.name) for field in fields(carrier)}
    return {
        name: value
        for name, value in values.items()
        if value is not None and name not in (*PROMPT_FIELDS, "prompt_of")
    }


def _check_rows(carrier: Any, shape: torch.Size) -> None:
    for name, value in row_fields(carrier).items():
        _check(name, value, *shape, *value.shape[2:])
    _check("prompt_of", carrier.prompt_of, shape[0])


def _select(carrier: Rows, rows: Tensor) -> Rows:
    """Rows of a carrier and their prompts, without columns that are padding for all of them."""
    kept, prompt_of = torch.unique(carrier.prompt_of[rows], return_inverse=True)
    unused = carrier.prompt_ids.shape[1] - int(carrier.prompt_mask[kept].sum(1).max())
    used = max(1, int(carrier.completion_mask[rows].sum(1).max()))
    chosen: dict[str, Any] = {
        name: value[rows, :used] for name, value in row_fields(carrier).items()
    }
    for name in PROMPT_FIELDS:
        chosen[name] = getattr(carrier, name)[kept, unused:]
    return replace(carrier, prompt_of=prompt_of, **chosen)


@dataclass(frozen=True)
class TokenRows:
    """What a model reads: M completions and the prompts that they continue.

    Args:
        prompt_ids: [B, P] prompts, each once, padded on the left.
        prompt_mask: [B, P] True marks a real token.
        prompt_of: [M] row of `prompt_ids` that each completion continues.
        completion_ids: [M, C] token ids, padded on the right.
        completion_mask: [M, C] True marks a real token.
        candidate_ids: [M, C, S] ids of the tokens that could be sampled (-1: none), which all
            distributions are over; None: every token.
        loss_mask: [M, C] True marks a token that the policy sampled; None: all real ones are.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    prompt_of: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    candidate_ids: Tensor | None = None
    loss_mask: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that every row field has M rows of one length."""
        _check_rows(self, self.completion_ids.shape)

    def __len__(self) -> int:
        """Number of completions, M."""
        return self.completion_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """[M] tokens of each completion that a model reads."""
        return self.completion_mask.sum(1)

    def select(self, rows: Tensor) -> TokenRows:
        """The given completions and their prompts; columns that are padding for all are cut off.

        Args:
            rows: [m] row numbers, in any order; at least one.
        """
        return _select(self, rows)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts and everything known about them.

    Args:
        prompt_ids: [B, P] token ids, padded on the left.
        prompt_mask: [B, P] True marks a real token.
        prompts: B rendered prompt texts.
        columns: every other column of the data set, a list of length B each; rewards see them.
        index: [B] position of each prompt in its data set; names its completions' random streams.
        set_name: of the set that all of them belong to, where there are several (`val: {easy: ...,
            hard: ...}`); else "".
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    prompts: list[str]
    columns: dict[str, list[Any]]
    index: Tensor
    set_name: str = ""

    def __post_init__(self) -> None:
        """Check ranks and sizes."""
        rows, length = self.prompt_ids.shape
        _check("prompt_mask", self.prompt_mask, rows, length)
        _check("index", self.index, rows)
        for name, values in {"prompts": self.prompts, **self.columns}.items():
            assert len(values) == rows, f"{name} has {len(values)} entries for {rows} prompts"

    def __len__(self) -> int:
        """Number of prompts, B."""
        return self.prompt_ids.shape[0]

    def select(self, rows: Sequence[int]) -> PromptBatch:
        """Some of the prompts, without the padding that none of them needs."""
        chosen = list(rows)
        mask = self.prompt_mask[chosen]
        used = slice(mask.shape[1] - int(mask.sum(1).max()), None)
        return PromptBatch(
            prompt_ids=self.prompt_ids[chosen, used],
            prompt_mask=mask[:, used],
            prompts=[self.prompts[row] for row in chosen],
            columns={
                name: [values[row] for row in chosen] for name, values in self.columns.items()
            },
            index=self.index[chosen],
            set_name=self.set_name,
        )

    def to(self, device: torch.device | str, **kwargs: Any) -> PromptBatch:
        """The same batch with its tensors on `device`."""
        tensors = ("prompt_ids", "prompt_mask", "index")
        return replace(self, **{name: getattr(self, name).to(device, **kwargs) for name in tensors})


@dataclass(frozen=True)
class Rollout:
    """G sampled completions of each of B prompts.

    Args:
        prompts: the B prompts.
        group_size: G.
        completion_ids: [N, C] token ids, padded on the right.
        completion_mask: [N, C] True marks a real token, the end token included.
        sampler_logprobs: [N, C] float32 log-probability under the (filtered) distribution that
            the token was drawn from; 0 on padding.
        truncated: [N] True where the length limit, not the end token, stopped the completion.
        loss_mask: [N, C] True marks a token that the policy sampled, which is what is learned
            from: lengths, denominators, entropy and KL count these. Within `completion_mask`,
            which is what attention sees; the same where it is not given.
        policy_version: number of finished iterations of the weights that sampled.
        completions: N decoded texts, empty until the rollouter decodes them.
        candidate_ids: [N, C, S] int32 ids of the tokens that could be sampled, filled up with -1;
            None where that is every token.
        turns: [N, C] int16 turn that a token was spoken in, -1 elsewhere; None: there is one turn.
        turn_rewards: [N, K] float64; NaN where there is no such turn, or its reward abstained.
        turn_states: N lists of the state after each turn (`StepResult.state`).
        episodes: N of `litgrpo.rollout.episodes.Episode`; empty where every completion is one turn.
    """

    prompts: PromptBatch
    group_size: int
    completion_ids: Tensor
    completion_mask: Tensor
    sampler_logprobs: Tensor
    truncated: Tensor
    completions: list[str] = field(default_factory=list)
    candidate_ids: Tensor | None = None
    loss_mask: Tensor = None  # type: ignore[assignment]  # filled in below
    policy_version: int = 0
    turns: Tensor | None = None
    turn_rewards: Tensor | None = None
    turn_states: list[list[Hashable]] = field(default_factory=list)
    episodes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check that there are B * G rows of one length."""
        if self.loss_mask is None:
            object.__setattr__(self, "loss_mask", self.completion_mask)
        rows, length = len(self.prompts) * self.group_size, self.completion_ids.shape[1]
        for name in ("completion_ids", "completion_mask", "sampler_logprobs", "loss_mask"):
            _check(name, getattr(self, name), rows, length)
        _check("truncated", self.truncated, rows)
        if self.candidate_ids is not None:
            _check("candidate_ids", self.candidate_ids, rows, length, self.candidate_ids.shape[-1])
        if self.turns is not None:
            _check("turns", self.turns, rows, length)

    @property
    def lengths(self) -> Tensor:
        """[N] number of tokens of each completion that the policy sampled."""
        return self.loss_mask.sum(1)

    @property
    def tokens(self) -> TokenRows:
        """What a model reads of it."""
        rows = torch.arange(len(self.completion_ids), device=self.completion_ids.device)
        return TokenRows(
            prompt_ids=self.prompts.prompt_ids,
            prompt_mask=self.prompts.prompt_mask,
            prompt_of=rows // self.group_size,
            completion_ids=self.completion_ids,
            completion_mask=self.completion_mask,
            candidate_ids=self.candidate_ids,
            loss_mask=None if self.turns is None else self.loss_mask,
        )

    def token_lists(self) -> list[list[int]]:
        """N lists of token ids without padding, by one transfer to the host."""
        rows = zip(self.completion_ids.tolist(), self.completion_mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    def stats(self) -> Stats:
        """Scalars under `completion/` and `prompt/`, and the entropy at sampling.

        One of two numbers is a sum and the count to divide it by. Where no completion ended, the
        extremes of those that did are infinite.
        """
        lengths, ended = self.lengths.float(), ~self.truncated
        stats = mean_and_extremes("completion/len", lengths)
        stats["completion/truncated_frac"] = self.truncated.float().mean()
        stats |= mean_and_extremes("completion/terminated_len", lengths, ended)
        stats |= mean_and_extremes("prompt/len", self.prompts.prompt_mask.sum(1).float())
        # Unbiased, of all rows, and free: -log p of the tokens that were sampled.
        surprise = -torch.where(self.loss_mask, self.sampler_logprobs, 0.0).sum()
        stats["policy/entropy"] = torch.stack([surprise, self.loss_mask.sum()])
        return stats


def mean_and_extremes(name: str, values: Tensor, counted: Tensor | None = None) -> Stats:
    """Mean and extremes of some values.

    Args:
        name: what the names begin with; `_mean`, `_min` and `_max` follow.
        values: of any shape.
        counted: True where a value counts, same shape; the mean is a sum and a count then. None:
            everywhere.
    """
    if counted is None:
        return {f"{name}_mean": values.mean(), f"{name}_min": values.min()} | {
            f"{name}_max": values.max()
        }
    joint = "" if name.endswith("/") else "_"
    total = torch.where(counted, values, 0.0).sum()
    return {
        f"{name}{joint}mean": torch.stack([total, counted.sum()]),
        f"{name}{joint}min": torch.where(counted, values, torch.inf).min(),
        f"{name}{joint}max": torch.where(counted, values, -torch.inf).max(),
    }


@dataclass(frozen=True)
class RewardTable:
    """One number per reward function and completion.

    Args:
        parts: {name: [B, G]} float64; NaN where a function abstained or failed.
        weights: {name: weight of the part in the total}, same keys as `parts`.
        total: [B, G] float64 weighted sum over the parts that answered; 0 where none did.
        valid: [B, G] False where a function failed or all abstained: the row teaches nothing.
        precision: machine epsilon of the coarsest arithmetic the rewards were computed in;
            relative differences of up to 4 of it count as equal.
        counted: {name: [B, G]} what of each part is weighted and added up, after normalization and
            gates; the parts themselves where nothing is said.
        metrics: {name to log: number} that reward functions logged themselves.
        extras: {column: {row: value}}, shown beside the samples.
    """

    parts: dict[str, Tensor]
    weights: dict[str, float]
    total: Tensor
    valid: Tensor
    precision: float = torch.finfo(torch.float64).eps
    counted: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check shapes and keys."""
        if not self.counted:
            object.__setattr__(self, "counted", self.parts)
        assert self.parts.keys() == self.weights.keys() == self.counted.keys()
        for name, part in [*self.parts.items(), *self.counted.items(), ("valid", self.valid)]:
            _check(name, part, *self.total.shape)

    def stats(self) -> Stats:
        """Scalars under `reward/`."""
        spread = self.total.std(1, correction=min(1, self.total.shape[1] - 1))
        valid = self.total[self.valid]
        stats: Stats = {
            "reward/mean": valid.mean() if valid.numel() else self.total.new_zeros(()),
            "reward/std": valid.std() if valid.numel() > 1 else self.total.new_zeros(()),
            "reward/group_std": spread.mean(),
            "reward/failed_frac": (~self.valid).double().mean(),
            "reward/zero_variance_groups_frac": (spread == 0).double().mean(),
        }
        # All processes report the same names, so a part that answered nowhere counts as 0.
        for name, part in self.parts.items():
            stats[f"reward/{name}"] = part.nanmean().nan_to_num(0.0)
            answers = part[~part.isnan()]
            std = answers.std() if len(answers) > 1 else self.total.new_zeros(())
            stats[f"reward/{name}_std"] = std
        stats |= self._comparison() if len(self.parts) > 1 else {}
        stats = {name: value.nan_to_num(0.0).float() for name, value in stats.items()}
        extremes = mean_and_extremes("reward/", self.total.float(), self.valid)
        return stats | {name: extremes[name] for name in ("reward/min", "reward/max")}

    def _comparison(self) -> Stats:
        """Which part moves the total within the groups, and which parts pull against each other.

        With c_k the distance of weight times part k from its group's mean, and c their sum, the
        share of part k is <c_k, c> / <c, c>: shares add up to 1, and one is negative where a part
        is overruled. The cosine of two parts is that of their distances, signed by their weights.
        """
        centered = {name: self._centered(part) for name, part in self.counted.items()}
        pulls = {name: self.weights[name] * part for name, part in centered.items()}
        total = torch.stack(list(pulls.values())).sum(0)
        power = total.square().sum().clamp(min=torch.finfo(total.dtype).tiny)
        stats = {
            f"reward/{name}_share": (pull * total).sum() / power for name, pull in pulls.items()
        }
        for one, other in combinations(centered, 2):
            product = (centered[one] * centered[other]).sum()
            norms = centered[one].norm() * centered[other].norm()
            sign = 1.0 if self.weights[one] * self.weights[other] >= 0 else -1.0
            cosine = sign * product / norms.clamp(min=torch.finfo(total.dtype).tiny)
            stats[f"reward/cosine_{one}_{other}"] = cosine
        return stats

    def _centered(self, part: Tensor) -> Tensor:
        """[B, G] distance from the group's mean; 0 where nothing is known or all are equal."""
        known = self.valid & ~part.isnan()
        values = part.where(known, torch.nan)
        distance = (values - values.nanmean(1, keepdim=True)).nan_to_num(0.0)
        largest = values.nan_to_num(0.0).abs().amax(1, keepdim=True)
        noise = 4 * self.precision * largest
        return distance.masked_fill(distance.abs().amax(1, keepdim=True) <= noise, 0.0)

    @staticmethod
    def stat_names(parts: Sequence[str]) -> list[str]:
        """Everything that `stats` logs under `reward/` for parts of these names."""
        names = [
            "mean",
            "std",
            "min",
            "max",
            "group_std",
            "failed_frac",
            "zero_variance_groups_frac",
        ]
        names += parts
        names += [f"{part}_std" for part in parts]
        if len(parts) > 1:
            names += [f"{part}_share" for part in parts]
            names += [f"cosine_{one}_{other}" for one, other in combinations(parts, 2)]
        return names


@dataclass(frozen=True)
class RolloutLogprobs:
    """What models say of a rollout before its first optimizer step.

    Args:
        old: [N, C] log-probabilities under the policy; None: the policy has not moved since the
            rows were sampled when they are learned from (ratio 1).
        ref: [N, C] log-probabilities under the reference; None without a reference.
    """

    old: Tensor | None = None
    ref: Tensor | None = None


@dataclass(frozen=True)
class TrainingBatch:
    """What to learn from: M completions with the weight and direction of each of their tokens.

    All log-probabilities are over `candidate_ids`.

    Args:
        prompt_ids, prompt_mask, prompt_of, completion_ids, completion_mask, candidate_ids: as of
            `TokenRows`.
        loss_mask: [M, C] True marks a token that the policy sampled.
        sampler_logprobs: [M, C] log-probability at sampling.
        advantages: [M, C] how much better than expected, per token.
        weights: [M, C] loss weight of each token in its optimizer step: mask and loss aggregation
            in one. (Not the weights of rewards or of the model.)
        old_logprobs: [M, C] log-probability before the rollout's first optimizer step; None means
            on-policy (ratio 1).
        ref_logprobs: [M, C] log-probability under the reference; None without a reference.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    prompt_of: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    candidate_ids: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that every row field has M rows of one length."""
        _check_rows(self, self.completion_ids.shape)

    def __len__(self) -> int:
        """Number of completions, M."""
        return self.completion_ids.shape[0]

    @property
    def tokens(self) -> TokenRows:
        """What a model reads of it."""
        return TokenRows(**{each.name: getattr(self, each.name) for each in fields(TokenRows)})

    def select(self, rows: Tensor) -> TrainingBatch:
        """The given completions and their prompts; columns that are padding for all are cut off.

        Args:
            rows: [m] row numbers, in any order; at least one.
        """
        return _select(self, rows)


@dataclass(frozen=True)
class TokenLogprobs:
    """What a policy thinks of given completions.

    Args:
        logprobs: [M, C] float32 log-probability of each completion token; 0 on padding.
        entropy: [M, C] float32 entropy of the distribution it was drawn from; 0 on padding.
    """

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class LossOutput:
    """A loss to differentiate, and what is worth knowing about it.

    Args:
        loss: [] sum over tokens of weight times token loss.
        stats: {name: [2]} a sum over tokens (or rows) and the count to divide it by, so that sums
            over micro-batches and processes give exact averages.
    """

    loss: Tensor
    stats: Stats


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Args:
        lr: learning rate of the step.
        sums: {name: [2]} a sum and the count to divide it by, over the rows that were learned
            from; empty where the step was skipped.
        skipped: None for a step that was taken. A step with a number that is not finite is not:
            {row of the rollout: which number}, empty where no row alone explains it.
    """

    lr: float
    sums: Stats = field(default_factory=dict)
    skipped: dict[int, str] | None = None
