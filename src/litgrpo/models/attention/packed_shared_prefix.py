"""A micro-batch as a forest: each prompt is a trunk, read once; its completions are the branches.

The rows of a group repeat their prompt, and rows of unequal length are filled up with padding.
Here all tokens that differ stand in one sequence without padding, and only attention knows who
follows whom. The gradient of a prompt is then the sum over its group by itself.

The library's own model code runs unchanged: an attention function registered under the name
`PROMPT_TREE` is handed the tree. The idea is published as Prefix Grouper (arXiv:2506.05433).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from litgrpo.models.attention import packed_flash as flash

PROMPT_TREE = "litgrpo_prompt_tree"
# Model types of the library whose tokens meet in its attention functions only, in full or sliding
# layers: each is tested. Any other reads its rows one by one, which is slower and never wrong.
KNOWN = {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral"}
KNOWN |= {"olmo2", "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2"}
LAYERS = {"full_attention", "sliding_attention"}
# The tree has its price in attention: it must save at least a tenth of the tokens.
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
class PromptTree:
    """Where everything stands in the packed sequence of T tokens: prompt, branches, next prompt.

    A completion's last token predicts nothing, so it is not fed.

    Args:
        ids: [T] token ids.
        positions: [T] positions of the tokens in their rows.
        predicting: [K] the packed token whose hidden state predicts each completion token, in the
            order of the completion mask.
        trunks: start, fork and end of each prompt: its own tokens are start to fork, its
            completions' fork to end.
        prompts: all prompts as one bucket.
        buckets: the completions.
    """

    ids: Tensor
    positions: Tensor
    predicting: Tensor
    trunks: list[tuple[int, int, int]]
    prompts: Bucket
    buckets: list[Bucket]

    @staticmethod
    def grow(
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt_of: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> PromptTree:
        """The tree of a micro-batch.

        Args:
            prompt_ids: [B, P] prompts, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            prompt_of: [M] the prompt that each completion continues.
            completion_ids: [M, C] padded on the right.
            completion_mask: [M, C] True marks a real token.
        """
        trunk = prompt_mask.sum(1)
        fed = (completion_mask.sum(1) - 1).clamp(min=0)
        branches = torch.zeros_like(trunk).index_add(0, prompt_of, fed)
        end = (trunk + branches).cumsum(0)
        start = end - trunk - branches

        # Rows of a prompt stand one after another, prompts in order.
        order = prompt_of.argsort(stable=True)
        before = fed[order].cumsum(0) - fed[order]
        first = torch.empty_like(fed)
        first[order] = before + trunk.cumsum(0)[prompt_of[order]]

        column = torch.arange(completion_mask.shape[1], device=fed.device)
        is_fed = column < fed[:, None]
        own = prompt_mask.long().cumsum(1) - 1  # [B, P] position in the prompt
        prompt_tokens = (start[:, None] + own)[prompt_mask]
        branch_tokens = (first[:, None] + column)[is_fed]
        length = len(prompt_tokens) + len(branch_tokens)
        ids, positions = prompt_ids.new_empty(length), prompt_ids.new_empty(length)
        ids[prompt_tokens], ids[branch_tokens] = prompt_ids[prompt_mask], completion_ids[is_fed]
        positions[prompt_tokens] = own[prompt_mask]
        positions[branch_tokens] = (trunk[prompt_of, None] + column)[is_fed]

        last_of_prompt = (start + trunk - 1)[prompt_of, None]
        source = torch.cat([last_of_prompt, first[:, None] + column[:-1]], 1)
        everyone = torch.arange(len(trunk), device=fed.device)
        return PromptTree(
            ids=ids,
            positions=positions,
            predicting=source[completion_mask],
            trunks=torch.stack([start, start + trunk, end], 1).tolist(),
            prompts=_bucket(everyone, start, trunk, everyone),
            buckets=[_bucket(rows, first, fed, prompt_of) for rows in _similar(fed)],
        )

    @staticmethod
    def of_rows(ids: Tensor, mask: Tensor, targets: Tensor) -> PromptTree:
        """Rows one after another, each a trunk without branches.

        Args:
            ids: [M, T] token ids, padded on either side.
            mask: [M, T] True marks a real token.
            targets: [M, T] True marks the tokens to predict; never the first of a row.
        """
        lengths = mask.sum(1)
        start = lengths.cumsum(0) - lengths
        own = mask.long().cumsum(1) - 1
        everyone = torch.arange(len(ids), device=ids.device)
        return PromptTree(
            ids=ids[mask],
            positions=own[mask],
            predicting=(start[:, None] + own - 1)[targets],
            trunks=torch.stack([start, start + lengths, start + lengths], 1).tolist(),
            prompts=_bucket(everyone, start, lengths, everyone),
            buckets=[],
        )

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


def has_known_layers(model: PreTrainedModel) -> bool:
    """Whether this is a model of the library whose tokens meet in its attention functions only."""
    return (
        type(model).__module__.startswith("transformers.")
        and model.config.model_type in KNOWN
        and set(model.config.to_dict().get("layer_types") or ()) <= LAYERS
    )


def sharing_pays(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    prompt_of: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
) -> bool:
    """Whether a tree of these rows has clearly fewer tokens than the rows with their padding."""
    lengths = completion_mask.sum(1)
    column = torch.arange(completion_mask.shape[1], device=lengths.device)
    if not torch.equal(completion_mask, column < lengths[:, None]):
        return False  # not one block from the first column on
    of_tree = int(prompt_mask.sum()) + int(lengths.sum())
    return len(prompt_of) * (prompt_ids.shape[1] + completion_ids.shape[1]) >= WORTH * of_tree


def _bucket(rows: Tensor, first: Tensor, lengths: Tensor, prompt_of: Tensor) -> Bucket:
    length = lengths[rows]
    width = int(length.max())
    column = torch.arange(width, device=rows.device)
    real = column < length[:, None]
    places = real.flatten().nonzero().squeeze(1)
    tokens = (first[rows, None] + column)[real]
    return Bucket(tokens, places, (len(rows), width), prompt_of[rows])


def _similar(lengths: Tensor, least: int = 16, share: float = 0.6) -> list[Tensor]:
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


def prompt_tree_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    prompt_tree: PromptTree,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Every token sees its own row's earlier tokens and its prompt.

    Args:
        module: the attention module.
        query: [1, heads, T, D].
        keys: [1, H, T, D].
        values: [1, H, T, D].
        attention_mask: unused; the tree knows who sees whom.
        prompt_tree: the tree.
        scaling: multiplies the scores.
        dropout: must be 0.
        sliding_window: positions that a token sees, itself included; None sees all.
        softcap: scores become softcap * tanh(score / softcap).
        kwargs: what the library passes to other kinds of attention.

    Returns:
        [1, T, heads, D] and no attention weights.
    """
    assert not dropout, "rows with dropout in attention do not share a prompt"
    tree = prompt_tree
    q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))  # [T, heads or H, D]
    if sliding_window is not None and tree.longest <= sliding_window:
        sliding_window = None
    if softcap is None and sliding_window is None and flash.works_for(query):
        return flash.tree_attention(q, k, v, tree, scaling)[None], None
    return _grid_attention(q, k, v, tree, scaling, sliding_window, softcap)[None], None


