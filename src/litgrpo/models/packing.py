"""Packed micro-batches: one sequence with each prompt once and its completions, without padding.

In a padded micro-batch the rows of a group repeat their prompt. Here every distinct token is in one
sequence once, and only attention knows which tokens belong to a row. The gradient of a prompt is
then the sum over its group automatically. The idea is published as Prefix Grouper
(arXiv:2506.05433).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from litgrpo.models.architectures import has_known_layers
from litgrpo.models.kernels.linear import round_up_to_tile
from litgrpo.types import TokenRows, to_device

# Packing costs time in attention, so it must save at least a tenth of the tokens.
MIN_SAVING = 1.1
# Rows of similar length, as a fraction of the longest; rows of at most 16 tokens always are.
MIN_SIMILAR_FRAC, ALWAYS_SIMILAR = 0.6, 16


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length as a padded grid, which attention needs."""

    tokens: Tensor  # [t] indices of the rows' tokens in the packed sequence, row by row
    cells: Tensor  # [t] their indices in the flattened grid
    shape: tuple[int, int]  # rows and width of the grid
    prompts: Tensor  # [rows] the prompt that each row continues
    lengths: Tensor  # [rows] tokens of each row

    def to_grid(self, packed: Tensor) -> Tensor:
        """Arrange packed [T, ...] as [rows, width, ...] with zeros on padding."""
        rows, width = self.shape
        grid = packed.new_zeros(rows * width, *packed.shape[1:])
        grid = grid.index_copy(0, self.cells, packed.index_select(0, self.tokens))
        return grid.unflatten(0, (rows, width))

    def from_grid(self, grid: Tensor) -> Tensor:
        """Return the entries [t, ...] of a grid [rows, width, ...] in the order of `tokens`."""
        return grid.flatten(0, 1).index_select(0, self.cells)


class Segments(NamedTuple):
    """Consecutive segments of a sequence of tokens."""

    bounds: Tensor  # [n + 1] int32 index of each segment's first token, and the end of the last one
    longest: int  # tokens of the longest segment


@dataclass(frozen=True)
class KeySets:
    """Queries and their keys as segments, for kernels of segments without padding."""

    rows: Segments  # of the packed sequence: every prefix and every suffix, and the padding
    suffix_tokens: Tensor  # [S] indices of the tokens of all suffixes
    prefix_tokens: Tensor  # [R] indices of the tokens of the prefixes that have suffixes
    suffixes: Segments  # of `suffix_tokens`, all suffixes of a prefix together
    prefixes: Segments  # of `prefix_tokens`, as many


