"""Data classes passed between rollout, reward and learner, and the shape legend.

Shape legend, used in every docstring:

    B prompts          G completions per prompt   N = B * G rows, row n belongs to prompt n // G
    P prompt length    C completion length        T = P + C    M rows of a mini- or micro-batch
    V vocabulary       E hidden size              S candidate tokens of a position
    L layers           H key/value heads          D head size

Prompts are padded on the left, completions on the right. Masks are bool, True marks a real token,
and a completion's mask includes its end token. `logprobs[n, t]` is the log-probability of
`completion_ids[n, t]`. Log-probabilities and losses are float32 (nats), rewards float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Metrics to log, by name: a number [], or a sum and the count to divide it by [2]. Sums and counts
# are added up over micro-batches and ranks before they are divided.
Stats = dict[str, Tensor]

# Where completions come from: sampled with the current weights, with earlier ones, by another run,
# or not sampled but part of the data.
Provenance = Literal["fresh", "stale", "stored", "data"]
FRESH: Provenance = "fresh"
STALE: Provenance = "stale"
STORED: Provenance = "stored"
FROM_DATA: Provenance = "data"

# Column of the token ids of a prompt as the reference reads it (`data.reference_template`).
REFERENCE_PROMPT = "reference_prompt_ids"
# Column of the name of a row's task.
TASK = "task"
TASK_DATA = "task_data"  # column: all data of a task of verifiers or OpenReward, as JSON


def _check_shape(name: str, value: Tensor, *shape: int) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}")


def _check_row_fields(fields: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise unless every field has one entry per token, (M, C) = `shape`."""
    for name, value in fields.items():
        _check_shape(name, value, *shape, *value.shape[2:])


class HostMasks(NamedTuple):
    """Masks of rows on the host, where sizes and indices are computed without a wait for a GPU.

    `prompt_mask` [B, P], `prompt_of` [M], `completion_mask` and `predicted` [M, C] are as of
    `TokenRows`; all real tokens are predicted if those have no such mask.
    """

    prompt_mask: Tensor
    prompt_of: Tensor
    completion_mask: Tensor
    predicted: Tensor

    @staticmethod
    def of(rows: TokenRows) -> HostMasks:
        """Copy the masks of rows to the host, with one wait; masks on the host stay the same."""
        mask = rows.completion_mask
        masks = [rows.prompt_mask, rows.prompt_of, mask]
        if rows.predicted is not None and rows.predicted is not mask:
            masks.append(rows.predicted)
        if mask.device.type != "cpu":
            sizes = [tensor.numel() for tensor in masks]
            joined = torch.cat([tensor.flatten().int() for tensor in masks])
            copies = torch.split(joined.cpu(), sizes)
            masks = [
                copy.view(tensor.shape).to(tensor.dtype)
                for copy, tensor in zip(copies, masks, strict=True)
            ]
        return HostMasks(masks[0], masks[1], masks[2], masks[-1])


