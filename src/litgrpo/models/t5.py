"""Encoder-decoder models: T5, Flan-T5, mT5. The prompt is the encoder's input.

Transformers' model code runs unchanged. A decoder attention function registered as `SHARED_ENCODER`
lets the completions of a prompt share its cross-attention keys and values, in decoding and in
training; all other attention is transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from litgrpo.models.architectures import ENCODER_DECODER
from litgrpo.models.decode.fixed import (
    STATIC,
    FixedSeq2SeqCache,
    FixedState,
    Seq2SeqCache,
    attend_static,
    make_state,
)
from litgrpo.models.decode.shared_prefix import (
    NewTokens,
    OffloadedRow,
    PromptGrid,
    RowOffloader,
    SharedPrefixCache,
    gather_completions,
    split_rows,
)
from litgrpo.models.decode.static import StaticDecoder
from litgrpo.models.kernels import linear as linears
from litgrpo.models.packing import pack_left
from litgrpo.models.policy import DecodeState, Policy, autocast_to
from litgrpo.models.transformers_compat import use_attention
from litgrpo.tensors import padding_mask
from litgrpo.types import TokenRows

SHARED_ENCODER = "litgrpo_shared_encoder"


class CrossAttention:
    """Cross-attention of every row to a copy of its prompt, in static shapes."""

    def __init__(self, prompt_mask: Tensor) -> None:
        self.mask: Tensor | None = prompt_mask[:, None, None]  # [M, 1, 1, P]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, dropout: float, scaling: float
    ) -> Tensor:
        """Compute attention [M, H, q, D] of rows to prompt keys and values [M, H, P, D]."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, self.mask, dropout_p=dropout, scale=scaling
        )


class GroupedCrossAttention(CrossAttention):
    """Cross-attention in which the rows of a prompt, in any order, share one matrix product."""

    def __init__(self, prompt_mask: Tensor, prompt_of: Tensor) -> None:
        grid = PromptGrid(prompt_of, len(prompt_mask))
        self.width, self.cell_of_row = grid.width, grid.cell_of_row
        self.row_of_cell = grid.row_of_cell
        cells = torch.arange(len(self.row_of_cell)).to(self.cell_of_row)
        self.in_place = torch.equal(self.cell_of_row, cells)
        self.mask = None if bool(prompt_mask.all()) else prompt_mask[:, None, None]  # [B, 1, 1, P]

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, dropout: float, scaling: float
    ) -> Tensor:
        """Compute attention of rows [n, H, q, D] to prompt keys and values [B, H, P, D]."""
        heads, length, size = query.shape[1:]
        cells = query if self.in_place else query.index_select(0, self.row_of_cell)
        grid = cells.view(-1, self.width, heads, length, size).transpose(1, 2)
        output = torch.nn.functional.scaled_dot_product_attention(
            grid.reshape(-1, heads, self.width * length, size),
            *(keys, values, self.mask),
            dropout_p=dropout,
            scale=scaling,
        )
        cells = output.view(-1, heads, self.width, length, size).transpose(1, 2)
        cells = cells.reshape(-1, heads, length, size)
        return cells if self.in_place else cells.index_select(0, self.cell_of_row)


