"""Decoding and scoring in tensors whose shapes never change.

For devices that compile a program for each set of shapes (XLA): one graph computes prompts,
another feeds one token to all rows. Transformers' model code runs unchanged: an attention function
registered as `STATIC` receives one of the classes `StaticPrompts`, `StaticRows` and
`StaticSeq2SeqRows`, which are its KV cache as well. Positions are tensors, so that one graph serves
every step; keys that a row must not attend to are masked. Each prompt is computed once and its keys
and values are shared by its group, as in `shared_prefix`.

Everything is a pure function of tensors, which a compiler can trace. Only the cache classes know
the layout of `StaticState`; a `StaticDecoder` builds one, runs the model, and returns the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import EncoderDecoderCache

from litgrpo.distributed.device import backend
from litgrpo.models.architectures import (
    DECODER_ONLY,
    LENGTH_DEPENDENT_ROPES,
    has_known_layers,
    list_rope_types,
)
from litgrpo.models.transformers_compat import use_attention
from litgrpo.tensors import (
    ComparedModel,
    Head,
    apply_softcap,
    positions,
    query_scale,
    token_logprobs,
    widen,
    within,
)
from litgrpo.types import TokenLogprobs, TokenRows

STATIC = "litgrpo_static"


class StaticState(NamedTuple):
    """KV cache of the rows that a policy is decoding.

    Args:
        prompt_mask: [B, P] True marks a real token.
        prompts: keys of the first layer, its values, keys of the second and so on, of the prompts:
            each [B, H, P, D].
        own: the same of the rows' own tokens, allocated for all C of them: each [N, H, C, D].
        fed: [1] number of tokens fed to every row.

    Example:
        2 layers, 3 prompts of 5 tokens, groups of 4, 8 tokens per completion: `prompts` are 4
        tensors [3, H, 5, D] and `own` are 4 tensors [12, H, 8, D].
    """

    prompt_mask: Tensor
    prompts: tuple[Tensor, ...]
    own: tuple[Tensor, ...]
    fed: Tensor


def repeat_for_group(of_prompts: Tensor, group_size: int) -> Tensor:
    """Repeat each prompt's entry for the rows of its group: [B, ...] -> [N, ...].

    Example:
        >>> repeat_for_group(torch.tensor([1, 2]), 2)
        tensor([1, 1, 2, 2])
    """
    shape = (-1, group_size, *(-1 for _ in of_prompts.shape[1:]))
    return of_prompts[:, None].expand(*shape).flatten(0, 1)


class StaticPrompts:
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

    def make_state(self, group_size: int, capacity: int) -> StaticState:
        """Allocate `capacity` tokens of `group_size` rows for each prompt."""
        rows = len(self.mask) * group_size
        own = [
            each.new_zeros(rows, each.shape[1], capacity, each.shape[3]) for each in self.tensors
        ]
        fed = torch.zeros(1, dtype=torch.long, device=self.mask.device)
        prompts = tuple(self.tensors)
        return StaticState(self.mask, prompts, tuple(own), fed)


class StaticRows:
    """KV cache of one decoding step, in which every row is fed one token.

    In a compiled graph the state's tensors are unchanged and new ones are returned; otherwise they
    are written in place, and the old state is invalid.

    Args:
        state: before the step.
    """

    def __init__(self, state: StaticState) -> None:
        self.before = state
        self.group_size = state.own[0].shape[0] // state.prompt_mask.shape[0]
        self.own = list(state.own)
        self.masks: dict[int | None, Tensor] = {}

    @property
    def after(self) -> StaticState:
        """The state after the step."""
        state = self.before  # not `_replace`, which torch.compile cannot trace
        own = tuple(self.own)
        return StaticState(state.prompt_mask, state.prompts, own, state.fed + 1)

    @property
    def positions(self) -> Tensor:
        """[N, 1] positions of the fed tokens, counted from the beginning of the prompt."""
        lengths = self.before.prompt_mask.sum(1, keepdim=True)
        return repeat_for_group(lengths, self.group_size) + self.before.fed

    def get_seq_length(self, layer: int = 0) -> Any:
        """Return the number of tokens fed so far, [1]."""
        return self.before.fed

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [N, H, 1, D]; return all of them [N, H, C, D]."""
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
        """Compute attention of one query per row [N, heads, 1, D] to its prompt and own tokens."""
        rows, heads, _, size = query.shape
        groups, columns = keys.shape[1:3]
        query = query.reshape(rows * groups, -1, size)
        query = query * query_scale(scaling, softcap)  # [N * H, r, D]
        layer = 2 * module.layer_idx
        prompt_keys, prompt_values = self.before.prompts[layer : layer + 2]
        on_prompt = self._to_cells(query, groups) @ prompt_keys.mT
        own = query @ keys.flatten(0, 1).mT
        scores = torch.cat([self._to_rows(on_prompt, groups), own], -1)
        scores = apply_softcap(scores, softcap)
        scores = scores.view(rows, -1, scores.shape[-1])  # [N, heads, P + C]
        scores = widen(scores).masked_fill(self._hidden(sliding_window, columns), -torch.inf)
        weights = scores.softmax(-1).to(values.dtype).view(rows * groups, -1, scores.shape[-1])
        of_prompt, of_own = weights.split((weights.shape[-1] - columns, columns), -1)
        from_prompt = self._to_cells(of_prompt, groups) @ prompt_values
        output = self._to_rows(from_prompt, groups) + of_own @ values.flatten(0, 1)
        return output.view(rows, heads, 1, -1)

    def _hidden(self, window: int | None, columns: int) -> Tensor:
        """Return the mask [N, 1, P + C] of keys that a row does not attend to; one per window."""
        if window not in self.masks:
            prompt_mask, fed = self.before.prompt_mask, self.before.fed
            slots = prompt_mask.shape[1]
            back = slots + fed - torch.arange(slots + columns, device=fed.device)
            padding = torch.nn.functional.pad(~prompt_mask, (0, columns))
            hidden = repeat_for_group(padding, self.group_size) | ~within(back, window)
            self.masks[window] = hidden[:, None]
        return self.masks[window]

    def _to_cells(self, rows: Tensor, groups: int) -> Tensor:
        """Reshape [N * H, r, X] to [B, H, G * r, X]: rows of one prompt become one matrix."""
        cells = rows.view(-1, self.group_size, groups, *rows.shape[1:]).transpose(1, 2)
        return cells.flatten(2, 3)

    def _to_rows(self, cells: Tensor, groups: int) -> Tensor:
        """Invert `_to_cells`, for any last dimension."""
        rows = cells.unflatten(2, (self.group_size, -1)).transpose(1, 2)
        return rows.reshape(-1, *rows.shape[3:])


