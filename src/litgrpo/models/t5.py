"""Encoder-decoder models: T5, Flan-T5, mT5. The prompt is what the encoder reads.

The library's own model code runs unchanged. A decoder attention function registered under the name
`SHARED_ENCODER` lets the completions of a prompt share its cross-attention keys and values, in
decoding and in learning; everything else it hands to the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from litgrpo.models.architectures import ENCODER_DECODER
from litgrpo.models.cross_attention import CrossAttention, GroupedCrossAttention
from litgrpo.models.kernels import linear as linears
from litgrpo.models.policy import DecodeState, Policy, lower_precision
from litgrpo.models.shared_prefix import attention
from litgrpo.models.static_cache import STATIC, StaticAnswers, StaticPrompts, StaticState
from litgrpo.models.static_decoder import StaticDecoder
from litgrpo.tensors import padding_mask
from litgrpo.types import TokenRows

SHARED_ENCODER = "litgrpo_shared_encoder"


class SharedEncoderCache(Cache, DecodeState):
    """Cross-attention keys and values of each prompt once, and the own ones of each live row.

    Args:
        started: caches of one library pass over the decoder's start token, a row for each prompt.
        encoded: [B, P, E] what the encoder made of the prompts.
        prompt_mask: [B, P] True marks a real token.
        group_size: G rows will answer each prompt.
        capacity: most tokens that a row will be fed, C; the start token comes on top.
    """

    def __init__(
        self,
        started: EncoderDecoderCache,
        encoded: Tensor,
        prompt_mask: Tensor,
        group_size: int,
        capacity: int,
    ) -> None:
        """Keep the prompts, and give every row its start token."""
        own: Any = started.self_attention_cache
        # The base class wants layers only to read their flags.
        super().__init__(layers=[DynamicLayer() for _ in own.layers])
        rows = torch.arange(len(prompt_mask), device=prompt_mask.device)
        self.prompt_of = rows.repeat_interleave(group_size)
        self.prompt_mask = prompt_mask
        self.encoded = encoded
        self.cross: Any = started.cross_attention_cache
        first = [(layer.keys, layer.values) for layer in own.layers]  # each [B, H, 1, D]
        self.own = [tuple(_room(each, self.prompt_of, capacity) for each in pair) for pair in first]
        self.fed = 1
        self.grouped = GroupedCrossAttention(prompt_mask, self.prompt_of)
        # The face that the library's decoder knows: own tokens here, prompts in `cross`.
        self.both = EncoderDecoderCache(self, self.cross)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, and the prompts that they answer."""
        prompts, self.prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        if len(prompts) < len(self.prompt_mask):
            self.prompt_mask = self.prompt_mask[prompts]
            for layer in self.cross.layers:
                layer.keys, layer.values = layer.keys[prompts], layer.values[prompts]
        self.own = [tuple(each[rows] for each in pair) for pair in self.own]
        self.grouped = GroupedCrossAttention(self.prompt_mask, self.prompt_of)

    def update(  # type: ignore[override]
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [n, H, 1, D]; return all of the row's own so far."""
        own_keys, own_values = self.own[layer]  # each [n, H, C + 1, D]
        end = self.fed + 1
        own_keys[:, :, self.fed : end] = keys
        own_values[:, :, self.fed : end] = values
        return own_keys[:, :, :end], own_values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed so far; the prompt is not among the decoder's own."""
        return self.fed


def _room(start: Tensor, prompt_of: Tensor, capacity: int) -> Tensor:
    """[n, H, C + 1, D] with the start token [B, H, 1, D] of each row's prompt in front."""
    heads, _, size = start.shape[1:]
    room = start.new_empty(len(prompt_of), heads, capacity + 1, size)
    room[:, :, :1] = start[prompt_of]
    return room


def shared_encoder_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_bias: Tensor,
    dropout: float = 0.0,
    cross: CrossAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a decoder to its own tokens, or to prompts that several rows share.

    Args:
        module: the attention module; its `is_causal` tells which of the two.
        query: [n, H, q, D].
        keys: [n, H, t, D] of the rows' own tokens, or [b, H, P, D] of the prompts.
        values: as the keys.
        attention_mask: for the library; rows are padded on the right, so causality is enough here.
        scaling: multiplies the scores.
        position_bias: [1, H, q, t] is added to the scores of own tokens; 0 for prompts.
        dropout: of the weights.
        cross: attention to the prompts; not given: the library's attention.
        kwargs: what the library passes to other kinds of attention.

    Returns:
        [n, q, H, D], and no attention weights.
    """
    if cross is None:
        kwargs |= {"scaling": scaling, "dropout": dropout, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, keys, values, attention_mask, **kwargs)
    if not module.is_causal:
        return cross.attend(query, keys, values, dropout, scaling).transpose(1, 2), None
    scores = query @ keys.transpose(2, 3) * scaling + position_bias
    length, total = scores.shape[2:]
    if length > 1:
        future = torch.ones(length, total, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(future.triu(total - length + 1), -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = torch.nn.functional.dropout(weights.to(values.dtype), dropout)
    return (weights @ values).transpose(1, 2), None


AttentionInterface.register(SHARED_ENCODER, shared_encoder_attention)
AttentionMaskInterface.register(SHARED_ENCODER, sdpa_mask)


class Seq2SeqStaticDecoder(StaticDecoder):
    """An encoder-decoder model in shapes that never change."""

    policy: Seq2SeqPolicy

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Attend in static shapes; see `StaticDecoder.attending`."""
        with attention(self.policy.decoder, STATIC), torch.no_grad():
            yield

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """Encode the prompts, each once, and feed the start token; see `StaticDecoder.prefill`."""
        mask = prompt_mask.long()
        encoded = self.policy.encoder(input_ids=prompt_ids, attention_mask=mask).last_hidden_state
        prompts = StaticPrompts(prompt_mask)
        for number, block in enumerate(self.policy.decoder.block):
            cross = block.layer[1].EncDecAttention
            keys, values = (
                part(encoded).unflatten(2, (cross.n_heads, -1)).transpose(1, 2)
                for part in (cross.k, cross.v)
            )
            prompts.update(keys, values, number)
        start = prompt_ids.new_full((len(prompt_ids) * group_size,), self.policy.start_id)
        return self.step(start, prompts.state(group_size, capacity))

    def step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """Feed one token to every row; see `StaticDecoder.step`."""
        answers = StaticAnswers(state)
        output = self.policy.decoder(
            input_ids=tokens[:, None],
            encoder_hidden_states=state.prompts[0],  # read already: only its presence counts
            past_key_values=answers,
            use_cache=True,
            static=answers,
        )
        return self.policy.head(output.last_hidden_state[:, -1]), answers.rows.after

    def hidden(self, rows: TokenRows) -> Tensor:
        """Hidden states of every completion token; the encoder reads a prompt for each row."""
        mask = rows.prompt_mask[rows.prompt_of]
        # A mask of four dimensions is taken as it is. Padding attends, too: nothing reads it.
        visible = mask[:, None, None].expand(-1, 1, mask.shape[1], -1)
        output = self.policy.decoder(
            input_ids=self.policy.decoder_input(rows.completion_ids),
            encoder_hidden_states=self.policy.encoder(
                input_ids=rows.prompt_ids[rows.prompt_of], attention_mask=visible
            ).last_hidden_state,
            use_cache=False,
            cross=CrossAttention(mask),
        )
        return output.last_hidden_state


class Seq2SeqPolicy(Policy):
    """An encoder-decoder model; its encoder runs once per prompt, for all completions of it.

    P counts tokens of the encoder, C those of the decoder without its start token.

    Raises:
        ValueError: a kind of model whose attention is not known to be T5's.
    """

    static_decoder = Seq2SeqStaticDecoder

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.bare_model.config
        if config.model_type not in ENCODER_DECODER:
            raise ValueError(
                f"The encoder-decoder model type {config.model_type!r} is not supported: the "
                "completions of a prompt share what its encoder read, which is known for the "
                f"attention of {', '.join(ENCODER_DECODER)} alone (Flan-T5 is t5)."
            )
        # Set once, because gradient checkpointing calls it again in the backward pass.
        self.decoder.config._attn_implementation = SHARED_ENCODER
        self.start_id = int(config.decoder_start_token_id)
        scaled = config.to_dict().get("scale_decoder_outputs", False)
        self.output_scale = config.d_model**-0.5 if scaled else 1.0

    @property
    def shares_prompts(self) -> bool:
        """The encoder reads a prompt once for all of its completions, where shapes may change."""
        return not self.static_shapes

    @contextmanager
    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> Iterator[None]:
        """Pack the weights where that is faster; there is no fused step. See `Policy.decoding`."""
        pack = linears.packed(self.model) if self.kernels.decode == "onednn" else nullcontext()
        with lower_precision(self.model.device, dtype), torch.no_grad(), pack:
            yield

    @property
    def encoder(self) -> Any:
        """The library's encoder."""
        return self.bare_model.get_encoder()

    @property
    def decoder(self) -> Any:
        """The library's decoder."""
        return self.bare_model.get_decoder()

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] of the decoder -> logits [..., V], scaled as T5 scales them."""
        return self.bare_model.get_output_embeddings()(hidden * self.output_scale)

    def encoded(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        """What the encoder makes of prompts [B, P], padded on either side: [B, P, E]."""
        return self.encoder(
            input_ids=prompt_ids, attention_mask=padding_mask(prompt_mask)
        ).last_hidden_state

    def hidden(self, rows: TokenRows) -> Tensor:
        """Hidden states of the decoder that predict the completion tokens; see `Policy.hidden`."""
        used, prompt_of = torch.unique(rows.prompt_of, return_inverse=True)
        prompt_ids, prompt_mask = rows.prompt_ids[used], rows.prompt_mask[used]
        output = self.decoder(
            input_ids=self.decoder_input(rows.completion_ids),
            encoder_hidden_states=self.encoded(prompt_ids, prompt_mask),
            use_cache=False,
            cross=GroupedCrossAttention(prompt_mask, prompt_of),
        )
        return output.last_hidden_state[rows.completion_mask]

    def decoder_input(self, completion_ids: Tensor) -> Tensor:
        """[M, C] the start token and all completion tokens but the last, which predicts nothing."""
        return torch.cat([self._start(completion_ids), completion_ids[:, :-1]], 1)

    def _start(self, completion_ids: Tensor) -> Tensor:
        """[M, 1] the token that the decoder is fed first."""
        return completion_ids.new_full((len(completion_ids), 1), self.start_id)

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Encode the prompts and feed the start token, once for each; see `Policy.prefill`."""
        encoded = self.encoded(prompt_ids, prompt_mask)
        started = EncoderDecoderCache(DynamicCache(), DynamicCache())
        output = self.decoder(
            input_ids=self._start(prompt_ids),
            encoder_hidden_states=encoded,
            encoder_attention_mask=prompt_mask.long(),
            past_key_values=started,
            use_cache=True,
        )
        state = SharedEncoderCache(started, encoded, prompt_mask, group_size, capacity)
        return self.head(output.last_hidden_state[:, -1]), state

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Feed one token to every live row; see `Policy.step`."""
        assert isinstance(state, SharedEncoderCache)
        output = self.decoder(
            input_ids=tokens[:, None],
            encoder_hidden_states=state.encoded,  # read already: only its presence counts
            past_key_values=state.both,
            use_cache=True,
            cross=state.grouped,
        )
        state.fed += 1
        return self.head(output.last_hidden_state[:, -1])

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Logits by the model's own forward pass; see `Policy.dense_logits`."""
        output = self.model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            decoder_input_ids=torch.cat([self._start(completion_ids), completion_ids], 1),
            use_cache=False,
        )
        return output.logits