@dataclass(frozen=True)
class Packing:
    """Layout of the packed sequence of T tokens: prefix, its suffixes, next prefix, and so on.

    A prefix is a prompt, its suffixes are the completions. A completion's last token predicts
    nothing, so it is not fed. T is padded to a multiple of 128; no token attends to the padding.

    Example:
        Prompt `[1, 2]` with completions `[3, 4]` and `[5, 6, 7]`:

        >>> ones = torch.ones(2, 3, dtype=torch.bool)
        >>> packing = Packing.of_groups(
        ...     TokenRows(
        ...         prompt_ids=torch.tensor([[1, 2]]),
        ...         prompt_mask=ones[:1, :2],
        ...         prompt_of=torch.tensor([0, 0]),
        ...         completion_ids=torch.tensor([[3, 4, 0], [5, 6, 7]]),
        ...         completion_mask=torch.tensor([[True, True, False], [True, True, True]]),
        ...     )
        ... )
        >>> packing.ids[:5], packing.positions[:5], packing.predicting
        (tensor([1, 2, 3, 5, 6]), tensor([0, 1, 2, 2, 3]), tensor([1, 2, 1, 3, 4]))
    """

    ids: Tensor  # [T]
    positions: Tensor  # [T] positions of the tokens in their rows
    # [K] the packed token whose hidden state predicts each completion token, in the order of the
    # completion mask.
    predicting: Tensor
    groups: list[tuple[int, int, int]]  # starts of the prefix and its suffixes, end of its suffixes
    prefixes: Bucket  # all prefixes
    suffixes: list[Bucket]  # of similar length
    longest: int  # tokens of the longest row, prompt and completion
    key_sets: KeySets | None = None  # for kernels of GPUs; None on a CPU
    # Masks of attention by window, which all layers share; filled by the first of them.
    visible: dict[int | None, list[Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of_groups(rows: TokenRows) -> Packing:
        """Pack every prompt once, followed by its completions, whose masks have no holes."""
        masks = rows.on_host
        prompt_mask, prompt_of = masks.prompt_mask, masks.prompt_of
        prefix_lengths = prompt_mask.sum(1)  # [B]
        suffix_lengths = (masks.completion_mask.sum(1) - 1).clamp(min=0)  # [M]
        suffix_totals = torch.zeros_like(prefix_lengths).index_add(0, prompt_of, suffix_lengths)
        group_end = (prefix_lengths + suffix_totals).cumsum(0)  # [B]
        prefix_start = group_end - prefix_lengths - suffix_totals

        # Sorted by prompt, so that the rows of a prompt are adjacent.
        order = prompt_of.argsort(stable=True)
        suffix_tokens_before = suffix_lengths[order].cumsum(0) - suffix_lengths[order]
        prefix_tokens_before = prefix_lengths.cumsum(0)[prompt_of[order]]
        suffix_start = torch.empty_like(suffix_lengths)  # [M]
        suffix_start[order] = suffix_tokens_before + prefix_tokens_before

        column = torch.arange(masks.completion_mask.shape[1])
        is_fed = column < suffix_lengths[:, None]  # [M, C]
        prompt_positions = prompt_mask.long().cumsum(1) - 1  # [B, P]
        prefix_tokens = (prefix_start[:, None] + prompt_positions)[prompt_mask]
        suffix_tokens = (suffix_start[:, None] + column)[is_fed]
        length = round_up_to_tile(len(prefix_tokens) + len(suffix_tokens))
        # The ids are gathered from all prompts, then all completions, then a 0 for the padding.
        num_prompt_ids = prompt_mask.numel()
        sources = torch.full((length,), num_prompt_ids + is_fed.numel())  # [T]
        sources[prefix_tokens] = prompt_mask.flatten().nonzero().squeeze(1)
        sources[suffix_tokens] = is_fed.flatten().nonzero().squeeze(1) + num_prompt_ids
        positions = torch.zeros(length, dtype=torch.long)
        positions[prefix_tokens] = prompt_positions[prompt_mask]
        positions[suffix_tokens] = (prefix_lengths[prompt_of, None] + column)[is_fed]

        last_prefix_token = (prefix_start + prefix_lengths - 1)[prompt_of, None]
        predicting = torch.cat([last_prefix_token, suffix_start[:, None] + column[:-1]], 1)
        prompts = torch.arange(len(prefix_lengths))
        return _move_to_device(
            [rows.prompt_ids, rows.completion_ids],
            sources,
            positions,
            predicting[masks.completion_mask],
            torch.stack([prefix_start, prefix_start + prefix_lengths, group_end], 1),
            _make_bucket(prompts, prefix_start, prefix_lengths, prompts),
            [
                _make_bucket(bucket_rows, suffix_start, suffix_lengths, prompt_of)
                for bucket_rows in group_similar_lengths(suffix_lengths)
            ],
            suffix_start[suffix_lengths > 0],
        )

    @staticmethod
    def of_rows(ids: Tensor, mask: Tensor, targets: Tensor) -> Packing:
        """Pack whole rows, each as a prefix without suffixes (supervised fine-tuning).

        Ids [M, T] are padded on either side; `targets` [M, T] marks the tokens to predict, which
        are never the first of a row.
        """
        mask, targets = mask.cpu(), targets.cpu()
        lengths = mask.sum(1)
        start = lengths.cumsum(0) - lengths
        positions = mask.long().cumsum(1) - 1  # [M, T]
        rows = torch.arange(len(ids))
        num_tokens = int(mask.sum())
        padding = (0, round_up_to_tile(num_tokens) - num_tokens)
        return _move_to_device(
            [ids],
            functional.pad(mask.flatten().nonzero().squeeze(1), padding, value=mask.numel()),
            functional.pad(positions[mask], padding),
            (start[:, None] + positions - 1)[targets],
            torch.stack([start, start + lengths, start + lengths], 1),
            _make_bucket(rows, start, lengths, rows),
            [],
            start[:0],
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the padding at the end."""
        return self.groups[-1][2]


def can_share(model: PreTrainedModel) -> bool:
    """Check that the rows of a group may share their prompt: known layers, no dropout."""
    config = model.config.to_dict()
    unused_heads = ("summary_", "classifier_")  # which a language model does not have
    has_dropout = any(
        "drop" in name and isinstance(rate, float) and rate
        for name, rate in config.items()
        if not name.startswith(unused_heads)
    )
    return has_known_layers(model) and not has_dropout


def sharing_pays(rows: TokenRows) -> bool:
    """Check that packed rows have clearly fewer tokens than padded ones."""
    mask = rows.on_host.completion_mask
    lengths = mask.sum(1)
    column = torch.arange(mask.shape[1])
    if not torch.equal(mask, column < lengths[:, None]):
        return False  # masks with holes cannot be packed
    packed = int(rows.on_host.prompt_mask.sum()) + int(lengths.sum())
    return len(rows) * (rows.prompt_ids.shape[1] + mask.shape[1]) >= MIN_SAVING * packed


def _make_bucket(rows: Tensor, start: Tensor, lengths: Tensor, prompt_of: Tensor) -> Bucket:
    row_lengths = lengths[rows]
    width = int(row_lengths.max())
    column = torch.arange(width, device=rows.device)
    mask = column < row_lengths[:, None]
    cells = mask.flatten().nonzero().squeeze(1)
    tokens = (start[rows, None] + column)[mask]
    return Bucket(tokens, cells, (len(rows), width), prompt_of[rows], row_lengths)


def _move_to_device(
    ids: list[Tensor],
    sources: Tensor,
    positions: Tensor,
    predicting: Tensor,
    groups: Tensor,
    prefixes: Bucket,
    suffixes: list[Bucket],
    suffix_start: Tensor,
) -> Packing:
    """Build a packing on the device of the token ids from indices on the host.

    `sources` [T] are the indices of the packed ids in all `ids`, flattened; their end is a 0.
    """
    device = ids[0].device
    buckets = [prefixes, *suffixes]
    indices = [sources, positions, predicting]
    for bucket in buckets:
        indices += [bucket.tokens, bucket.cells, bucket.prompts, bucket.lengths]
    sets = None if device.type == "cpu" else _make_key_sets(groups, suffix_start, len(sources))
    if sets is not None:
        bounds = [sets.rows.bounds, sets.suffixes.bounds, sets.prefixes.bounds]
        indices += [sets.suffix_tokens, sets.prefix_tokens, *bounds]
    longest = int(positions.max()) + 1
    device_indices = to_device(indices, device)
    sources, positions, predicting = device_indices[:3]
    if sets is not None:
        suffix_tokens, prefix_tokens, *bounds = device_indices[-5:]
        # Kernels take int32; all indices travel as int64 in one transfer.
        lengths = [len(segment_bounds) for segment_bounds in bounds]
        row_bounds, suffix_bounds, prefix_bounds = torch.cat(bounds).int().split(lengths)
        sets = KeySets(
            sets.rows._replace(bounds=row_bounds),
            suffix_tokens,
            prefix_tokens,
            sets.suffixes._replace(bounds=suffix_bounds),
            sets.prefixes._replace(bounds=prefix_bounds),
        )
    device_buckets = []
    for number, bucket in enumerate(buckets):
        tokens, cells, prompts, row_lengths = device_indices[3 + 4 * number : 7 + 4 * number]
        device_buckets.append(Bucket(tokens, cells, bucket.shape, prompts, row_lengths))
    zero = ids[0].new_zeros(1)
    packed_ids = torch.cat([*(source.flatten() for source in ids), zero]).index_select(0, sources)
    return Packing(
        packed_ids,
        positions,
        predicting,
        groups.tolist(),
        device_buckets[0],
        device_buckets[1:],
        longest,
        sets,
    )


def _make_key_sets(groups: Tensor, suffix_start: Tensor, length: int) -> KeySets:
    """Build the segments of a packed sequence of `length` tokens on the host."""
    prefix_starts, suffix_starts, ends = groups[groups[:, 2] > groups[:, 1]].unbind(1)
    padding_bounds = torch.stack([groups[-1, 2], torch.tensor(length)])
    row_bounds = torch.cat([groups[:, 0], suffix_start, padding_bounds]).unique()

    def segments(lengths: Tensor) -> Segments:
        bounds = functional.pad(lengths.cumsum(0), (1, 0))
        return Segments(bounds, int(lengths.max()) if len(lengths) else 0)

    def tokens(starts: Tensor, stops: Tensor) -> Tensor:
        limits = zip(starts.tolist(), stops.tolist(), strict=True)
        return torch.cat([starts[:0], *(torch.arange(*limit) for limit in limits)])

    return KeySets(
        Segments(row_bounds, int(row_bounds.diff().max())),
        tokens(suffix_starts, ends),
        tokens(prefix_starts, suffix_starts),
        segments(ends - suffix_starts),
        segments(suffix_starts - prefix_starts),
    )


def group_similar_lengths(lengths: Tensor) -> list[Tensor]:
    """Group rows with tokens by length, so that a padded grid of each group wastes little."""
    order = lengths.argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
    sizes = lengths[order].tolist()
    groups, start = [], 0
    while start < len(sizes):
        longest, end = sizes[start], start
        min_length = 0 if longest <= ALWAYS_SIMILAR else MIN_SIMILAR_FRAC * longest
        while end < len(sizes) and sizes[end] >= min_length:
            end += 1
        groups.append(order[start:end])
        start = end
    return groups


def bucket_by_parent(
    lengths: Tensor,
    parent_lengths: Tensor,
    parents: Tensor,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[Tensor]:
    """Group rows by parent, so that shared tokens are computed in as few micro-batches as possible.

    A parent whose rows do not fit into the current bucket opens the next one; if they exceed a
    whole bucket, they are split.

    Args:
        lengths: [M] tokens of each row.
        parent_lengths: [B] tokens of each parent; they count once in every bucket with a child.
        parents: [M] the parent of each row.
        max_rows: maximum rows of a bucket; None sets no limit.
        max_tokens: maximum tokens of a bucket; a longer single row gets a separate one.

    Returns:
        Lists of row numbers; together every row once.

    Example:
        >>> bucket_by_parent(
        ...     torch.tensor([1, 2, 3, 4]), torch.tensor([5, 5]), torch.tensor([0, 1, 0, 1]),
        ...     max_tokens=12,
        ... )
        [tensor([0, 2]), tensor([1, 3])]
    """
    most_rows = len(lengths) if max_rows is None else max_rows
    most_tokens = float("inf") if max_tokens is None else max_tokens

    def split(rows: list[int], costs: list[int], shared: int) -> Iterator[tuple[list[int], int]]:
        """Split a parent's rows into chunks that fit into a bucket each, with their tokens."""
        chunk: list[int] = []
        tokens = shared
        for row, cost in zip(rows, costs, strict=True):
            if chunk and (len(chunk) == most_rows or tokens + cost > most_tokens):
                yield chunk, tokens
                chunk, tokens = [], shared
            chunk.append(row)
            tokens += cost
        yield chunk, tokens

    buckets: list[list[int]] = []
    remaining = 0.0  # tokens that fit into the last bucket
    for parent in sorted(set(parents.tolist())):
        children = (parents == parent).nonzero().squeeze(1)
        shared = int(parent_lengths[parent])
        for chunk, tokens in split(children.tolist(), lengths[children].tolist(), shared):
            if not buckets or tokens > remaining or len(buckets[-1]) + len(chunk) > most_rows:
                buckets.append([])
                remaining = most_tokens
            buckets[-1] += chunk
            remaining -= tokens
    return [torch.tensor(rows, device=lengths.device) for rows in buckets]


def pack_left(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the marked tokens of each row to its left and cut off columns that no row fills.

    Args:
        ids: [M, T] token ids.
        mask: [M, T] True marks the tokens to keep; they keep their order.

    Returns:
        [M, t] ids and [M, t] bool mask.

    Example:
        >>> pack_left(torch.tensor([[5, 6, 7]]), torch.tensor([[False, True, True]]))[0]
        tensor([[6, 7]])
    """
    order = (~mask).long().argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    return ids.gather(1, order), mask.gather(1, order)