def pad_left(rows: list[list[int]], pad_id: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """Return [M, T] token ids and mask of rows, padded on the left to `length` or more columns."""
    width = max([length, *map(len, rows)])
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for row, tokens in enumerate(rows):
        if tokens:
            ids[row, -len(tokens) :] = torch.tensor(tokens, dtype=torch.long)
            mask[row, -len(tokens) :] = True
    return ids, mask


def pad_rows(
    rows: Sequence[Sequence[float]],
    fill: float,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return [M, T] rows of unequal length, padded on the right; T is at least 1."""
    width = max([1, *map(len, rows)])
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=dtype, device=device)


def stack_rows(parts: Sequence[Tensor], fill: float) -> Tensor:
    """Return the rows of several tensors [m, ...], each padded at its ends to the largest size."""
    sizes = [max(sizes) for sizes in zip(*[part.shape[1:] for part in parts], strict=True)]
    rows = parts[0].new_full((sum(map(len, parts)), *sizes), fill)
    begin = 0
    for part in parts:
        end = begin + len(part)
        rows[(slice(begin, end), *map(slice, part.shape[1:]))] = part
        begin = end
    return rows


def to_device(indices: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy int64 tensors from the host to a device in one transfer, without a wait for it."""
    if device.type == "cpu":
        return indices
    joined = torch.cat([tensor.flatten() for tensor in indices])
    if device.type == "cuda":
        joined = joined.pin_memory()  # copies from other memory wait
    sizes = [tensor.numel() for tensor in indices]
    copies = torch.split(joined.to(device, non_blocking=True), sizes)
    return [copy.view(tensor.shape) for copy, tensor in zip(copies, indices, strict=True)]


def _without_none(**values: Tensor | None) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value is not None}


def _take(values: Tensor, positions: Tensor) -> Tensor:
    """Return [m, c, ...] the entries of [M, C, ...] at positions [m, c] in [M * C]; 0 at -1."""
    taken = values.flatten(0, 1)[positions.clamp(min=0)]
    outside = (positions < 0).view(*positions.shape, *[1] * (values.ndim - 2))
    return taken.masked_fill(outside, 0)


@dataclass(frozen=True)
class TokenRows:
    """Input of a model: M completions and the prompts that they continue.

    Args:
        prompt_ids: [B, P] prompts, each once, padded on the left.
        prompt_mask: [B, P] True marks a real token.
        prompt_of: [M] row of `prompt_ids` that each completion continues.
        completion_ids: [M, C] token ids, padded on the right.
        completion_mask: [M, C] True marks a real token.
        candidate_ids: [M, C, S] ids of the tokens that could be sampled, filled with -1. The
            log-probabilities of sampler, policy and reference are renormalized over these. None:
            every token.
        predicted: [M, C] True marks a token whose log-probability is computed: those that the
            policy sampled, and others with a cross-entropy loss; None: all real tokens.
        segments: [M, C] int16 number of the segment of each token, see `Rollout.segments`; None:
            every row is one segment.

    Example:
        >>> rows = TokenRows(
        ...     prompt_ids=torch.tensor([[0, 5, 6]]),  # one prompt of two tokens
        ...     prompt_mask=torch.tensor([[False, True, True]]),
        ...     prompt_of=torch.tensor([0, 0]),  # continued by two completions
        ...     completion_ids=torch.tensor([[7, 8, 2], [9, 2, 0]]),
        ...     completion_mask=torch.tensor([[True, True, True], [True, True, False]]),
        ... )
        >>> len(rows)
        2
        >>> rows.select(torch.tensor([1])).completion_ids
        tensor([[9, 2]])
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    prompt_of: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    candidate_ids: Tensor | None = None
    predicted: Tensor | None = None
    segments: Tensor | None = None

    def __post_init__(self) -> None:
        _check_row_fields(self.row_fields(), self.completion_ids.shape)
        _check_shape("prompt_of", self.prompt_of, len(self.completion_ids))

    def __len__(self) -> int:
        """Number of completions, M."""
        return self.completion_ids.shape[0]

    def row_fields(self) -> dict[str, Tensor]:
        """Return {name: [M, C, ...]} of the given fields with one entry per token of a row."""
        return _without_none(
            completion_ids=self.completion_ids,
            completion_mask=self.completion_mask,
            candidate_ids=self.candidate_ids,
            predicted=self.predicted,
            segments=self.segments,
        )

    @cached_property
    def on_host(self) -> HostMasks:
        """The masks on the host; rows that are selected from these need no further copy."""
        return HostMasks.of(self)

    def split_segments(self) -> tuple[TokenRows, Tensor]:
        """Make every segment a separate row.

        Segment 0 continues the prompt of its row. The prompt of every other segment is its own
        tokens up to the first one that the policy sampled.

        Returns:
            m rows without segments, and [m, c] the position in [M * C] of each of their tokens, -1
            on padding.
        """
        assert self.segments is not None
        masks, device = self.on_host, self.completion_ids.device
        width = self.completion_ids.shape[1]
        segments, num_prompts = self.segments.cpu(), len(masks.prompt_mask)
        prompt_of: list[int] = []
        new_prompts: list[Tensor] = []  # positions in [M * C] of the prompts of segments
        rows: list[Tensor] = []  # positions in [M * C] of the completions of segments
        for row, (mask, predicted) in enumerate(
            zip(masks.completion_mask, masks.predicted, strict=True)
        ):
            # A row without tokens is one empty segment: it must not disappear.
            for number in sorted({*segments[row][mask].tolist()}) or [0]:
                columns = ((segments[row] == number) & mask).nonzero().flatten()
                start = 0
                if number == 0:
                    prompt_of.append(int(masks.prompt_of[row]))
                else:
                    start = int(predicted[columns].int().argmax())
                    prompt_of.append(num_prompts + len(new_prompts))
                    new_prompts.append(row * width + columns[:start])
                rows.append(row * width + columns[start:])
        positions = pad_sequence(rows, batch_first=True, padding_value=-1)
        if not positions.shape[1]:  # models cannot read tensors of size 0
            positions = positions.new_full((len(rows), 1), -1)
        prompts = [ids[mask] for ids, mask in zip(self.prompt_ids, self.prompt_mask, strict=True)]
        flat_ids = self.completion_ids.flatten()
        prompts += [flat_ids[prompt.to(device)] for prompt in new_prompts]
        prompt_ids, prompt_mask = pad_left([prompt.tolist() for prompt in prompts], 0)
        on_host = [positions, torch.tensor(prompt_of), prompt_ids, prompt_mask.long()]
        positions, of, prompt_ids, prompt_mask = to_device(on_host, device)
        fields = {
            name: _take(value, positions)
            for name, value in self.row_fields().items()
            if name != "segments"
        }
        if self.candidate_ids is not None:
            outside = (positions < 0)[..., None]
            fields["candidate_ids"] = fields["candidate_ids"].masked_fill(outside, -1)
        split = TokenRows(prompt_ids, prompt_mask.bool(), of, **fields)
        return split.select(torch.arange(len(rows))), positions  # without prompts of no row

    def select(self, rows: Tensor) -> TokenRows:
        """Select rows [m] and their prompts, in any order, without columns that are all padding."""
        masks, device = self.on_host, self.completion_ids.device
        rows = rows.cpu()
        used_prompts, prompt_of = torch.unique(masks.prompt_of[rows], return_inverse=True)
        prompt_mask = masks.prompt_mask[used_prompts]
        # Prompts are padded on the left: the longest one decides where the first used column is.
        first = prompt_mask.shape[1] - int(prompt_mask.sum(1).max())
        # One column stays even if all completions are empty: models cannot read tensors of size 0.
        completion_mask = masks.completion_mask[rows]
        width = max(1, int(completion_mask.sum(1).max()))
        row_index, prompt_index, of = to_device([rows, used_prompts, prompt_of], device)
        selected = replace(
            self,
            prompt_ids=self.prompt_ids[prompt_index, first:],
            prompt_mask=self.prompt_mask[prompt_index, first:],
            prompt_of=of,
            **{name: value[row_index, :width] for name, value in self.row_fields().items()},
        )
        if device.type != "cpu":  # the cached property needs no further copy
            selected.__dict__["on_host"] = HostMasks(
                prompt_mask[:, first:],
                prompt_of,
                completion_mask[:, :width],
                masks.predicted[rows, :width],
            )
        return selected


@dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts, with the other columns of their data set.

    Args:
        prompt_ids: [B, P] token ids, padded on the left.
        prompt_mask: [B, P] True marks a real token.
        prompts: B rendered prompt texts.
        columns: the other columns of the data set, a list of length B each; passed to rewards.
        index: [B] position of each prompt in its data set; names its completions' random streams.
        set_name: name of the set of these prompts if there are several (`val: {easy: ..., hard:
            ...}`) and all of them are from one; else "".

    Example:
        >>> batch = PromptBatch(
        ...     prompt_ids=torch.tensor([[0, 5], [6, 7]]),
        ...     prompt_mask=torch.tensor([[False, True], [True, True]]),
        ...     prompts=["2", "3+4"],
        ...     columns={"answer": ["2", "7"]},
        ...     index=torch.tensor([10, 3]),
        ... )
        >>> batch.select([0]).columns
        {'answer': ['2']}
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    prompts: list[str]
    columns: dict[str, list[Any]]
    index: Tensor
    set_name: str = ""

    def __post_init__(self) -> None:
        num_prompts, length = self.prompt_ids.shape
        _check_shape("prompt_mask", self.prompt_mask, num_prompts, length)
        _check_shape("index", self.index, num_prompts)
        for name, values in {"prompts": self.prompts, **self.columns}.items():
            if len(values) != num_prompts:
                raise ValueError(f"{name} has {len(values)} entries, expected {num_prompts}")

    def __len__(self) -> int:
        """Number of prompts, B."""
        return self.prompt_ids.shape[0]

    def select(self, rows: Sequence[int], *, trim: bool = True) -> PromptBatch:
        """Select prompts.

        Args:
            rows: their numbers, in any order.
            trim: leave out token columns that are all padding.
        """
        index = torch.tensor(rows, dtype=torch.long, device=self.prompt_ids.device)
        prompt_ids, prompt_mask = self.prompt_ids[index], self.prompt_mask[index]
        if trim:
            first = prompt_mask.shape[1] - int(prompt_mask.sum(1).max())
            prompt_ids, prompt_mask = prompt_ids[:, first:], prompt_mask[:, first:]
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            prompts=[self.prompts[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            index=self.index[index],
            set_name=self.set_name,
        )

    def to(self, device: torch.device | str, **kwargs: Any) -> PromptBatch:
        """Return the same batch with its tensors on `device`."""
        return replace(
            self,
            prompt_ids=self.prompt_ids.to(device, **kwargs),
            prompt_mask=self.prompt_mask.to(device, **kwargs),
            index=self.index.to(device, **kwargs),
        )


@dataclass
class Episode:
    """The episode in one row of a rollout, which is filled while it is played.

    Args:
        messages: in order; the policy's have the role `assistant`, observations any other.
        spans: columns [first, end) of each message in the row.
        turn_rewards: of each turn from the environment; None if it gave none.
        turn_states: state after each answered turn (`StepResult.state`).
        turn_calls: tool calls in each answered turn.
        calls: {tool: (calls, failed calls)}.
        log: {name: (sum, turns)} of what the environment logged.
        seconds: time spent waiting for the environment.
        failed: reason of an environment failure; "": none.
        observation_tokens_cut: tokens removed from observations by the limit.
        done: the environment ended the episode.

    Example::

        Episode(
            messages=[
                {"role": "assistant", "content": "<call>6*7</call>"},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "42"},
            ],
            spans=[(0, 9), (9, 14), (14, 17)],
            turn_rewards=[0.0, 1.0],
            turn_states=[None, None],
            turn_calls=[1, 0],
            calls={"calculate": (1, 0)},
            done=True,
        )
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    turn_states: list[Hashable] = field(default_factory=list)
    turn_calls: list[int] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: dict[str, tuple[float, int]] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""
    observation_tokens_cut: int = 0
    done: bool = False

    @property
    def assistant_texts(self) -> list[str]:
        """Texts of the policy's turns."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]


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
        truncated: [N] True if the length limit, not the end token, stopped the completion.
        completions: N decoded texts, empty until the rollouter decodes them.
        candidate_ids: [N, C, S] int32 ids of the tokens that could be sampled, filled with -1;
            None: every token.
        policy_version: number of finished iterations of the weights with which the rollout began.
        token_versions: [N, C] int32 number of finished iterations of the weights that sampled each
            token, if they may differ from `policy_version`; None: they do not.
        turns: [N, C] int16 turn in which the policy generated a token, -1 elsewhere; None: every
            completion is a single turn.
        segments: [N, C] int16 number of the segment of each token; None: every row is one segment.
            A row with several is an episode whose conversations do not extend each other, such as
            those of an agent and its sub-agent. No token of a segment sees another segment.
            Segment 0 continues the row's prompt; the others begin with their own prompt.
            Advantages, loss weights and lengths are those of the whole row.
        episodes: N episodes; empty if every completion is a single turn.
        provenance: where the completions come from.

    Example:
        >>> ids, mask = torch.tensor([[5, 6]]), torch.tensor([[True, True]])
        >>> prompt = PromptBatch(ids, mask, ["2+2="], columns={}, index=torch.tensor([0]))
        >>> rollout = Rollout(
        ...     prompts=prompt,
        ...     group_size=2,
        ...     completion_ids=torch.tensor([[9, 2], [7, 8]]),  # 2 is the end token
        ...     completion_mask=torch.tensor([[True, True], [True, True]]),
        ...     sampler_logprobs=torch.tensor([[-0.1, -0.2], [-1.5, -0.7]]),
        ...     truncated=torch.tensor([False, True]),
        ...     completions=["4", "22"],
        ... )
        >>> rollout.lengths
        tensor([2, 2])
    """

    prompts: PromptBatch
    group_size: int
    completion_ids: Tensor
    completion_mask: Tensor
    sampler_logprobs: Tensor
    truncated: Tensor
    completions: list[str] = field(default_factory=list)
    candidate_ids: Tensor | None = None
    policy_version: int = 0
    token_versions: Tensor | None = None
    turns: Tensor | None = None
    segments: Tensor | None = None
    episodes: list[Episode] = field(default_factory=list)
    provenance: Provenance = FRESH

    def __post_init__(self) -> None:
        rows, length = len(self.prompts) * self.group_size, self.completion_ids.shape[1]
        _check_shape("completion_ids", self.completion_ids, rows, length)
        _check_shape("completion_mask", self.completion_mask, rows, length)
        _check_shape("sampler_logprobs", self.sampler_logprobs, rows, length)
        _check_shape("truncated", self.truncated, rows)
        if self.candidate_ids is not None:
            size = self.candidate_ids.shape[-1]
            _check_shape("candidate_ids", self.candidate_ids, rows, length, size)
        for name in ("turns", "token_versions", "segments"):
            if getattr(self, name) is not None:
                _check_shape(name, getattr(self, name), rows, length)

    @cached_property
    def loss_mask(self) -> Tensor:
        """[N, C] True marks a token that the policy sampled.

        Only these contribute to the loss, lengths, denominators, entropy and KL. Attention sees
        `completion_mask`, which includes tool output.
        """
        return self.completion_mask if self.turns is None else self.turns >= 0

    @cached_property
    def turn_rewards(self) -> Tensor:
        """[N, K] float64 reward of each turn of an episode, on the host; NaN if it has none."""
        rewards = [
            [math.nan if reward is None else reward for reward in episode.turn_rewards]
            for episode in self.episodes
        ]
        return pad_rows(rewards, math.nan, torch.float64)

    @property
    def lengths(self) -> Tensor:
        """[N] number of tokens of each completion that the policy sampled."""
        return self.loss_mask.sum(1)

    @property
    def tokens(self) -> TokenRows:
        """The rows as input of a model."""
        rows = torch.arange(len(self.completion_ids), device=self.completion_ids.device)
        return TokenRows(
            prompt_ids=self.prompts.prompt_ids,
            prompt_mask=self.prompts.prompt_mask,
            prompt_of=rows // self.group_size,
            completion_ids=self.completion_ids,
            completion_mask=self.completion_mask,
            candidate_ids=self.candidate_ids,
            predicted=None if self.turns is None else self.loss_mask,
            segments=self.segments,
        )

    @property
    def reference_tokens(self) -> TokenRows:
        """The rows as input of the reference, which may read other prompts than the policy."""
        rows, prompts = self.tokens, self.prompts.columns.get(REFERENCE_PROMPT)
        if prompts is None:
            return rows
        ids, mask = (tensor.to(rows.prompt_ids.device) for tensor in pad_left(prompts, pad_id=0))
        return replace(rows, prompt_ids=ids, prompt_mask=mask)

    def token_lists(self) -> list[list[int]]:
        """N lists of token ids without padding, with one transfer to the host."""
        rows = zip(self.completion_ids.tolist(), self.completion_mask.sum(1).tolist(), strict=True)
        return [ids[:length] for ids, length in rows]


