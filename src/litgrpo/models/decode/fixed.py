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
        completions: for each layer keys and values of the completion tokens, allocated for all C
            of them: [B, H, G, C, 2 * D]. Keys and values are one tensor, because one write is
            faster than two; and B comes first, because several chips divide the first dimension.
        num_fed: [1] number of tokens fed to every row.
        columns: number of completion tokens that attention reads, the later ones being masked; at
            most C.
    """

    prompt_mask: Tensor
    prompts: tuple[Tensor, ...]
    completions: tuple[Tensor, ...]
    num_fed: Tensor
    columns: int

    @property
    def group_size(self) -> int:
        """Rows of each prompt, G."""
        return self.completions[0].shape[2]

    def show(self, columns: int) -> FixedState:
        """Return the state whose attention reads this many columns of completions."""
        return self._replace(columns=min(columns, self.completions[0].shape[3]))

    def select(self, prompts: Tensor, members: Tensor) -> FixedState:
        """Return a copy with fewer rows, in a smaller grid [b, g].

        Args:
            prompts: [b] prompts to keep.
            members: [b, g] the index of each row to keep within its group.
        """
        completions = []
        for layer in self.completions:
            # Indices on both sides of a slice come first: [b, g, H, columns, 2 * D].
            columns = layer[:, :, :, : self.columns]
            rows = columns[prompts[:, None], :, members].transpose(1, 2)
            selected = rows.new_zeros(*rows.shape[:3], *layer.shape[3:])
            selected[:, :, :, : self.columns] = rows
            completions.append(selected)
        return self._replace(
            prompt_mask=self.prompt_mask[prompts],
            prompts=tuple(tensor[prompts] for tensor in self.prompts),
            completions=tuple(completions),
        )


def make_state(
    prompt_mask: Tensor, prompts: Sequence[Tensor], group_size: int, capacity: int
) -> FixedState:
    """Allocate `capacity` tokens of `group_size` rows for each of the prompts, left-padded."""
    # Zeros, because masked entries must be finite: 0 * NaN is NaN.
    completions = [
        keys.new_zeros(*keys.shape[:2], group_size, capacity, 2 * keys.shape[3])
        for keys in prompts[::2]
    ]
    num_fed = torch.zeros(1, dtype=torch.long, device=prompt_mask.device)
    return FixedState(prompt_mask, tuple(prompts), tuple(completions), num_fed, capacity)


class FixedPrompts:
    """KV cache of the forward pass over the prompts."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask  # [B, P], padded on the left
        self.tensors: list[Tensor] = []  # keys of the first layer, its values and so on

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
        """Compute causal attention [B, heads, P, D] of the prompts."""
        batch, heads, length, head_size = query.shape
        kv_heads = keys.shape[1]
        slot = torch.arange(length, device=query.device)
        distance = slot[:, None] - slot  # [P, P] from each key to each query
        # Padding attends to itself: a softmax over nothing is NaN, which later tokens would read.
        visible = (within(distance, sliding_window) & self.mask[:, None, :]) | (distance == 0)
        if softcap is None:
            return scaled_dot_product_attention(
                *(query, keys, values, visible[:, None]), scale=scaling, enable_gqa=heads > kv_heads
            )
        scale = query_scale(scaling, softcap)
        query = query.reshape(batch, kv_heads, -1, head_size) * scale  # [B, H, r * P, D]
        scores = apply_softcap((query @ keys.mT).view(batch, kv_heads, -1, length, length), softcap)
        weights = widen(scores).masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        output = weights.to(values.dtype).view(batch, kv_heads, -1, length) @ values
        return output.view(batch, heads, length, -1)