class StaticCrossLayer(NamedTuple):
    """Keys and values of the prompts [B, H, P, D], under the names that transformers' T5 reads."""

    keys: Tensor
    values: Tensor


class StaticCrossCache(NamedTuple):
    """Cross-attention cache of all layers."""

    layers: list[StaticCrossLayer]


class StaticSeq2SeqRows(EncoderDecoderCache):
    """KV cache of one decoding step of an encoder-decoder model.

    The state's `prompts` are keys and values of cross-attention, which takes no position; a row's
    own tokens begin with the decoder's start token.
    """

    def __init__(self, state: StaticState) -> None:
        # The attributes of `EncoderDecoderCache` that transformers' decoder reads.
        self.rows = StaticRows(state)
        pairs = zip(state.prompts[::2], state.prompts[1::2], strict=True)
        cross = StaticCrossCache([StaticCrossLayer(keys, values) for keys, values in pairs])
        self.self_attention_cache: Any = self.rows
        self.cross_attention_cache: Any = cross
        self.is_updated = dict.fromkeys(range(len(cross.layers)), True)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens fed so far, [1]."""
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
        """Compute attention of one query per row [N, H, 1, D] to its own tokens or to its prompt.

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
        weights = widen(scores).masked_fill(hidden, -torch.inf).softmax(-1)
        output = weights.to(values.dtype) @ values
        return output if module.is_causal else output.transpose(1, 2).flatten(0, 1)[:, :, None]