class CrossPrefixCache(SharedPrefixCache):
    """A shared-prefix cache whose prompts are read by cross-attention.

    A completion begins with the decoder's start token, which comes on top of `capacity`. `prefill`
    are the caches of one forward pass over the start token, a row for each prompt.
    """

    can_join = True

    def __init__(
        self, prefill: EncoderDecoderCache, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> None:
        super().__init__(prefill.cross_attention_cache, prompt_mask, group_size, capacity + 1)
        decoder_cache: Any = prefill.self_attention_cache
        for number, layer in enumerate(decoder_cache.layers):
            keys, values = layer.keys.squeeze(2), layer.values.squeeze(2)  # [B, H, D]
            self.write(number, keys[self.prompt_of], values[self.prompt_of])
        self.num_fed = 1

    def _arrange(self) -> None:
        super()._arrange()
        self.grouped = GroupedCrossAttention(self.prompt_mask, self.prompt_of)

    def _build_views(self) -> None:
        super()._build_views()
        cross = zip(self.prompt_keys, self.prompt_values, strict=True)
        self.seq2seq_cache = Seq2SeqCache(self, list(cross))

    def update(  # type: ignore[override]
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [n, H, 1, D]; return those from the first start on."""
        super().update(keys, values, layer)
        columns = slice(self.min_start, self.num_fed + 1)
        return self.keys[layer][:, :, columns], self.values[layer][:, :, columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before this one, from the first start on."""
        return self.num_fed - self.min_start

    def columns_before_start(self) -> Tensor | None:
        """Return [n, 1, 1, t] True where a column precedes a row's start; None if none does."""
        if self.min_start == self.max_start:
            return None
        columns = torch.arange(self.min_start, self.num_fed + 1, device=self.start.device)
        return (columns < self.start[:, None])[:, None, None]


class Seq2SeqRowOffloader(RowOffloader):
    """Rows of an encoder-decoder model."""

    def __init__(self, policy: Seq2SeqPolicy, cache: CrossPrefixCache) -> None:
        super().__init__(cache)
        self.policy = policy

    @torch.no_grad()
    def extend(
        self, rows: Sequence[OffloadedRow], prompt_of: Tensor, ids: Sequence[list[int]]
    ) -> tuple[Tensor, list[OffloadedRow]]:
        cache = self.cache
        new_tokens = NewTokens(rows, ids, cache.prompt_mask.device)
        width = new_tokens.past_mask.shape[1]
        past = DynamicCache()
        (kv,) = gather_completions(cache, rows, width)  # all layers have one shape
        for layer in range(len(kv) // 2):
            past.update(kv[2 * layer], kv[2 * layer + 1], layer)
        cross = [
            (keys[prompt_of], values[prompt_of])
            for keys, values in zip(cache.prompt_keys, cache.prompt_values, strict=True)
        ]
        output = self.policy.decoder(
            input_ids=new_tokens.ids,
            attention_mask=torch.cat([new_tokens.past_mask, new_tokens.mask], 1).long(),
            encoder_hidden_states=cross[0][0][:, 0],  # only its shape matters
            encoder_attention_mask=cache.prompt_mask[prompt_of].long(),
            past_key_values=Seq2SeqCache(past, cross),
            use_cache=True,
        )
        logits = self.policy.head(new_tokens.last(output.last_hidden_state))
        return logits, split_rows(cache, past, width, new_tokens.lengths, None)


def attend_shared_encoder(
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
    before_start: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of the decoder to completion tokens, or to prompts that rows share.

    `cross` None selects transformers' attention (encoder, prefill). Otherwise `attention_mask` is
    unused: rows are padded on the right, so a causal mask is enough.
    """
    if cross is None:
        kwargs |= {"scaling": scaling, "dropout": dropout, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, keys, values, attention_mask, **kwargs)
    if not module.is_causal:
        return cross.attend(query, keys, values, dropout, scaling).transpose(1, 2), None
    scores = query @ keys.transpose(2, 3) * scaling + position_bias  # [n, H, q, t]
    length, total = scores.shape[2:]
    if length > 1:
        future = torch.ones(length, total, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(future.triu(total - length + 1), -torch.inf)
    if before_start is not None:
        scores = scores.masked_fill(before_start, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = torch.nn.functional.dropout(weights.to(values.dtype), dropout)
    return (weights @ values).transpose(1, 2), None


class Seq2SeqStaticDecoder(StaticDecoder):
    """An encoder-decoder model in static shapes."""

    policy: Seq2SeqPolicy

    @contextmanager
    def attention(self) -> Iterator[None]:
        with use_attention(self.policy.decoder, STATIC), torch.no_grad():
            yield

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, FixedState]:
        """Encode the prompts and feed the start token."""
        mask = prompt_mask.long()
        encoded = self.policy.encoder(input_ids=prompt_ids, attention_mask=mask).last_hidden_state
        prompts: list[Tensor] = []
        for block in self.policy.decoder.block:
            cross = block.layer[1].EncDecAttention
            for projection in (cross.k, cross.v):
                heads = projection(encoded).unflatten(2, (cross.n_heads, -1))
                prompts.append(heads.transpose(1, 2))  # [B, H, P, D]
        start = prompt_ids.new_full((len(prompt_ids) * group_size,), self.policy.start_id)
        return self.decode_step(start, make_state(prompt_mask, prompts, group_size, capacity))

    def decode_step(self, tokens: Tensor, state: FixedState) -> tuple[Tensor, FixedState]:
        cache = FixedSeq2SeqCache(state)
        output = self.policy.decoder(
            input_ids=tokens[:, None],
            # Its keys are cached; only `is not None` matters.
            encoder_hidden_states=state.prompts[0],
            past_key_values=cache,
            use_cache=True,
            static=cache,
        )
        return self.policy.head(output.last_hidden_state[:, -1]), cache.decoder_cache.advance()

    def hidden(self, rows: TokenRows) -> Tensor:
        """Encode a prompt for each row and decode all of its tokens."""
        mask = rows.prompt_mask[rows.prompt_of]
        # Transformers uses a mask of four dimensions unchanged. Padding attends as well, which is
        # harmless because no token attends to it.
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
    """An encoder-decoder model whose encoder runs once per prompt, for all of its completions.

    P counts tokens of the encoder, C those of the decoder without its start token.
    """

    static_decoder_class = Seq2SeqStaticDecoder
    attention_functions = {  # noqa: RUF012
        SHARED_ENCODER: (attend_shared_encoder, sdpa_mask),
        STATIC: (attend_static, None),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.bare_model.config
        if config.model_type not in ENCODER_DECODER:
            raise ValueError(
                f"The encoder-decoder model type {config.model_type!r} is not supported; expected "
                f"{' or '.join(ENCODER_DECODER)} (Flan-T5 is t5). Other types compute "
                "cross-attention in another way."
            )
        # Set for good, because gradient checkpointing runs the decoder again in the backward pass.
        # The decoder's config is a copy, so the encoder keeps transformers' attention.
        self.decoder.set_attn_implementation(SHARED_ENCODER)
        self.start_id = int(config.decoder_start_token_id)
        scaled = getattr(config, "scale_decoder_outputs", False)
        self.output_scale = config.d_model**-0.5 if scaled else 1.0

    @property
    def computes_prompts_once(self) -> bool:
        """True unless shapes are static: a grid of rows per prompt depends on the rows."""
        return not self.static_shapes

    @contextmanager
    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> Iterator[None]:
        """Pack the weights if that is faster; there is no fused step."""
        pack = (
            linears.pack_weights(self.model)
            if self.linear_kernels.decode == "onednn"
            else nullcontext()
        )
        with autocast_to(self.model.device, dtype), torch.no_grad(), pack:
            yield

    @property
    def encoder(self) -> Any:
        return self.bare_model.get_encoder()

    @property
    def decoder(self) -> Any:
        return self.bare_model.get_decoder()

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of decoder states [..., E], scaled as in T5."""
        return self.bare_model.get_output_embeddings()(hidden * self.output_scale)

    def encode(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        """Run the encoder on prompts [B, P], padded on either side; return [B, P, E]."""
        return self.encoder(
            input_ids=prompt_ids, attention_mask=padding_mask(prompt_mask)
        ).last_hidden_state

    def hidden(self, rows: TokenRows) -> Tensor:
        prompts, prompt_of = torch.unique(rows.prompt_of, return_inverse=True)
        prompt_ids, prompt_mask = rows.prompt_ids[prompts], rows.prompt_mask[prompts]
        output = self.decoder(
            input_ids=self.decoder_input(rows.completion_ids),
            encoder_hidden_states=self.encode(prompt_ids, prompt_mask),
            use_cache=False,
            cross=GroupedCrossAttention(prompt_mask, prompt_of),
        )
        return output.last_hidden_state[rows.completion_mask]

    def target_hidden_states(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Encode the tokens before the targets and decode the targets."""
        prompt_mask = mask & (target_mask.cumsum(1) == 0)
        if bool((mask & ~target_mask & ~prompt_mask).any()):
            raise ValueError(
                "a row has several answers, and an encoder-decoder model writes one: give each "
                "answer a separate row (data.train_on_turns: last learns the last one)"
            )
        prompt_of = torch.arange(len(ids), device=ids.device)
        prompts, answers = pack_left(ids, prompt_mask), pack_left(ids, target_mask)
        return self.hidden(TokenRows(*prompts, prompt_of, *answers))

    def decoder_input(self, completion_ids: Tensor) -> Tensor:
        """Shift completions [M, C] to the right: start token first, last token dropped."""
        return torch.cat([self._start(completion_ids), completion_ids[:, :-1]], 1)

    def _start(self, completion_ids: Tensor) -> Tensor:
        """Return the token that the decoder is fed first, [M, 1]."""
        return completion_ids.new_full((len(completion_ids), 1), self.start_id)

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Encode the prompts and feed the start token."""
        encoded = self.encode(prompt_ids, prompt_mask)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        output = self.decoder(
            input_ids=self._start(prompt_ids),
            encoder_hidden_states=encoded,
            encoder_attention_mask=prompt_mask.long(),
            past_key_values=cache,
            use_cache=True,
        )
        state = CrossPrefixCache(cache, prompt_mask, group_size, capacity)
        return self.head(output.last_hidden_state[:, -1]), state

    def decode_step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        assert isinstance(state, CrossPrefixCache)
        state.begin_step()
        output = self.decoder(
            input_ids=tokens[:, None],
            encoder_hidden_states=state.prompt_keys[0][:, 0],  # only `is not None` matters
            past_key_values=state.seq2seq_cache,
            use_cache=True,
            cross=state.grouped,
            before_start=state.columns_before_start(),
        )
        state.num_fed += 1
        return self.head(output.last_hidden_state[:, -1])

    def make_row_offloader(self, state: DecodeState) -> RowOffloader:
        assert isinstance(state, CrossPrefixCache)
        return Seq2SeqRowOffloader(self, state)

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            decoder_input_ids=torch.cat([self._start(completion_ids), completion_ids], 1),
            use_cache=False,
        )
        return output.logits
