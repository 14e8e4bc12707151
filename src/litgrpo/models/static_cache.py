"""Decoding in tensors whose shapes never change: one graph reads prompts, one feeds one token.

The library's own model code runs unchanged: an attention function registered under the name
`STATIC` is handed one of the three classes below, which are its cache, too. Positions are tensors,
so that a graph serves every step; what a row must not attend to is masked. Each prompt is read
once and its keys and values are shared by its group, as in `decode_shared_prefix`.

Only the three classes know the state's layout; a policy builds one, runs the model, and takes the
state out. All of it is a pure function of tensors, which a compiler may trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, EncoderDecoderCache

from litgrpo.tensors import query_scale, softcapped, widened, within

STATIC = "litgrpo_static"


class StaticState(NamedTuple):
    """What a policy remembers of the rows that it is decoding.

    Args:
        prompt_mask: [B, P] True marks a real token.
        prompts: keys of the first layer, its values, keys of the second and so on, of the prompts:
            each [B, H, P, D].
        own: the same of the rows' own tokens, with room for all of them: each [N, H, C, D].
        fed: [1] tokens fed so far to every row.
    """

    prompt_mask: Tensor
    prompts: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    fed: Tensor


def per_row(of_prompts: Tensor, group_size: int) -> Tensor:
    """[B, ...] -> [N, ...], each prompt's entry once for each of its rows."""
    shape = (-1, group_size, *(-1 for _ in of_prompts.shape[1:]))
    return of_prompts[:, None].expand(*shape).flatten(0, 1)


class StaticPrompts:
    """Prompts while they are read, all at once.

    Args:
        mask: [B, P] True marks a real token; padded on the left.
    """

    def __init__(self, mask: Tensor) -> None:
        """Nothing has been read."""
        self.mask = mask
        self.read: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values [B, H, P, D]; layers come in order."""
        assert len(self.read) == 2 * layer
        self.read += (keys, values)
        return keys, values

    def attend(
        self,
        module: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of each token [B, heads, P, D] to the ones before it and to itself."""
        batch, heads, length, size = query.shape
        groups = keys.shape[1]
        column = torch.arange(length, device=query.device)
        back = column[:, None] - column
        # Padding attends to itself, because softmax over nothing would give NaN to those after it.
        visible = (within(back, sliding_window) & self.mask[:, None, :]) | (back == 0)
        if softcap is None:
            return scaled_dot_product_attention(
                *(query, keys, values, visible[:, None]), scale=scaling, enable_gqa=heads > groups
            )
        scale = query_scale(scaling, softcap)
        query = query.reshape(batch, groups, -1, size) * scale  # [B, H, r * P, D]
        scores = softcapped((query @ keys.mT).view(batch, groups, -1, length, length), softcap)
        weights = widened(scores).masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        output = weights.to(values.dtype).view(batch, groups, -1, length) @ values
        return output.view(batch, heads, length, -1)

    def state(self, group_size: int, capacity: int) -> StaticState:
        """What was read, and room for `capacity` tokens of `group_size` rows of each prompt."""
        rows = len(self.mask) * group_size
        own = [each.new_zeros(rows, each.shape[1], capacity, each.shape[3]) for each in self.read]
        fed = torch.zeros(1, dtype=torch.long, device=self.mask.device)
        prompts = tuple(self.read)
        return StaticState(self.mask, prompts, tuple(own), fed)