class FixedCache:
    """KV cache of one decoding step, in which every row is fed one token.

    In a compiled graph the tensors of `state` are unchanged and `advance` returns new ones;
    otherwise they are written in place, and `state` is invalid afterwards.
    """

    def __init__(self, state: FixedState) -> None:
        self.state = state
        # The compiler of torch 2.9 cannot trace properties and `_replace` of a NamedTuple.
        self.group_size = state.completions[0].shape[2]
        self.completions = list(state.completions)
        self.masks: dict[int | None, Tensor] = {}
        # Compilers refuse to write a result into a part of another tensor.
        compiling = torch.compiler.is_compiling()
        self.functional = compiling or backend(state.num_fed.device).static_shapes

    def advance(self) -> FixedState:
        """Count the fed token and return the state after the step."""
        state, num_fed = self.state, self.state.num_fed
        num_fed = num_fed + 1 if torch.compiler.is_compiling() else num_fed.add_(1)
        completions = tuple(self.completions)
        return FixedState(state.prompt_mask, state.prompts, completions, num_fed, state.columns)

    @property
    def positions(self) -> Tensor:
        """[N, 1] positions of the fed tokens, counted from the beginning of the prompt."""
        by_prompt = self.state.prompt_mask.sum(1)[:, None] + self.state.num_fed
        return by_prompt.expand(-1, self.group_size).reshape(-1, 1)

    def get_seq_length(self, layer: int = 0) -> Any:
        """Return the number of tokens fed so far, [1]."""
        return self.state.num_fed

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [N, H, 1, D].

        `attend` reads the stored ones; T5 reads the shape [N, H, C, D] of what is returned.
        """
        self.write(layer, torch.stack((keys, values), 1).squeeze(3))
        return keys.expand(-1, -1, self.completions[layer].shape[3], -1), values

    def write(self, layer: int, kv: Tensor) -> None:
        """Store one token's keys and values [N, 2, H, D]."""
        kv = kv.unflatten(0, (-1, self.group_size)).permute(0, 3, 1, 2, 4)  # [B, H, G, 2, D]
        completions = self.completions[layer].unflatten(4, (2, -1))
        completions = index_copy(completions, 3, self.state.num_fed, kv.unsqueeze(3))
        if torch.compiler.is_compiling():  # otherwise written in place
            self.completions[layer] = completions.flatten(4)

    def read_completions(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the visible columns, each [B * H * G, columns, D]."""
        completions = self.completions[layer][:, :, :, : self.state.columns].flatten(0, 2)
        keys, values = completions.chunk(2, 2)
        return keys, values

    def attend(
        self, layer: int, query: Tensor, *, softcap: float | None, window: int | None
    ) -> Tensor:
        """Compute attention [N, Q * D] of one query per row to its prompt and completion.

        Keys and values are read once, not once for each query head that shares them. Queries
        [N, Q, D] are scaled, and divided by the soft-cap if there is one. `window` includes the
        token itself.
        """
        prompt_keys, prompt_values = self.state.prompts[2 * layer : 2 * layer + 2]
        batch, kv_heads, slots, head_size = prompt_keys.shape
        width, columns = self.group_size, self.state.columns
        keys, values = self.read_completions(layer)
        query = query.view(batch, width, kv_heads, -1, head_size).transpose(1, 2)
        query = query.to(  # [B, H, G, r, D], copied even if the type is the same
            prompt_keys.dtype, copy=True, memory_format=torch.contiguous_format
        )
        repeats = query.shape[3]
        # The same queries as rows of products with prompts [B * H, G * r, D], and with completions.
        prompt_query = query.view(batch * kv_heads, -1, head_size)
        row_query = query.view(-1, repeats, head_size)
        prompt_keys = prompt_keys.flatten(0, 1).mT
        if self.functional:
            row_scores = row_query.bmm(keys.mT).view(batch * kv_heads, -1, columns)
            scores = torch.cat([prompt_query.bmm(prompt_keys), row_scores], -1)
        else:
            # Both products write into one tensor, which saves a copy of the scores.
            scores = query.new_empty(batch * kv_heads, width * repeats, slots + columns)
            row_scores = scores.view(-1, repeats, slots + columns)
            torch.bmm(prompt_query, prompt_keys, out=scores[..., :slots])
            torch.bmm(row_query, keys.mT, out=row_scores[..., slots:])
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        scores.view(batch, -1, slots + columns).add_(self._mask(window, scores.dtype))
        weights = scores.softmax(-1).to(values.dtype)  # computed in float32
        output = torch.bmm(weights[..., :slots], prompt_values.flatten(0, 1))
        row_weights = weights.view(-1, repeats, slots + columns)
        output.view(-1, repeats, head_size).baddbmm_(row_weights[..., slots:], values)
        output = output.view(batch, kv_heads, width, -1).transpose(1, 2)
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
        """Compute attention [N, heads, 1, D] of one query per row to its prompt and completion."""
        rows, heads, _, head_size = query.shape
        query = query.squeeze(2) * query_scale(scaling, softcap)
        output = self.attend(module.layer_idx, query, softcap=softcap, window=sliding_window)
        return output.view(rows, heads, 1, head_size)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return [B, 1, P + columns], added to the scores; one per window and step."""
        if window not in self.masks:
            prompt_mask, num_fed = self.state.prompt_mask, self.state.num_fed
            slots, columns = prompt_mask.shape[1], self.state.columns
            distance = slots + num_fed - torch.arange(slots + columns, device=num_fed.device)
            masked = pad(~prompt_mask, (0, columns)) | ~within(distance, window)
            mask = torch.zeros_like(masked, dtype=dtype).masked_fill_(masked, -torch.inf)
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
    """KV cache of an encoder-decoder model whose cross-attention is complete."""

    def __init__(self, decoder_cache: Any, cross: Sequence[tuple[Tensor, Tensor]]) -> None:
        # The attributes of `EncoderDecoderCache` that transformers' decoder reads.
        layers = CrossLayers([CrossLayer(keys, values) for keys, values in cross])
        self.self_attention_cache: Any = decoder_cache
        self.cross_attention_cache: Any = layers
        self.is_updated = dict.fromkeys(range(len(layers.layers)), True)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.self_attention_cache.get_seq_length(layer_idx)


class FixedSeq2SeqCache(Seq2SeqCache):
    """KV cache of one decoding step of an encoder-decoder model.

    The state's `prompts` are keys and values of cross-attention, which takes no position; a
    completion begins with the decoder's start token.
    """

    def __init__(self, state: FixedState) -> None:
        self.decoder_cache = FixedCache(state)
        pairs = zip(state.prompts[::2], state.prompts[1::2], strict=True)
        super().__init__(self.decoder_cache, list(pairs))

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
        """Compute attention [N, H, 1, D] of one query per row to its completion or to its prompt.

        `position_bias` [1, H, 1, C] is added to the scores of completions; it is 0 for prompts.
        """
        cache = self.decoder_cache
        query = (query * scaling).unflatten(0, (-1, cache.group_size))
        query = query.squeeze(3).transpose(1, 2)  # [B, H, G, D]
        if module.is_causal:
            keys, values = cache.read_completions(module.layer_idx)
            scores = query.flatten(0, 2)[:, None].bmm(keys.mT)
            scores = scores.view(*query.shape[:3], -1) + position_bias  # [B, H, G, C]
            masked = torch.arange(scores.shape[3], device=scores.device) > cache.state.num_fed
        else:
            scores = query @ keys.mT  # [B, H, G, P]
            masked = ~cache.state.prompt_mask[:, None, None]
        weights = widen(scores).masked_fill(masked, -torch.inf).softmax(-1).to(values.dtype)
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
    """Compute attention [n, q, heads, D] for transformers' modules, without attention weights.

    The cache `static` computes it and knows the mask.
    """
    output = static.attend_module(module, query, keys, values, **kwargs)
    return output.transpose(1, 2), None


def index_copy(tensor: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Copy a source into a tensor at the indices [k] of `dim`.

    In place, except in compiled graphs, which return a new tensor and leave the old one unchanged.
    """
    source = source.to(tensor.dtype)
    if torch.compiler.is_compiling():
        return tensor.index_copy(dim, index, source)
    return tensor.index_copy_(dim, index, source)


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