ROUNDING = 1e-6  # relative difference up to which rewards count as equal


def compare_within_groups(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, G] deviation from the group's mean, [B, 1] standard deviation, [B, 1] n - 1.

    The deviation is NaN where the value is, and exactly 0 if the values of a group differ only by
    rounding. n - 1 are the degrees of freedom of n values that are not NaN, at least 1.

    Args:
        values: [B, G] float64; NaN for completions without a value, which are left out.
    """
    missing = values.isnan()
    largest = values.nan_to_num(0.0).abs().amax(1, keepdim=True)
    high = values.masked_fill(missing, -torch.inf).amax(1, keepdim=True)
    low = values.masked_fill(missing, torch.inf).amin(1, keepdim=True)
    # Rounding noise divided by its own standard deviation would be an advantage of order 1.
    equal = high - low <= ROUNDING * largest
    deviation = torch.where(equal & ~missing, 0.0, values - values.nanmean(1, keepdim=True))
    degrees_of_freedom = ((~missing).sum(1, keepdim=True) - 1).clamp(min=1)
    std = (deviation.square().nansum(1, keepdim=True) / degrees_of_freedom).sqrt()
    return deviation, std, degrees_of_freedom


@dataclass(frozen=True)
class RewardTable:
    """Rewards of a rollout: one number per reward component and completion.

    Args:
        components: {name: [B, G]} float64; NaN if a function abstained or failed.
        weights: {name: weight of the component in the total}, same keys as `components`.
        total: [B, G] float64 weighted sum over `processed`, without those that are NaN; 0 if all
            are.
        valid: [B, G] False if a function that counts in the total failed, or all abstained: the row
            has zero advantage.
        processed: {name: [B, G]} the components after normalization and gates, which are weighted
            and summed; default: the components themselves.
        metrics: {name to log: number} that reward functions of this rank logged themselves.
        extras: {column: {row: value}}, shown next to the samples.
        greedy: [B] total reward of each prompt's greedy completion, NaN if it is not valid; None
            unless the advantages need it.
        tasks: B names of the prompts' tasks, "" for prompts without one; empty if none is known.

    Example:
        >>> rewards = RewardTable(
        ...     components={
        ...         "correct": torch.tensor([[1.0, 0.0]]).double(),
        ...         "format": torch.tensor([[1.0, 1.0]]).double(),
        ...     },
        ...     weights={"correct": 1.0, "format": 0.2},
        ...     total=torch.tensor([[1.2, 0.2]]).double(),
        ...     valid=torch.tensor([[True, True]]),
        ... )
        >>> rewards.find_zero_variance()
        tensor([0.], dtype=torch.float64)
    """

    components: dict[str, Tensor]
    weights: dict[str, float]
    total: Tensor
    valid: Tensor
    processed: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)
    greedy: Tensor | None = None
    tasks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.processed:
            object.__setattr__(self, "processed", self.components)
        for name, keys in (("weights", self.weights.keys()), ("processed", self.processed.keys())):
            if keys != self.components.keys():
                raise ValueError(
                    f"{name} has the keys {list(keys)}, expected those of components: "
                    f"{list(self.components)}"
                )
        for name, values in [*self.components.items(), *self.processed.items()]:
            _check_shape(name, values, *self.total.shape)
        _check_shape("valid", self.valid, *self.total.shape)
        if self.greedy is not None:
            _check_shape("greedy", self.greedy, len(self.total))

    @property
    def scored(self) -> Tensor:
        """[B, G] float64 total reward, NaN for completions without a valid one."""
        return self.total.double().where(self.valid, torch.nan)

    def find_correct(self, deciding: Mapping[str, str], threshold: float) -> Tensor:
        """[B, G] 1.0 where the reward that decides reaches a threshold, else 0.0.

        NaN for completions that it did not score (None), or that have no valid reward.

        Args:
            deciding: {task: name of the reward that decides there}, "" for all other tasks.
            threshold: least reward of a correct completion.
        """
        values = self.components[deciding[""]].clone()
        for row, task in enumerate(self.tasks):
            if task in deciding:
                values[row] = self.components[deciding[task]][row]
        is_scored = self.valid & ~values.isnan()
        return (values >= threshold).double().where(is_scored, torch.nan)

    def find_zero_variance(self) -> Tensor:
        """[B] 1.0 for groups whose scored rewards are equal but for rounding, else 0.0.

        A single scored completion has nothing to differ from: 1.0. NaN for groups without one.
        """
        deviation = compare_within_groups(self.scored)[0]
        equal = (deviation.nan_to_num(0.0) == 0).all(1)
        return equal.double().where(self.valid.any(1), torch.nan)


@dataclass(frozen=True)
class RolloutLogprobs:
    """Log-probabilities of a rollout under the old policy and the reference.

    Args:
        old: [N, C] under the policy before the first optimizer step. None: there is one optimizer
            step per rollout, so the current policy is the old one (ratio 1), and no KL in the
            reward needs them. A stale or inexact sampler is handled by
            `Objective.importance_correction`.
        ref: [N, C] under the reference; None without a reference.
        ref_hidden: [N, C, E] hidden states of the reference, if the KL term is exact over the
            vocabulary (`Objective.divergence`).
        score_norms: [N, C] see `TokenLogprobs`, under the policy before the first optimizer step;
            None unless the advantages need them.
    """

    old: Tensor | None = None
    ref: Tensor | None = None
    ref_hidden: Tensor | None = None
    score_norms: Tensor | None = None


@dataclass(frozen=True)
class TrainingBatch:
    """A training batch: M completions with per-token advantages and loss weights.

    That of an iteration has M = N rows; it is split into mini-batches and micro-batches.

    All log-probabilities are over `tokens.candidate_ids`.

    Args:
        tokens: the completions and their prompts, as input of a model.
        loss_mask: [M, C] True marks a token that the policy sampled.
        sampler_logprobs: [M, C] log-probability at sampling.
        advantages: [M, C] advantage of each token, computed by the estimator
            `Objective.advantages`.
        loss_weights: [M, C] weight of each token in the loss of its optimizer step, from the loss
            mask and the loss aggregation; exactly 0 for tokens not in the loss.
        old_logprobs: [M, C] log-probability before the rollout's first optimizer step; None: the
            current policy is the old one (ratio 1), see `RolloutLogprobs`.
        ref_logprobs: [M, C] log-probability under the reference; None without a reference.
        ref_hidden: [M, C, E] hidden states of the reference; see `RolloutLogprobs`.
        selected: [M, C] True marks a token that the surrogate selected among all of the optimizer
            step; None before `Objective.prepare_step`, or if the surrogate selects none.
        step_mask: [M, C] True marks a token that the step masks of the objective keep; None before
            `Objective.prepare_step`, or if nothing of the step is needed.
        term_weights: [M, C, K] weight of each token in the K terms of the loss that are means over
            tokens of their own (`Objective.mean_terms`); None without one. See
            `with_term_weights`.

    Example:
        Two completions of one prompt, of 2 and 1 tokens, aggregated by `token_mean`::

            mask = tensor([[True, True], [True, False]])
            TrainingBatch(
                TokenRows(
                    prompt_ids=tensor([[5, 6]]),
                    prompt_mask=tensor([[True, True]]),
                    prompt_of=tensor([0, 0]),
                    completion_ids=tensor([[9, 2], [2, 0]]),
                    completion_mask=mask,
                ),
                loss_mask=mask,
                sampler_logprobs=tensor([[-0.1, -0.2], [-2.3, 0.0]]),
                advantages=tensor([[0.71, 0.71], [-0.71, 0.0]]),
                loss_weights=tensor([[0.33, 0.33], [0.33, 0.0]]),
            )
    """

    tokens: TokenRows
    loss_mask: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    loss_weights: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    ref_hidden: Tensor | None = None
    selected: Tensor | None = None
    step_mask: Tensor | None = None
    term_weights: Tensor | None = None

    def __post_init__(self) -> None:
        _check_row_fields(self.row_fields(), self.tokens.completion_ids.shape)

    def __len__(self) -> int:
        """Number of completions, M."""
        return len(self.tokens)

    @property
    def has_gradient(self) -> Tensor:
        """[M] True marks a row with a gradient, if no term needs all rows.

        A token of it has a weight, and the row an advantage or a selected token, which may have a
        penalty (`KLCov`); or a token has a weight of a term that is a mean.
        """
        pushed = self.advantages != 0
        if self.selected is not None:
            pushed = pushed | self.selected
        has_gradient = (pushed & (self.loss_weights != 0)).any(1)
        if self.term_weights is not None:
            has_gradient = has_gradient | (self.term_weights != 0).any(-1).any(1)
        return has_gradient

    def row_fields(self) -> dict[str, Tensor]:
        """Return {name: [M, C, ...]} of the given fields beside `tokens`."""
        return _without_none(
            loss_mask=self.loss_mask,
            sampler_logprobs=self.sampler_logprobs,
            advantages=self.advantages,
            loss_weights=self.loss_weights,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
            ref_hidden=self.ref_hidden,
            selected=self.selected,
            step_mask=self.step_mask,
            term_weights=self.term_weights,
        )

    def with_term_weights(self, weights: Tensor) -> TrainingBatch:
        """Return the same rows with weights [M, C, K] of terms, whose tokens are then predicted."""
        predicted = self.loss_mask | (weights != 0).any(-1)
        return replace(self, term_weights=weights, tokens=replace(self.tokens, predicted=predicted))

    def select(self, rows: Tensor) -> TrainingBatch:
        """Select rows [m] and their prompts, in any order, without columns that are all padding."""
        tokens = self.tokens.select(rows)
        width = tokens.completion_ids.shape[1]
        (index,) = to_device([rows.cpu()], self.advantages.device)
        fields = {name: value[index, :width] for name, value in self.row_fields().items()}
        return replace(self, tokens=tokens, **fields)


def move_to_positions(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Move the entries of split rows back to the rows that they are from.

    Args:
        values: [m, c, ...] of split rows, see `TokenRows.split_segments`.
        places: [m, c] position of each entry in [M * C], -1 on padding.
        shape: (M, C).

    Returns:
        [M, C, ...], 0 elsewhere.
    """
    is_token = places >= 0
    flat = values.new_zeros(shape.numel(), *values.shape[2:])
    flat = flat.index_copy(0, places[is_token], values[is_token])
    return flat.view(*shape, *values.shape[2:])