def attend_static(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    static: StaticPrompts | StaticRows | StaticSeq2SeqRows,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers' modules call.

    Args:
        module: the attention module; its `layer_idx` names the layer.
        query: [n, heads, q, D].
        keys: returned by the cache's `update`.
        values: returned by the cache's `update`.
        attention_mask: unused; `static` knows the mask.
        static: the cache, which computes the attention.
        kwargs: scaling, window, soft-cap, and arguments of other attention functions.

    Returns:
        [n, q, heads, D] and no attention weights.
    """
    output = static.attend(module, query, keys, values, **kwargs)
    return output.transpose(1, 2), None


def index_copy(whole: Tensor, dim: int, place: Tensor, part: Tensor) -> Tensor:
    """Copy a part into a tensor at the indices `place`.

    In place, except in compiled graphs, which return a new tensor and leave the old one unchanged.

    Args:
        whole: [...] n entries along `dim`.
        dim: along which to write.
        place: [k] int64 indices below n.
        part: like `whole`, with k entries along `dim`; of any type.
    """
    part = part.to(whole.dtype)
    if torch.compiler.is_compiling():
        return whole.index_copy(dim, place, part)
    return whole.index_copy_(dim, place, part)


class RecomputedHead:
    """Output head whose chunks are recomputed in the backward pass even under a compiler.

    XLA merges equal computations (common subexpression elimination): it would keep the logits of
    the forward pass, and with them the memory that recomputation saves. The recomputation therefore
    reads its input through an optimization barrier.

    Args:
        head: hidden states -> logits.
    """

    def __init__(self, head: Head) -> None:
        self._head, self._recomputes = head, False

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits; equal in the forward pass and in the recomputation."""
        if self._recomputes:
            hidden = backend(hidden.device).optimization_barrier(hidden)
        return self._head(hidden)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of forward pass and recomputation (torch's `context_fn`)."""
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        self._recomputes = True
        try:
            yield
        finally:
            self._recomputes = False


class StaticDecoder(ABC):
    """A policy in static shapes: no shape depends on a value, and no value is read on the host.

    Args:
        policy: provides the model and the head.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @abstractmethod
    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which `prefill` and `step` must be called.

        Raises:
            ValueError: the model cannot decode in static shapes.
        """

    @abstractmethod
    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """Compute the prompts, each once.

        Args:
            prompt_ids: [B, P] token ids, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            group_size: G.
            capacity: maximum number of tokens that a completion is fed, C.

        Returns:
            [N, V] logits of the first completion token of each row, and the state of the rows.
        """

    @abstractmethod
    def decode_step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """Feed one token to every row; the same graph serves every step.

        Args:
            tokens: [N] the tokens just sampled.
            state: the state of these rows, invalid afterwards.

        Returns:
            [N, V] logits of the next token, and the state advanced by one position.
        """

    @abstractmethod
    def hidden(self, rows: TokenRows) -> Tensor:
        """Compute hidden states [M, C, E] that predict every completion token, padding included."""

    def logprobs(
        self,
        rows: TokenRows,
        *,
        compared: ComparedModel | None = None,
        score_norms: bool = False,
        **settings: Any,
    ) -> TokenLogprobs:
        """Compute `Policy.logprobs` for all positions and mask padding afterwards."""
        mask, candidates = rows.completion_mask, rows.candidate_ids
        recomputed = RecomputedHead(self.policy.head)
        hidden = self.hidden(rows)
        if compared is not None:
            compared = replace(compared, hidden=compared.hidden.flatten(0, 1))
        found = token_logprobs(
            hidden.flatten(0, 1),
            rows.completion_ids.flatten(),
            recomputed.head,
            candidate_ids=None if candidates is None else candidates.flatten(0, 1),
            chunk_size=self.policy.chunk_size(mask.numel(), 1 if compared is None else 2),
            context_fn=recomputed.contexts,
            compared=compared,
            score_norms=score_norms,
            **settings,
        )
        grids = [torch.where(mask, each.view_as(mask), 0.0) for each in found]
        return TokenLogprobs.from_columns(
            grids,
            compared=compared is not None,
            score_norms=score_norms,
        )


class CausalStaticDecoder(StaticDecoder):
    """A decoder-only model in static shapes."""

    @contextmanager
    def attention(self) -> Iterator[None]:
        """See `StaticDecoder.attention`."""
        model = self.policy.bare_model
        config = model.config.to_dict()
        if not has_known_layers(model):
            raise ValueError(
                f"model type {config['model_type']!r} with layers of type "
                f"{sorted(set(config.get('layer_types') or ['unknown']))} cannot decode in static "
                f"shapes; known are {', '.join(DECODER_ONLY)}, with full or sliding attention. "
                "Use litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        kinds = list_rope_types(config.get("rope_parameters")) & LENGTH_DEPENDENT_ROPES
        if kinds:
            raise ValueError(
                f"rope_parameters of type {sorted(kinds)} depend on the length of "
                "the longest row, so that this model cannot decode in static shapes. Use "
                "litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        _ = self.policy.logit_rules  # cached now, because torch.compile cannot trace the config
        with use_attention(model, STATIC), torch.no_grad():
            yield

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """See `StaticDecoder.prefill`."""
        prompts = StaticPrompts(prompt_mask)
        output = self.policy.bare_model.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,  # unused; without one GPT-2 reads values of `input_ids`
            position_ids=positions(prompt_mask),
            past_key_values=prompts,
            use_cache=True,
            static=prompts,
        )
        logits = self.policy.head(output.last_hidden_state[:, -1])
        return repeat_for_group(logits, group_size), prompts.make_state(group_size, capacity)

    def decode_step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """See `StaticDecoder.decode_step`."""
        rows = StaticRows(state)
        output = self.policy.bare_model.base_model(
            input_ids=tokens[:, None],
            attention_mask=torch.ones_like(tokens[:, None]),
            position_ids=rows.positions,
            past_key_values=rows,
            use_cache=True,
            static=rows,
        )
        return self.policy.head(output.last_hidden_state[:, -1]), rows.after

    def hidden(self, rows: TokenRows) -> Tensor:
        """See `StaticDecoder.hidden`."""
        mask = torch.cat([rows.prompt_mask[rows.prompt_of], rows.completion_mask], 1)
        model = self.policy.bare_model
        with use_attention(model, STATIC):
            output = model.base_model(
                input_ids=torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1),
                attention_mask=mask,  # unused; without one GPT-2 reads values of `input_ids`
                position_ids=positions(mask),
                use_cache=False,
                static=StaticPrompts(mask),
            )
        # The hidden state of position t predicts token t + 1.
        return output.last_hidden_state[:, -rows.completion_ids.shape[1] - 1 : -1]
