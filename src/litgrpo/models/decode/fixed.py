"""KV cache in tensors whose shapes never change, and the interface of what decodes with it.

For devices that compile a program for each set of shapes (XLA), and for steps that a device records
(CUDA graphs): no shape depends on a value, and no value is read on the host. Positions are tensors,
so that one program serves every step; keys that a row must not attend to are masked. Each prompt is
stored once for its group, as in `shared_prefix`.

The rows of each prompt stand side by side in a grid [B, G], so that the rows of one prompt are one
matrix without an index. Transformers' model code runs unchanged: an attention function registered
as `STATIC` receives one of the classes `FixedPrompts`, `FixedCache` and `FixedSeq2SeqCache`, which
are its KV cache as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import EncoderDecoderCache

from litgrpo.distributed.device import backend
from litgrpo.tensors import apply_softcap, query_scale, widen, within

STATIC = "litgrpo_static"


class FixedState(NamedTuple):
    """KV cache of the rows that a policy is decoding; all rows begin together.

    Args:
        prompt_mask: [B, P] True marks a real token.
        prompts: keys of the first layer, its values, keys of the second and so on, of the prompts:
            each [B, H, P, D].
        own: for each layer keys and values of the rows' own tokens, allocated for all C of them:
            [B, H, G, C, 2 * D]. Keys and values are one tensor, because one write is faster than
            two; and B comes first, because several chips divide the first dimension.
        fed: [1] number of tokens fed to every row.
        columns: number of own tokens that attention reads, the later ones being masked; at most C.
    """

    prompt_mask: Tensor
    prompts: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    fed: Tensor
    columns: int

    @property
    def group_size(self) -> int:
        """Rows of each prompt, G."""
        return self.own[0].shape[2]

    def show(self, columns: int) -> FixedState:
        """Return the state whose attention reads this many own columns."""
        return self._replace(columns=min(columns, self.own[0].shape[3]))

    def select(self, prompts: Tensor, places: Tensor) -> FixedState:
        """Return a copy with fewer rows, in a smaller grid [b, g].

        Args:
            prompts: [b] prompts to keep.
            places: [b, g] the place of each kept row among the rows of its prompt.
        """
        own = []
        for layer in self.own:
            # Indices on both sides of a slice come first: [b, g, H, columns, 2 * D].
            used = layer[:, :, :, : self.columns]
            rows = used[prompts[:, None], :, places].transpose(1, 2)
            own.append(rows.new_zeros(*rows.shape[:3], *layer.shape[3:]))
            own[-1][:, :, :, : self.columns] = rows
        return self._replace(
            prompt_mask=self.prompt_mask[prompts],
            prompts=tuple(tensor[prompts] for tensor in self.prompts),
            own=tuple(own),
        )


def make_state(
    prompt_mask: Tensor, prompts: Sequence[Tensor], group_size: int, capacity: int
) -> FixedState:
    """Allocate `capacity` tokens of `group_size` rows for each of the prompts, left-padded."""
    # Zeros, because masked entries must be finite: 0 * NaN is NaN.
    own = [
        keys.new_zeros(*keys.shape[:2], group_size, capacity, 2 * keys.shape[3])
        for keys in prompts[::2]
    ]
    fed = torch.zeros(1, dtype=torch.long, device=prompt_mask.device)
    return FixedState(prompt_mask, tuple(prompts), tuple(own), fed, capacity)


class FixedPrompts:
    """KV cache of the forward pass over the prompts.

    Args:
        mask: [B, P] True marks a real token; padded on the left.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.tensors: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values [B, H, P, D]; layers come in order."""
        assert len(self.tensors) == 2 * layer
        self.tensors += (keys, values)
        return keys, values

    def attend_module(
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
        """Compute causal attention of the prompts' queries [B, heads, P, D]."""
        batch, heads, length, size = query.shape
        groups = keys.shape[1]
        column = torch.arange(length, device=query.device)
        back = column[:, None] - column
        # Padding attends to itself: a softmax over nothing is NaN, which later tokens would read.
        visible = (within(back, sliding_window) & self.mask[:, None, :]) | (back == 0)
        if softcap is None:
            return scaled_dot_product_attention(
                *(query, keys, values, visible[:, None]), scale=scaling, enable_gqa=heads > groups
            )
        scale = query_scale(scaling, softcap)
        query = query.reshape(batch, groups, -1, size) * scale  # [B, H, r * P, D]
        scores = apply_softcap((query @ keys.mT).view(batch, groups, -1, length, length), softcap)
        weights = widen(scores).masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        output = weights.to(values.dtype).view(batch, groups, -1, length) @ values
        return output.view(batch, heads, length, -1)


