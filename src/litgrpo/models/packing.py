"""Packed micro-batches: one sequence with each prompt once and its completions, without padding.

In a padded micro-batch the rows of a group repeat their prompt. Here every distinct token is in one
sequence once, and only attention knows which tokens belong to a row. The gradient of a prompt is
then the sum over its group automatically. The idea is published as Prefix Grouper
(arXiv:2506.05433).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from litgrpo.models.architectures import has_known_layers
from litgrpo.models.kernels.linear import round_up_to_tile
from litgrpo.types import TokenRows

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

    Example:
        Completions of 2 and 1 tokens that are packed tokens 3, 4 and 5, both of prompt 0:

        >>> bucket = Bucket(
        ...     tokens=torch.tensor([3, 4, 5]),
        ...     places=torch.tensor([0, 1, 2]),
        ...     shape=(2, 2),
        ...     prompts=torch.tensor([0, 0]),
        ... )
        >>> bucket.to_grid(torch.tensor([9, 9, 9, 1, 2, 3]))
        tensor([[1, 2],
                [3, 0]])
    """

    tokens: Tensor
    places: Tensor
    shape: tuple[int, int]
    prompts: Tensor

    def to_grid(self, packed: Tensor) -> Tensor:
        """Arrange packed [T, ...] as [rows, width, ...] with zeros on padding."""
        rows, width = self.shape
        cells = packed.new_zeros(rows * width, *packed.shape[1:])
        cells = cells.index_copy(0, self.places, packed.index_select(0, self.tokens))
        return cells.unflatten(0, (rows, width))

    def from_grid(self, grid: Tensor) -> Tensor:
        """Return the entries [t, ...] of a grid [rows, width, ...] in the order of `tokens`."""
        return grid.flatten(0, 1).index_select(0, self.places)


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

    @staticmethod
    def of_groups(rows: TokenRows) -> Packing:
        """Pack every prompt once, followed by its completions.

        Args:
            rows: M completions, their masks without holes, and their prompts.
        """
        prompt_mask, prompt_of = rows.prompt_mask, rows.prompt_of
        prefix = prompt_mask.sum(1)
        fed = (rows.completion_mask.sum(1) - 1).clamp(min=0)
        suffixes = torch.zeros_like(prefix).index_add(0, prompt_of, fed)
        end = (prefix + suffixes).cumsum(0)
        start = end - prefix - suffixes

        # Sorted by prompt, so that the rows of a prompt are adjacent.
        order = prompt_of.argsort(stable=True)
        before = fed[order].cumsum(0) - fed[order]
        first = torch.empty_like(fed)
        first[order] = before + prefix.cumsum(0)[prompt_of[order]]

        column = torch.arange(rows.completion_mask.shape[1], device=fed.device)
        is_fed = column < fed[:, None]
        own = prompt_mask.long().cumsum(1) - 1  # [B, P] position in the prompt
        prefix_tokens = (start[:, None] + own)[prompt_mask]
        suffix_tokens = (first[:, None] + column)[is_fed]
        length = round_up_to_tile(len(prefix_tokens) + len(suffix_tokens))
        ids, positions = rows.prompt_ids.new_zeros(2, length)
        ids[prefix_tokens], ids[suffix_tokens] = (
            rows.prompt_ids[prompt_mask],
            rows.completion_ids[is_fed],
        )
        positions[prefix_tokens] = own[prompt_mask]
        positions[suffix_tokens] = (prefix[prompt_of, None] + column)[is_fed]

        last_of_prefix = (start + prefix - 1)[prompt_of, None]
        source = torch.cat([last_of_prefix, first[:, None] + column[:-1]], 1)
        everyone = torch.arange(len(prefix), device=fed.device)
        return Packing(
            ids=ids,
            positions=positions,
            predicting=source[rows.completion_mask],
            groups=torch.stack([start, start + prefix, end], 1).tolist(),
            prefixes=_make_bucket(everyone, start, prefix, everyone),
            suffixes=[
                _make_bucket(each, first, fed, prompt_of) for each in group_similar_lengths(fed)
            ],
        )

    @staticmethod
    def of_rows(ids: Tensor, mask: Tensor, targets: Tensor) -> Packing:
        """Pack whole rows, each as a prefix without suffixes (supervised fine-tuning).

        Args:
            ids: [M, T] token ids, padded on either side.
            mask: [M, T] True marks a real token.
            targets: [M, T] True marks the tokens to predict; never the first of a row.
        """
        lengths = mask.sum(1)
        start = lengths.cumsum(0) - lengths
        own = mask.long().cumsum(1) - 1
        everyone = torch.arange(len(ids), device=ids.device)
        num_tokens = int(mask.sum())
        unread = (0, round_up_to_tile(num_tokens) - num_tokens)
        return Packing(
            ids=functional.pad(ids[mask], unread),
            positions=functional.pad(own[mask], unread),
            predicting=(start[:, None] + own - 1)[targets],
            groups=torch.stack([start, start + lengths, start + lengths], 1).tolist(),
            prefixes=_make_bucket(everyone, start, lengths, everyone),
            suffixes=[],
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens without the padding at the end."""
        return self.groups[-1][2]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row, prompt and completion."""
        return int(self.positions.max()) + 1


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
    mask = rows.completion_mask
    lengths = mask.sum(1)
    column = torch.arange(mask.shape[1], device=lengths.device)
    if not torch.equal(mask, column < lengths[:, None]):
        return False  # masks with holes cannot be packed
    packed = int(rows.prompt_mask.sum()) + int(lengths.sum())
    return len(rows) * (rows.prompt_ids.shape[1] + mask.shape[1]) >= MIN_SAVING * packed


def _make_bucket(rows: Tensor, first: Tensor, lengths: Tensor, prompt_of: Tensor) -> Bucket:
    length = lengths[rows]
    width = int(length.max())
    column = torch.arange(width, device=rows.device)
    real = column < length[:, None]
    places = real.flatten().nonzero().squeeze(1)
    tokens = (first[rows, None] + column)[real]
    return Bucket(tokens, places, (len(rows), width), prompt_of[rows])


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