def _grid_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tree: PromptTree,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[T, heads, D] by plain operations: each row of a bucket with a copy of its prompt."""
    output = torch.empty_like(query)
    trunks, trunk_keys, trunk_values = (
        tree.prompts.grid(x).transpose(1, 2) for x in (query, keys, values)
    )
    prompts, length = tree.prompts.shape
    prompt_len = torch.bincount(tree.prompts.places // length, minlength=prompts)
    column = torch.arange(length, device=query.device)
    seen = _within(column[:, None], column, window)[None, None]
    said = _attend(trunks, trunk_keys, trunk_values, seen, scaling, softcap)
    output = output.index_copy(0, tree.prompts.tokens, tree.prompts.ungrid(said.transpose(1, 2)))
    for bucket in tree.buckets:
        own, own_keys, own_values = (bucket.grid(x).transpose(1, 2) for x in (query, keys, values))
        prompt = prompt_len[bucket.prompts, None, None]
        step = torch.arange(bucket.shape[1], device=query.device)[:, None]
        # Which of its prompt's tokens each token sees: prompts end in padding here.
        of_prompt = (column < prompt) & _within(prompt + step, column, window)
        of_row = _within(step, step.T, window).expand(len(prompt), -1, -1)
        said = _attend(
            own,
            torch.cat([trunk_keys.index_select(0, bucket.prompts), own_keys], 2),
            torch.cat([trunk_values.index_select(0, bucket.prompts), own_values], 2),
            torch.cat([of_prompt, of_row], 2)[:, None],
            scaling,
            softcap,
        )
        output = output.index_copy(0, bucket.tokens, bucket.ungrid(said.transpose(1, 2)))
    return output


def _within(positions: Tensor, others: Tensor, window: int | None) -> Tensor:
    """Whether a token at one position sees another: not later, and not beyond the window."""
    back = positions - others
    return back >= 0 if window is None else (back >= 0) & (back < window)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """[n, heads, t, D] of queries like it over keys [n, H, s, D] where seen [n, 1, t, s]."""
    n, heads, length, size = query.shape
    groups = keys.shape[1]
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=scaling, enable_gqa=heads != groups
        )
    # The query heads that share a key head become rows of one product.
    stacked = query.reshape(n, groups, -1, size) * scaling
    scores = torch.tanh(stacked @ keys.transpose(2, 3) / softcap) * softcap
    scores = scores.unflatten(2, (heads // groups, length))
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    output = weights.to(values.dtype).flatten(2, 3) @ values
    return output.view(n, heads, length, size)


AttentionInterface.register(PROMPT_TREE, prompt_tree_attention)
AttentionMaskInterface.register(PROMPT_TREE, lambda *args, **kwargs: None)
