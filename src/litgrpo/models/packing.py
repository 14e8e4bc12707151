"""Packs a micro-batch into one sequence: each prompt once, then its completions, without padding.

The rows of a group repeat their prompt, and rows of unequal length are filled up with padding.
Here all tokens that differ stand in one sequence, and only attention knows which token follows
which. The gradient of a prompt is then the sum over its group by itself. The idea is published as
Prefix Grouper (arXiv:2506.05433).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from litgrpo.models.architectures import has_known_layers
from litgrpo.models.kernels.linear import tiled
from litgrpo.types import TokenRows

# Packing has its price in attention: it must save at least a tenth of the tokens.
WORTH = 1.1


@dataclass(frozen=True)
class Bucket:
    """Rows of similar length, for the one place where they must stand in a grid: attention.

    Args:
        tokens: [t] numbers in the packed sequence of the rows' tokens, row by row.
        places: [t] where they stand in the flattened grid [rows, width].
        shape: rows and width.
        prompts: [rows] the prompt that each row continues.
    """

    tokens: Tensor
    places: Tensor
    shape: tuple[int, int]
    prompts: Tensor

    def grid(self, packed: Tensor) -> Tensor:
        """Packed [T, ...] -> [rows, width, ...], zeros on padding."""
        rows, width = self.shape
        cells = packed.new_zeros(rows * width, *packed.shape[1:])
        cells = cells.index_copy(0, self.places, packed.index_select(0, self.tokens))
        return cells.unflatten(0, (rows, width))

    def ungrid(self, grid: Tensor) -> Tensor:
        """[rows, width, ...] -> [t, ...], the order of `tokens`."""
        return grid.flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True)
class Packing:
    """Where everything stands in the packed sequence of T tokens: prefix, suffixes, next prefix.

    A prefix is a prompt, its suffixes are the completions. A completion's last token predicts
    nothing, so it is not fed. The last tokens, which fill T up to a multiple of 128, are seen by
    no other.

    Args:
        ids: [T] token ids.
        positions: [T] positions of the tokens in their rows.
        predicting: [K] the packed token whose hidden state predicts each completion token, in the
            order of the completion mask.
        groups: where each prefix starts, where it ends and its suffixes start, where they end.
        prefixes: all prefixes as one bucket.
        suffixes: the suffixes, in buckets of similar length.
    """

    ids: Tensor
    positions: Tensor
    predicting: Tensor
    groups: list[tuple[int, int, int]]
    prefixes: Bucket
    suffixes: list[Bucket]

    @staticmethod
    def of_groups(rows: TokenRows) -> Packing:
        """Every prompt once, followed by its completions.

        Args:
            rows: M completions, their masks without holes, and their prompts.
        """
        prompt_mask, prompt_of = rows.prompt_mask, rows.prompt_of
        prefix = prompt_mask.sum(1)
        fed = (rows.completion_mask.sum(1) - 1).clamp(min=0)
        suffixes = torch.zeros_like(prefix).index_add(0, prompt_of, fed)
        end = (prefix + suffixes).cumsum(0)
        start = end - prefix - suffixes

        # Rows of a prompt stand one after another, prompts in order.
        order = prompt_of.argsort(stable=True)
        before = fed[order].cumsum(0) - fed[order]
        first = torch.empty_like(fed)
        first[order] = before + prefix.cumsum(0)[prompt_of[order]]

        column = torch.arange(rows.completion_mask.shape[1], device=fed.device)
        is_fed = column < fed[:, None]
        own = prompt_mask.long().cumsum(1) - 1  # [B, P] position in the prompt
        prefix_tokens = (start[:, None] + own)[prompt_mask]
        suffix_tokens = (first[:, None] + column)[is_fed]
        length = tiled(len(prefix_tokens) + len(suffix_tokens))
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
            prefixes=_bucket(everyone, start, prefix, everyone),
            suffixes=[_bucket(each, first, fed, prompt_of) for each in similar_lengths(fed)],
        )

    @staticmethod
    def of_rows(ids: Tensor, mask: Tensor, targets: Tensor) -> Packing:
        """Rows one after another, each a prefix without suffixes.

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
        unread = (0, tiled(num_tokens) - num_tokens)
        return Packing(
            ids=functional.pad(ids[mask], unread),
            positions=functional.pad(own[mask], unread),
            predicting=(start[:, None] + own - 1)[targets],
            groups=torch.stack([start, start + lengths, start + lengths], 1).tolist(),
            prefixes=_bucket(everyone, start, lengths, everyone),
            suffixes=[],
        )

    @property
    def num_tokens(self) -> int:
        """Tokens before those that nothing depends on."""
        return self.groups[-1][2]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and completion."""
        return int(self.positions.max()) + 1


def can_share(model: PreTrainedModel) -> bool:
    """Whether the rows of a group may share their prompt in this model."""
    config = model.config.to_dict()
    drops = any(
        "drop" in name and isinstance(rate, float) and rate
        for name, rate in config.items()
        if not name.startswith(("summary_", "classifier_"))  # heads that we do not have
    )
    return has_known_layers(model) and not drops


def sharing_pays(rows: TokenRows) -> bool:
    """Whether the rows have clearly fewer tokens packed than with their padding."""
    mask = rows.completion_mask
    lengths = mask.sum(1)
    column = torch.arange(mask.shape[1], device=lengths.device)
    if not torch.equal(mask, column < lengths[:, None]):
        return False  # not one block from the first column on
    packed = int(rows.prompt_mask.sum()) + int(lengths.sum())
    return len(rows) * (rows.prompt_ids.shape[1] + mask.shape[1]) >= WORTH * packed


def _bucket(rows: Tensor, first: Tensor, lengths: Tensor, prompt_of: Tensor) -> Bucket:
    length = lengths[rows]
    width = int(length.max())
    column = torch.arange(width, device=rows.device)
    real = column < length[:, None]
    places = real.flatten().nonzero().squeeze(1)
    tokens = (first[rows, None] + column)[real]
    return Bucket(tokens, places, (len(rows), width), prompt_of[rows])


def similar_lengths(lengths: Tensor, least: int = 16, share: float = 0.6) -> list[Tensor]:
    """Rows by length: in each part the shortest has at least 60 % of the longest, or is short.

    Rows of no length are left out.
    """
    order = lengths.argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
    sizes = lengths[order].tolist()
    parts, begin = [], 0
    while begin < len(sizes):
        longest, end = sizes[begin], begin
        while end < len(sizes) and (sizes[end] >= share * longest or longest <= least):
            end += 1
        parts.append(order[begin:end])
        begin = end
    return parts


def family_buckets(
    lengths: Tensor,
    of_parents: Tensor,
    parents: Tensor,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[Tensor]:
    """Rows gathered by parent, so that what they share is in as few micro-batches as can be.

    A family that does not fit beside the others opens the next bucket; one that does not fit into
    a bucket of its own is divided.

    Args:
        lengths: [M] tokens of each row.
        of_parents: [B] tokens of each parent; they count once in every bucket with a child.
        parents: [M] the parent of each row.
        max_rows: rows of a bucket at most; None sets no limit.
        max_tokens: tokens of a bucket at most; a longer single row gets one of its own.

    Returns:
        Lists of row numbers; together every row once.

    Example:
        >>> family_buckets(
        ...     torch.tensor([1, 2, 3, 4]), torch.tensor([5, 5]), torch.tensor([0, 1, 0, 1]),
        ...     max_tokens=12,
        ... )
        [tensor([0, 2]), tensor([1, 3])]
    """
    most_rows = len(lengths) if max_rows is None else max_rows
    most_tokens = float("inf") if max_tokens is None else max_tokens

    def pieces(rows: list[int], costs: list[int], shared: int) -> Iterator[tuple[list[int], int]]:
        """A family's rows, in parts that fit into a bucket each, and the tokens of each part."""
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
    """The marked tokens of each row, moved to its left; columns that no row fills are cut off.

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