class StaticRows:
    """Rows while they are fed one token each; the state as it was before.

    In a compiled graph the state's tensors stay as they are and new ones come out; otherwise they
    are index_copy in place, and the old state is gone.
    """

    def __init__(self, state: StaticState) -> None:
        """Nothing has been fed."""
        self.before = state
        self.group_size = state.own[0].shape[0] // state.prompt_mask.shape[0]
        self.own = list(state.own)
        self.masks: dict[int | None, Tensor] = {}

    @property
    def after(self) -> StaticState:
        """The state with the token that was fed."""
        state = self.before  # not `_replace`: compilers do not know it
        own = tuple(self.own)
        return StaticState(state.prompt_mask, state.prompts, own, state.fed + 1)

    @property
    def positions(self) -> Tensor:
        """[N, 1] of the tokens that are fed, counted from the beginning of the prompt."""
        lengths = self.before.prompt_mask.sum(1, keepdim=True)
        return per_row(lengths, self.group_size) + self.before.fed

    def get_seq_length(self, layer: int = 0) -> Any:
        """[1] tokens fed so far."""
        return self.before.fed

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [N, H, 1, D]; return those of all [N, H, C, D]."""
        for number, new in ((2 * layer, keys), (2 * layer + 1, values)):
            self.own[number] = index_copy(self.own[number], 2, self.before.fed, new)
        return self.own[2 * layer], self.own[2 * layer + 1]

    def attend(
        self,
        module: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """One query per row [N, heads, 1, D] over its prompt and its own tokens [N, H, C, D]."""
        rows, heads, _, size = query.shape
        groups, columns = keys.shape[1:3]
        query = query.reshape(rows * groups, -1, size)
        query = query * query_scale(scaling, softcap)  # [N * H, r, D]
        layer = 2 * module.layer_idx
        prompt_keys, prompt_values = self.before.prompts[layer : layer + 2]
        on_prompt = self._to_cells(query, groups) @ prompt_keys.mT
        own = query @ keys.flatten(0, 1).mT
        scores = torch.cat([self._to_rows(on_prompt, groups), own], -1)
        scores = softcapped(scores, softcap)
        scores = scores.view(rows, -1, scores.shape[-1])  # [N, heads, P + C]
        scores = widened(scores).masked_fill(self._hidden(sliding_window, columns), -torch.inf)
        weights = scores.softmax(-1).to(values.dtype).view(rows * groups, -1, scores.shape[-1])
        of_prompt, of_own = weights.split((weights.shape[-1] - columns, columns), -1)
        from_prompt = self._to_cells(of_prompt, groups) @ prompt_values
        output = self._to_rows(from_prompt, groups) + of_own @ values.flatten(0, 1)
        return output.view(rows, heads, 1, -1)

    def _hidden(self, window: int | None, columns: int) -> Tensor:
        """[N, 1, P + C] True where a row does not attend; the same in all layers of one window."""
        if window not in self.masks:
            prompt_mask, fed = self.before.prompt_mask, self.before.fed
            slots = prompt_mask.shape[1]
            back = slots + fed - torch.arange(slots + columns, device=fed.device)
            padding = torch.nn.functional.pad(~prompt_mask, (0, columns))
            hidden = per_row(padding, self.group_size) | ~within(back, window)
            self.masks[window] = hidden[:, None]
        return self.masks[window]

    def _to_cells(self, rows: Tensor, groups: int) -> Tensor:
        """[N * H, r, X] -> [B, H, G * r, X]: rows of one prompt become one matrix."""
        cells = rows.view(-1, self.group_size, groups, *rows.shape[1:]).transpose(1, 2)
        return cells.flatten(2, 3)

    def _to_rows(self, cells: Tensor, groups: int) -> Tensor:
        """The inverse of `_to_cells`, for any last size."""
        rows = cells.unflatten(2, (self.group_size, -1)).transpose(1, 2)
        return rows.reshape(-1, *rows.shape[3:])


class CrossLayer(NamedTuple):
    """Keys and values of the prompts [B, H, P, D], where the library's decoder looks for them."""

    keys: Tensor
    values: Tensor


class CrossAttention(NamedTuple):
    """All layers of them."""

    layers: list[CrossLayer]


class StaticAnswers(EncoderDecoderCache):
    """Rows of an encoder-decoder model while they are fed one token each.

    The state's `prompts` are keys and values of cross-attention, which takes no position; a row's
    own tokens begin with the decoder's start token.
    """

    def __init__(self, state: StaticState) -> None:
        """The face that the library's decoder knows: own tokens here, prompts there."""
        self.rows = StaticRows(state)
        pairs = zip(state.prompts[::2], state.prompts[1::2], strict=True)
        cross = CrossAttention([CrossLayer(keys, values) for keys, values in pairs])
        self.self_attention_cache: Any = self.rows
        self.cross_attention_cache: Any = cross
        self.is_updated = dict.fromkeys(range(len(cross.layers)), True)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """[1] tokens fed so far."""
        return self.rows.before.fed

    def attend(
        self,
        module: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        position_bias: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        """One query per row [N, H, 1, D] over its own tokens [N, H, C, D], or over its prompt.

        `position_bias` [1, H, 1, C] is added to the scores of own tokens; it is 0 for prompts.
        """
        state, query = self.rows.before, query * scaling
        if module.is_causal:
            scores = query @ keys.mT + position_bias
            hidden = torch.arange(keys.shape[2], device=keys.device) > state.fed
        else:
            rows = query.unflatten(0, (-1, self.rows.group_size)).squeeze(3)  # [B, G, H, D]
            query, hidden = rows.transpose(1, 2), ~state.prompt_mask[:, None, None]
            scores = query @ keys.mT  # [B, H, G, P]
        weights = widened(scores).masked_fill(hidden, -torch.inf).softmax(-1)
        output = weights.to(values.dtype) @ values
        return output if module.is_causal else output.transpose(1, 2).flatten(0, 1)[:, :, None]


def static_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    static: StaticPrompts | StaticRows | StaticAnswers,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What the library's attention modules call.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [n, heads, q, D].
        keys: what `update` gave.
        values: what `update` gave.
        attention_mask: unused; `static` knows the mask.
        static: what attends.
        kwargs: scaling, window, soft-cap, and what the library passes to other kinds of attention.

    Returns:
        [n, q, heads, D] and no attention weights.
    """
    output = static.attend(module, query, keys, values, **kwargs)
    return output.transpose(1, 2), None


AttentionInterface.register(STATIC, static_attention)


def index_copy(whole: Tensor, dim: int, place: Tensor, part: Tensor) -> Tensor:
    """A tensor with a part copied to where `place`, a tensor, says.

    In place, but for graphs that are compiled: they give a new tensor and leave the old one alone.

    Args:
        whole: [...] n entries along `dim`.
        dim: along which to write.
        place: [k] int64 below n.
        part: like `whole`, with k entries along `dim`; of any type.
    """
    part = part.to(whole.dtype)
    if torch.compiler.is_compiling():
        return whole.index_copy(dim, place, part)
    return whole.index_copy_(dim, place, part)
