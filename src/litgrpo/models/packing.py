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


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length as a padded grid, which attention needs.

    Args:
        tokens: [t] indices of the rows' tokens in the packed sequence, row by row.
        places: [t] their indices in the flattened grid [rows, width].
        shape: rows and width.
        prompts: [rows] the prompt that each row continues.
        lengths: [rows] tokens of each row.

    Example:
        Completions of 2 and 1 tokens that are packed tokens 3, 4 and 5, both of prompt 0:

        >>> bucket = Bucket(
        ...     tokens=torch.tensor([3, 4, 5]),
        ...     places=torch.tensor([0, 1, 2]),
        ...     shape=(2, 2),
        ...     prompts=torch.tensor([0, 0]),
        ...     lengths=torch.tensor([2, 1]),
        ... )
        >>> bucket.to_grid(torch.tensor([9, 9, 9, 1, 2, 3]))
        tensor([[1, 2],
                [3, 0]])
    """

    tokens: Tensor
    places: Tensor
    shape: tuple[int, int]
    prompts: Tensor
    lengths: Tensor

    def to_grid(self, packed: Tensor) -> Tensor:
        """Arrange packed [T, ...] as [rows, width, ...] with zeros on padding."""
        rows, width = self.shape
        cells = packed.new_zeros(rows * width, *packed.shape[1:])
        cells = cells.index_copy(0, self.places, packed.index_select(0, self.tokens))
        return cells.unflatten(0, (rows, width))

    def from_grid(self, grid: Tensor) -> Tensor:
        """Return the entries [t, ...] of a grid [rows, width, ...] in the order of `tokens`."""
        return grid.flatten(0, 1).index_select(0, self.places)


class Segments(NamedTuple):
    """Consecutive segments of a sequence of tokens.

    Args:
        bounds: [n + 1] int32 index of each segment's first token, and the end of the last one.
        longest: tokens of the longest segment.
    """

    bounds: Tensor
    longest: int


@dataclass(frozen=True)
class KeySets:
    """Queries and their keys as segments, for kernels of segments without padding.

    Args:
        rows: segments of the packed sequence: every prefix and every suffix, and the padding.
        suffix_tokens: [S] indices of the tokens of all suffixes.
        prefix_tokens: [R] indices of the tokens of the prefixes that have suffixes.
        suffixes: segments of `suffix_tokens`, all suffixes of a prefix together.
        prefixes: segments of `prefix_tokens`, as many.
    """

    rows: Segments
    suffix_tokens: Tensor
    prefix_tokens: Tensor
    suffixes: Segments
    prefixes: Segments


@dataclass(frozen=True)
class Packing:
    """Layout of the packed sequence of T tokens: prefix, its suffixes, next prefix, and so on.

    A prefix is a prompt, its suffixes are the completions. A completion's last token predicts
    nothing, so it is not fed. T is padded to a multiple of 128; no token attends to the padding.

    Args:
        ids: [T] token ids.
        positions: [T] positions of the tokens in their rows.
        predicting: [K] the packed token whose hidden state predicts each completion token, in the
            order of the completion mask.
        groups: (start of the prefix, start of its suffixes, end of its suffixes) of each prompt.
        prefixes: all prefixes as one bucket.
        suffixes: the suffixes, in buckets of similar length.
        longest: number of tokens of the longest row, prompt and completion.
        key_sets: which tokens attend to which, for kernels of GPUs; None on a CPU.
        visible: masks of attention by window, which all layers share; filled by the first of them.

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

    ids: Tensor
    positions: Tensor
    predicting: Tensor
    groups: list[tuple[int, int, int]]
    prefixes: Bucket
    suffixes: list[Bucket]
    longest: int
    key_sets: KeySets | None = None
    visible: dict[int | None, list[Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of_groups(rows: TokenRows) -> Packing:
        """Pack every prompt once, followed by its completions.

        Args:
            rows: M completions, their masks without holes, and their prompts.
        """
        masks = rows.on_host
        prompt_mask, prompt_of = masks.prompt_mask, masks.prompt_of
        prefix = prompt_mask.sum(1)
        fed = (masks.completion_mask.sum(1) - 1).clamp(min=0)
        suffixes = torch.zeros_like(prefix).index_add(0, prompt_of, fed)
        end = (prefix + suffixes).cumsum(0)
        start = end - prefix - suffixes

        # Sorted by prompt, so that the rows of a prompt are adjacent.
        order = prompt_of.argsort(stable=True)
        before = fed[order].cumsum(0) - fed[order]
        first = torch.empty_like(fed)
        first[order] = before + prefix.cumsum(0)[prompt_of[order]]

        column = torch.arange(masks.completion_mask.shape[1])
        is_fed = column < fed[:, None]
        own = prompt_mask.long().cumsum(1) - 1  # [B, P] position in the prompt
        prefix_tokens = (start[:, None] + own)[prompt_mask]
        suffix_tokens = (first[:, None] + column)[is_fed]
        length = round_up_to_tile(len(prefix_tokens) + len(suffix_tokens))
        # The ids are gathered from all prompts, then all completions, then a 0 for the padding.
        num_prompt_ids = prompt_mask.numel()
        cells = torch.full((length,), num_prompt_ids + is_fed.numel())
        cells[prefix_tokens] = prompt_mask.flatten().nonzero().squeeze(1)
        cells[suffix_tokens] = is_fed.flatten().nonzero().squeeze(1) + num_prompt_ids
        positions = torch.zeros(length, dtype=torch.long)
        positions[prefix_tokens] = own[prompt_mask]
        positions[suffix_tokens] = (prefix[prompt_of, None] + column)[is_fed]

        last_of_prefix = (start + prefix - 1)[prompt_of, None]
        source = torch.cat([last_of_prefix, first[:, None] + column[:-1]], 1)
        everyone = torch.arange(len(prefix))
        return _send(
            [rows.prompt_ids, rows.completion_ids],
            cells,
            positions,
            source[masks.completion_mask],
            torch.stack([start, start + prefix, end], 1),
            _make_bucket(everyone, start, prefix, everyone),
            [_make_bucket(each, first, fed, prompt_of) for each in group_similar_lengths(fed)],
            first[fed > 0],
        )

    @staticmethod
    def of_rows(ids: Tensor, mask: Tensor, targets: Tensor) -> Packing:
        """Pack whole rows, each as a prefix without suffixes (supervised fine-tuning).

        Args:
            ids: [M, T] token ids, padded on either side.
            mask: [M, T] True marks a real token.
            targets: [M, T] True marks the tokens to predict; never the first of a row.
        """
        mask, targets = mask.cpu(), targets.cpu()
        lengths = mask.sum(1)
        start = lengths.cumsum(0) - lengths
        own = mask.long().cumsum(1) - 1
        everyone = torch.arange(len(ids))
        num_tokens = int(mask.sum())
        unread = (0, round_up_to_tile(num_tokens) - num_tokens)
        return _send(
            [ids],
            functional.pad(mask.flatten().nonzero().squeeze(1), unread, value=mask.numel()),
            functional.pad(own[mask], unread),
            (start[:, None] + own - 1)[targets],
            torch.stack([start, start + lengths, start + lengths], 1),
            _make_bucket(everyone, start, lengths, everyone),
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
    drops = any(
        "drop" in name and isinstance(rate, float) and rate
        for name, rate in config.items()
        if not name.startswith(
            ("summary_", "classifier_")
        )  # dropout of heads that a language model does not have
    )
    return has_known_layers(model) and not drops


def sharing_pays(rows: TokenRows) -> bool:
    """Check that packed rows have clearly fewer tokens than padded ones."""
    mask = rows.on_host.completion_mask
    lengths = mask.sum(1)
    column = torch.arange(mask.shape[1])
    if not torch.equal(mask, column < lengths[:, None]):
        return False  # masks with holes cannot be packed
    packed = int(rows.on_host.prompt_mask.sum()) + int(lengths.sum())
    return len(rows) * (rows.prompt_ids.shape[1] + mask.shape[1]) >= MIN_SAVING * packed


def _make_bucket(rows: Tensor, first: Tensor, lengths: Tensor, prompt_of: Tensor) -> Bucket:
    length = lengths[rows]
    width = int(length.max())
    column = torch.arange(width, device=rows.device)
    real = column < length[:, None]
    places = real.flatten().nonzero().squeeze(1)
    tokens = (first[rows, None] + column)[real]
    return Bucket(tokens, places, (len(rows), width), prompt_of[rows], length)


def _send(
    sources: list[Tensor],
    cells: Tensor,
    positions: Tensor,
    predicting: Tensor,
    groups: Tensor,
    prefixes: Bucket,
    suffixes: list[Bucket],
    suffix_starts: Tensor,
) -> Packing:
    """Build a packing on the device of the token ids from indices on the host.

    Args:
        sources: token ids on the device, of any shape.
        cells: [T] where each packed id is in the flattened sources; their end: a 0.
        positions: see `Packing`, as the following.
        predicting: [K].
        groups: [B, 3].
        prefixes: bucket of all prefixes.
        suffixes: buckets.
        suffix_starts: first token of each suffix.
    """
    device = sources[0].device
    buckets = [prefixes, *suffixes]
    indices = [cells, positions, predicting]
    for bucket in buckets:
        indices += [bucket.tokens, bucket.places, bucket.prompts, bucket.lengths]
    sets = None if device.type == "cpu" else _make_key_sets(groups, suffix_starts, len(cells))
    if sets is not None:
        segments = [sets.rows.bounds, sets.suffixes.bounds, sets.prefixes.bounds]
        indices += [sets.suffix_tokens, sets.prefix_tokens, *segments]
    longest = int(positions.max()) + 1
    sent = to_device(indices, device)
    cells, positions, predicting = sent[:3]
    if sets is not None:
        suffix_tokens, prefix_tokens, *bounds = sent[-5:]
        # Kernels take int32; all indices travel as int64 in one transfer.
        own, suffix, prefix = torch.cat(bounds).int().split([len(each) for each in bounds])
        sets = KeySets(
            sets.rows._replace(bounds=own),
            suffix_tokens,
            prefix_tokens,
            sets.suffixes._replace(bounds=suffix),
            sets.prefixes._replace(bounds=prefix),
        )
    on_device = []
    for number, bucket in enumerate(buckets):
        tokens, places, prompts, row_lengths = sent[3 + 4 * number : 7 + 4 * number]
        on_device.append(Bucket(tokens, places, bucket.shape, prompts, row_lengths))
    zero = sources[0].new_zeros(1)
    ids = torch.cat([*(each.flatten() for each in sources), zero]).index_select(0, cells)
    return Packing(
        ids, positions, predicting, groups.tolist(), on_device[0], on_device[1:], longest, sets
    )


def _make_key_sets(groups: Tensor, suffix_starts: Tensor, length: int) -> KeySets:
    """Build the segments of a packed sequence of `length` tokens on the host; see `_send`."""
    start, middle, end = groups[groups[:, 2] > groups[:, 1]].unbind(1)
    ends = torch.stack([groups[-1, 2], torch.tensor(length)])
    rows = torch.cat([groups[:, 0], suffix_starts, ends]).unique()

    def segments(lengths: Tensor) -> Segments:
        bounds = functional.pad(lengths.cumsum(0), (1, 0))
        return Segments(bounds, int(lengths.max()) if len(lengths) else 0)

    def tokens(begin: Tensor, stop: Tensor) -> Tensor:
        ranges = [torch.arange(*each) for each in zip(begin.tolist(), stop.tolist(), strict=True)]
        return torch.cat([start[:0], *ranges])

    return KeySets(
        Segments(rows, int(rows.diff().max())),
        tokens(middle, end),
        tokens(start, middle),
        segments(end - middle),
        segments(middle - start),
    )


def group_similar_lengths(lengths: Tensor, always: int = 16, min_frac: float = 0.6) -> list[Tensor]:
    """Group rows by length, so that a padded grid of each group wastes little.

    Args:
        lengths: [M] tokens of each row; rows without tokens are left out.
        always: rows of at most this length may join any group.
        min_frac: other rows must have at least this fraction of the longest row's tokens.

    Example:
        >>> group_similar_lengths(torch.tensor([100, 0, 50, 90]))
        [tensor([0, 3]), tensor([2])]
    """
    order = lengths.argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
    sizes = lengths[order].tolist()
    parts, begin = [], 0
    while begin < len(sizes):
        longest, end = sizes[begin], begin
        while end < len(sizes) and (sizes[end] >= min_frac * longest or longest <= always):
            end += 1
        parts.append(order[begin:end])
        begin = end
    return parts


def bucket_by_parent(
    lengths: Tensor,
    of_parents: Tensor,
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
        of_parents: [B] tokens of each parent; they count once in every bucket with a child.
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

    def pieces(rows: list[int], costs: list[int], shared: int) -> Iterator[tuple[list[int], int]]:
        """Split a parent's rows into parts that fit into a bucket each, with their tokens."""
        part: list[int] = []
        tokens = shared
        for row, cost in zip(rows, costs, strict=True):
            if part and (len(part) == most_rows or tokens + cost > most_tokens):
                yield part, tokens
                part, tokens = [], shared
            part.append(row)
            tokens += cost
        yield part, tokens

    buckets: list[list[int]] = []
    room = 0.0
    for parent in sorted(set(parents.tolist())):
        family = (parents == parent).nonzero().squeeze(1)
        shared = int(of_parents[parent])
        for part, tokens in pieces(family.tolist(), lengths[family].tolist(), shared):
            if not buckets or tokens > room or len(buckets[-1]) + len(part) > most_rows:
                buckets.append([])
                room = most_tokens
            buckets[-1] += part
            room -= tokens
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