@dataclass(frozen=True)
class TokenLogprobs:
    """Per-token log-probabilities and entropies of given completions under a policy.

    Args:
        logprobs: [M, C] float32 log-probability of each completion token; 0 on padding.
        entropy: [M, C] float32 entropy of the distribution it was drawn from; 0 on padding.
        divergence: [M, C] float32 divergence of that distribution from the reference's; None
            without a `Divergence`.
        score_norms: [M, C] float32 squared norm of the gradient of a token's log-probability by the
            logits; None unless they were asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    divergence: Tensor | None = None
    score_norms: Tensor | None = None

    def row_fields(self) -> dict[str, Tensor]:
        """Return {name: [M, C, ...]} of the given fields."""
        return _without_none(
            logprobs=self.logprobs,
            entropy=self.entropy,
            divergence=self.divergence,
            score_norms=self.score_norms,
        )

    def to_positions(self, places: Tensor, shape: torch.Size) -> TokenLogprobs:
        """Move the entries of split rows back to their rows; see `move_to_positions`."""
        return TokenLogprobs(
            **{
                name: move_to_positions(values, places, shape)
                for name, values in self.row_fields().items()
            }
        )

    @classmethod
    def from_columns(
        cls, columns: Sequence[Tensor], *, compared: bool, score_norms: bool
    ) -> TokenLogprobs:
        """Name what `token_logprobs` returned, [M, C] each, with or without the last two."""
        names = ["logprobs", "entropy", *["divergence"] * compared, *["score_norms"] * score_norms]
        return cls(**dict(zip(names, columns, strict=True)))


@dataclass(frozen=True)
class LossOutput:
    """Loss and metrics of one micro-batch.

    Args:
        loss: [] sum over tokens of loss weight times token loss, all terms included.
        stats: {name: [2]} a sum over tokens (or rows) and the count to divide it by, so that sums
            over micro-batches and ranks give exact averages.
    """

    loss: Tensor
    stats: Stats


@dataclass(frozen=True)
class StepReport:
    """Learning rate and metrics of one optimizer step.

    Args:
        lr: learning rate of the step.
        sums: {name: [2]} a sum and the count to divide it by, over the rows in the loss (rows
            without a gradient are left out); empty if the step was skipped.
        skipped: None if the step was taken. It is skipped if a loss or gradient is not finite:
            {row of the rollout: the number that is not finite}, empty if no single row explains it.
    """

    lr: float
    sums: Stats = field(default_factory=dict)
    skipped: dict[int, str] | None = None


@dataclass(frozen=True)
class Experience:
    """Completions with their rewards, as an iteration trains on them.

    Args:
        prompts: B prompts that the completions continue, before an environment added its openings;
            those of stored rollouts have them already.
        rollout: N completions.
        rewards: [B, G] theirs.
        logprobs: [N, C] theirs before the update, and under the reference.
        sampled: all rollouts and rewards of the iteration: first those of the rollout as it was
            taken, then those of the attempts of dynamic sampling. Only the first are unbiased.
        stats: what the stages log.
    """

    prompts: PromptBatch
    rollout: Rollout
    rewards: RewardTable
    logprobs: RolloutLogprobs
    sampled: tuple[tuple[Rollout, RewardTable], ...] = ()
    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True)
class Iteration:
    """What an iteration did, for callbacks: `training_step` returns `{"iteration": Iteration}`.

    Args:
        number: of the iteration, from 1.
        experience: that it trained on.
        batch: the training batch.
        advantages: [B, G] of each completion, on the host; of a turn-level estimator, those of the
            last turns.
        steps: a report of each optimizer step.
        averages: {name: number} that is logged, over ranks and optimizer steps; what reward
            functions logged is of this rank.
    """

    number: int
    experience: Experience
    batch: TrainingBatch
    advantages: Tensor
    steps: list[StepReport]
    averages: Stats = field(default_factory=dict)

    @property
    def rollout(self) -> Rollout:
        """The N completions."""
        return self.experience.rollout

    @property
    def rewards(self) -> RewardTable:
        """[B, G] rewards of the completions."""
        return self.experience.rewards