class FixedCache:
    """KV cache of one decoding step, in which every row is fed one token.

    In a compiled graph the state's tensors are unchanged and new ones are returned; otherwise they
    are written in place, and the old state is invalid.

    Args:
        state: before the step.
    """

    def __init__(self, state: FixedState) -> None:
        self.before = state
        # The compiler of torch 2.9 cannot trace properties and `_replace` of a NamedTuple.
        self.group_size = state.own[0].shape[2]
        self.own = list(state.own)
        self.masks: dict[int | None, Tensor] = {}
        # Compilers refuse to write a result into a part of another tensor.
        compiling = torch.compiler.is_compiling()
        self.functional = compiling or backend(state.fed.device).static_shapes

    @property
    def after(self) -> FixedState:
        """The state after the step."""
        state, fed = self.before, self.before.fed
        fed = fed + 1 if torch.compiler.is_compiling() else fed.add_(1)
        return FixedState(state.prompt_mask, state.prompts, tuple(self.own), fed, state.columns)

    @property
    def positions(self) -> Tensor:
        """[N, 1] positions of the fed tokens, counted from the beginning of the prompt."""
        of_prompts = self.before.prompt_mask.sum(1)[:, None] + self.before.fed
        return of_prompts.expand(-1, self.group_size).reshape(-1, 1)

    def get_seq_length(self, layer: int = 0) -> Any:
        """Return the number of tokens fed so far, [1]."""
        return self.before.fed

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [N, H, 1, D].

        `attend` reads the stored ones; T5 reads the shape [N, H, C, D] of what is returned.
        """
        self.write(layer, torch.stack((keys, values), 1).squeeze(3))
        return keys.expand(-1, -1, self.own[layer].shape[3], -1), values

    def write(self, layer: int, new: Tensor) -> None:
        """Store one token's keys and values [N, 2, H, D]."""
        new = new.unflatten(0, (-1, self.group_size)).permute(0, 3, 1, 2, 4)  # [B, H, G, 2, D]
        own = self.own[layer].unflatten(4, (2, -1))
        own = index_copy(own, 3, self.before.fed, new.unsqueeze(3))
        if torch.compiler.is_compiling():  # otherwise written in place
            self.own[layer] = own.flatten(4)

    def own_tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the columns that attention reads, each [B * H * G, C, D]."""
        own = self.own[layer][:, :, :, : self.before.columns].flatten(0, 2)
        keys, values = own.chunk(2, 2)
        return keys, values

    def attend(
        self, layer: int, query: Tensor, *, softcap: float | None, window: int | None
    ) -> Tensor:
        """Compute attention of one query per row to its prompt and its own tokens.

        Keys and values are read once, not once for each query head that shares them.

        Args:
            layer: number of the layer.
            query: [n, Q, D] scaled; divided by the soft-cap if there is one.
            softcap: scores become softcap * tanh(query @ key).
            window: positions that a token attends to, itself included; None: all.

        Returns:
            [n, Q * D].
        """
        prompt_keys, prompt_values = self.before.prompts[2 * layer : 2 * layer + 2]
        batch, groups, slots, size = prompt_keys.shape
        width, columns = self.group_size, self.before.columns
        keys, values = self.own_tokens(layer)
        query = query.view(batch, width, groups, -1, size).transpose(1, 2)
        query = query.to(  # [B, H, G, r, D], copied even if the type is the same
            prompt_keys.dtype, copy=True, memory_format=torch.contiguous_format
        )
        repeats = query.shape[3]
        by_prompt, by_row = query.view(batch * groups, -1, size), query.view(-1, repeats, size)
        prompt_keys = prompt_keys.flatten(0, 1).mT
        if self.functional:
            own = by_row.bmm(keys.mT).view(batch * groups, -1, columns)
            scores = torch.cat([by_prompt.bmm(prompt_keys), own], -1)
        else:
            # Both products write into one tensor, which saves a copy of the scores.
            scores = query.new_empty(batch * groups, width * repeats, slots + columns)
            of_rows = scores.view(-1, repeats, slots + columns)
            torch.bmm(by_prompt, prompt_keys, out=scores[..., :slots])
            torch.bmm(by_row, keys.mT, out=of_rows[..., slots:])
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        scores.view(batch, -1, slots + columns).add_(self._mask(window, scores.dtype))
        weights = scores.softmax(-1).to(values.dtype)  # computed in float32
        output = torch.bmm(weights[..., :slots], prompt_values.flatten(0, 1))
        of_rows = weights.view(-1, repeats, slots + columns)
        output.view(-1, repeats, size).baddbmm_(of_rows[..., slots:], values)
        output = output.view(batch, groups, width, -1).transpose(1, 2)
        return output.reshape(batch * width, -1)

    def attend_module(
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
        """Compute attention of one query per row [N, heads, 1, D] to its prompt and own tokens."""
        rows, heads, _, size = query.shape
        scaled = query.squeeze(2) * query_scale(scaling, softcap)
        output = self.attend(module.layer_idx, scaled, softcap=softcap, window=sliding_window)
        return output.view(rows, heads, 1, size)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return [B, 1, P + columns], added to the scores; one per window and step."""
        if window not in self.masks:
            prompt_mask, fed, columns = (
                self.before.prompt_mask,
                self.before.fed,
                self.before.columns,
            )
            slots = prompt_mask.shape[1]
            back = slots + fed - torch.arange(slots + columns, device=fed.device)
            hidden = pad(~prompt_mask, (0, columns)) | ~within(back, window)
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask[:, None]
        return self.masks[window]


class CrossLayer(NamedTuple):
    """Keys and values of the prompts [B, H, P, D], under the names that transformers' T5 reads."""

    keys: Tensor
    values: Tensor


class CrossLayers(NamedTuple):
    """Cross-attention cache of all layers."""

    layers: list[CrossLayer]


class Seq2SeqCache(EncoderDecoderCache):
    """KV cache of an encoder-decoder model whose cross-attention is complete.

    Args:
        own: cache of the decoder's own tokens.
        cross: keys and values of the prompts, for each layer.
    """

    def __init__(self, own: Any, cross: Sequence[tuple[Tensor, Tensor]]) -> None:
        # The attributes of `EncoderDecoderCache` that transformers' decoder reads.
        layers = CrossLayers([CrossLayer(keys, values) for keys, values in cross])
        self.self_attention_cache: Any = own
        self.cross_attention_cache: Any = layers
        self.is_updated = dict.fromkeys(range(len(layers.layers)), True)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens fed so far."""
        return self.self_attention_cache.get_seq_length(layer_idx)


class FixedSeq2SeqCache(Seq2SeqCache):
    """KV cache of one decoding step of an encoder-decoder model.

    The state's `prompts` are keys and values of cross-attention, which takes no position; a row's
    own tokens begin with the decoder's start token.
    """

    def __init__(self, state: FixedState) -> None:
        self.rows = FixedCache(state)
        pairs = zip(state.prompts[::2], state.prompts[1::2], strict=True)
        super().__init__(self.rows, list(pairs))

    def attend_module(
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
        """Compute attention of one query per row [N, H, 1, D] to its own tokens or to its prompt.

        `position_bias` [1, H, 1, C] is added to the scores of own tokens; it is 0 for prompts.
        """
        state = self.rows.before
        query = (query * scaling).unflatten(0, (-1, self.rows.group_size))
        query = query.squeeze(3).transpose(1, 2)  # [B, H, G, D]
        if module.is_causal:
            keys, values = self.rows.own_tokens(module.layer_idx)
            scores = query.flatten(0, 2)[:, None].bmm(keys.mT)
            scores = scores.view(*query.shape[:3], -1) + position_bias  # [B, H, G, C]
            hidden = torch.arange(scores.shape[3], device=scores.device) > state.fed
        else:
            scores = query @ keys.mT  # [B, H, G, P]
            hidden = ~state.prompt_mask[:, None, None]
        weights = widen(scores).masked_fill(hidden, -torch.inf).softmax(-1).to(values.dtype)
        if module.is_causal:
            output = weights.flatten(0, 2)[:, None].bmm(values).view(query.shape)
        else:
            output = weights @ values
        return output.transpose(1, 2).flatten(0, 1)[:, :, None]


def attend_static(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    static: FixedPrompts | FixedCache | FixedSeq2SeqCache,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers' modules call.

    `static` is the cache, which computes the attention of [n, heads, q, D] and knows the mask.
    Returns [n, q, heads, D] and no attention weights.
    """
    output = static.attend_module(module, query, keys, values, **kwargs)
    return output.transpose(1, 2), None


def index_copy(tensor: Tensor, dim: int, index: Tensor, part: Tensor) -> Tensor:
    """Copy a part into a tensor at the indices [k] of `dim`.

    In place, except in compiled graphs, which return a new tensor and leave the old one unchanged.
    """
    part = part.to(tensor.dtype)
    if torch.compiler.is_compiling():
        return tensor.index_copy(dim, index, part)
    return tensor.index_copy_(dim, index, part)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type of matrix products of a tensor, which autocast may change."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class FixedDecoder(ABC):
    """A policy that decodes in fixed shapes."""

    @abstractmethod
    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which `prefill` and `decode_step` must be called.

        Raises:
            ValueError: the model cannot decode in static shapes.
        """

    @abstractmethod
    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, FixedState]:
        """Compute the prompts, each once; arguments as of `Policy.prefill`.

        Returns:
            [N, V] logits of the first completion token of each row, and the state of the rows.
        """

    @abstractmethod
    def decode_step(self, tokens: Tensor, state: FixedState) -> tuple[Tensor, FixedState]:
        """Feed one token to every row; the same program serves every step.

        Args:
            tokens: [N] the tokens just sampled.
            state: the state of these rows, invalid afterwards.

        Returns:
            [N, V] logits of the next token, and the state advanced by one position.
        """
