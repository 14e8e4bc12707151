"""Decoder-only models: Gemma 2, Qwen 2, Llama, GPT-2 and related types."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from litgrpo.distributed.device import threads
from litgrpo.models.adapters import perturb_adapters
from litgrpo.models.decode.fixed import STATIC, FixedDecoder, FixedState, attend_static
from litgrpo.models.decode.fused import FusedDecoder, is_supported
from litgrpo.models.decode.shared_prefix import (
    SHARED_PREFIX,
    CausalRowOffloader,
    RowOffloader,
    SharedPrefixCache,
    attend_shared_prefix,
)
from litgrpo.models.decode.static import CausalStaticDecoder
from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels.packed_attention import PACKED, attend_packed
from litgrpo.models.packing import MIN_SAVING, Packing, can_share, sharing_pays
from litgrpo.models.policy import DecodeState, Policy, autocast_to
from litgrpo.models.transformers_compat import use_attention
from litgrpo.tensors import apply_softcap, positions, predicting, widen
from litgrpo.types import TokenRows, to_device

log = logging.getLogger(__name__)

# Matrix products with fewer multiplications are slower on several threads than on one.
MIN_THREADED_PRODUCT = 2**20


class CausalPolicy(Policy):
    """A decoder-only model that computes each prompt once per group."""

    static_decoder_class = CausalStaticDecoder
    attention_functions = {  # noqa: RUF012
        SHARED_PREFIX: (attend_shared_prefix, None),
        PACKED: (attend_packed, None),
        STATIC: (attend_static, None),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Set within `decoding` if it supports the model. Always an attribute of the object, because
        # compiled steps look at it.
        self._decoder: FusedDecoder | None = None

    @property
    def computes_prompts_once(self) -> bool:
        return self.share_prompts and not self.static_shapes and self._can_share

    @cached_property
    def _can_share(self) -> bool:
        return can_share(self.bare_model)

    @contextmanager
    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> Iterator[None]:
        """Fuse or pack the weights if that is faster; small products run on one thread."""
        is_small = rows * self._largest_weight < MIN_THREADED_PRODUCT
        thread_limit = threads(1 if is_small else torch.get_num_threads())
        with thread_limit, autocast_to(self.model.device, dtype), torch.no_grad():
            # Adapters, hooks and wrappers may have been added since `can_fuse` compared the logits.
            if fused and self.can_fuse and is_supported(self.bare_model):
                self._decoder = self._build_fused_decoder()
            pack = self.linear_kernels.decode == "onednn" and self._decoder is None
            try:
                with linears.pack_weights(self.model) if pack else nullcontext():
                    yield
            finally:
                self._decoder = None

    @cached_property
    def _largest_weight(self) -> int:
        """Number of elements of the largest linear weight."""
        return max(
            (layer.weight.numel() for layer in linears.list_linear_layers(self.model)), default=0
        )

    @cached_property
    def can_fuse(self) -> bool:
        """True if the fused decoder supports this model and computes the same logits in a test."""
        if not is_supported(self.bare_model):
            return False
        # New adapters add 0, so a decoder that leaves one out would not show.
        adapters = perturb_adapters(self.model) if self.has_adapter else nullcontext()
        no_autocast = torch.autocast(self.model.device.type, enabled=False)
        with no_autocast, torch.no_grad(), adapters:
            ids = torch.arange(1, 11, device=self.model.device).view(2, 5) % self.vocab_size
            mask = torch.ones_like(ids, dtype=torch.bool)
            self._decoder = self._build_fused_decoder()
            try:
                state = self.prefill(ids[:, :3], mask[:, :3], 1, 2)[1]
                logits = [self.decode_step(ids[:, column], state) for column in (3, 4)]
            finally:
                self._decoder = None
            expected = self.dense_logits(ids[:, :3], mask[:, :3], ids[:, 3:])[:, 1:]
        computed = torch.stack(logits, 1).log_softmax(-1)
        error = (computed - widen(expected).log_softmax(-1)).abs().max()
        tolerance = max(1e-3, 32 * torch.finfo(self.model.dtype).eps)
        if not bool(error <= tolerance):  # also if it is NaN
            log.warning(
                "The fused decoder differs from transformers by %.1e nats; decoding without it.",
                error,
            )
            return False
        return True

    def _build_fused_decoder(self) -> FusedDecoder:
        """Copy the current weights for decoding in the current autocast precision."""
        device = self.model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # The kernels may have been chosen on a CPU, before the model moved or in a checkpoint.
        pack = device == "cpu" and self.linear_kernels.decode == "onednn"
        pack = pack and linears.can_pack_dtype(dtype or self.model.dtype)
        scale = None if self.logit_rules == (None, None, None) else self._scale_logits
        return FusedDecoder(self.bare_model, scale, dtype=dtype, pack=pack)

    @cached_property
    def logit_rules(self) -> tuple[float | None, float | None, float | None]:
        """Multiplier (Cohere), divisor (Granite) and soft-cap (Gemma 2) of the logits.

        Read from the config once, because `head` runs for every token.
        """
        config = self.bare_model.config
        return (
            getattr(config, "logit_scale", None),
            getattr(config, "logits_scaling", None),
            getattr(config, "final_logit_softcapping", None),
        )

    def head(self, hidden: Tensor) -> Tensor:
        return self._scale_logits(self.bare_model.get_output_embeddings()(hidden))

    def _scale_logits(self, logits: Tensor) -> Tensor:
        """Apply the model's logit scale and soft-cap to the output of its head."""
        multiplier, divisor, cap = self.logit_rules
        if multiplier is not None:
            logits = logits * multiplier
        if divisor is not None:
            logits = logits / divisor
        return logits if cap is None else apply_softcap(logits / cap, cap)

    def hidden(self, rows: TokenRows) -> Tensor:
        """Compute each prompt once if that saves tokens, else padded rows."""
        if self.computes_prompts_once and sharing_pays(rows):
            return self._compute_packed(Packing.of_groups(rows))
        masks = rows.on_host
        prompt_mask = masks.prompt_mask[masks.prompt_of]
        ids = torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1)
        mask = torch.cat([rows.prompt_mask[rows.prompt_of], rows.completion_mask], 1)
        is_padded = not bool(prompt_mask.all() and masks.completion_mask.all())
        hidden = self._compute_rows(ids, mask, is_padded)
        # The token before each completion token, as in `predicting`, without a wait for a GPU.
        targets = functional.pad(masks.completion_mask, (prompt_mask.shape[1], 0))[:, 1:]
        predictors = functional.pad(targets, (0, 1)).flatten().nonzero().squeeze(1)  # [K]
        return hidden.flatten(0, 1).index_select(0, *to_device([predictors], hidden.device))

    def _compute_rows(self, ids: Tensor, mask: Tensor, is_padded: bool) -> Tensor:
        """Compute the last hidden states [M, T, E] of rows [M, T] padded on either side."""
        output = self.bare_model.base_model(
            input_ids=ids,
            attention_mask=mask.long() if is_padded else None,  # faster without
            position_ids=positions(mask),
            use_cache=False,
        )
        return output.last_hidden_state

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        logits, cache = self.prefill_prompts(prompt_ids, prompt_mask)
        if self._decoder is not None:
            cache = self._decoder.convert_cache(cache, prompt_mask.shape[1] + capacity)
        state = SharedPrefixCache(cache, prompt_mask, group_size, capacity)
        state.can_join = True
        return logits, state

    def prefill_prompts(
        self, prompt_ids: Tensor, prompt_mask: Tensor
    ) -> tuple[Tensor, DynamicCache]:
        """Compute the prompts; return [B, V] logits of the next token and transformers' cache."""
        cache = DynamicCache()  # without a config, so that it keeps keys beyond sliding windows
        output = self.bare_model.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            position_ids=positions(prompt_mask),
            past_key_values=cache,
            use_cache=True,
        )
        return self.head(output.last_hidden_state[:, -1]), cache

    @property
    def fixed_decoder(self) -> FixedDecoder:
        """The fused step within `decoding`, if it supports the model; else transformers' layers."""
        if self._decoder is None:
            return self.static_decoder
        return FusedFixedDecoder(self, self._decoder)

    @property
    def can_record(self) -> bool:
        return self._decoder is not None

    def decode_step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        assert isinstance(state, SharedPrefixCache)
        if self._decoder is not None:
            device = self.model.device.type
            if not torch.is_autocast_enabled(device):
                return self._decoder.decode_step(tokens, state)
            with torch.autocast(device, enabled=False):  # it casts to its own precision
                return self._decoder.decode_step(tokens, state)
        model = self.bare_model
        with use_attention(model, SHARED_PREFIX):
            output = model.base_model(
                input_ids=tokens[:, None],
                position_ids=state.begin_step(),
                past_key_values=state,
                use_cache=True,
                shared_prefix=state,
            )
        state.num_fed += 1
        return self.head(output.last_hidden_state[:, -1])

    def make_row_offloader(self, state: DecodeState) -> RowOffloader:
        assert isinstance(state, SharedPrefixCache)
        key_order = None if self._decoder is None else self._decoder.pairs
        return CausalRowOffloader(self.bare_model.base_model, self.head, state, key_order)

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        ids = torch.cat([prompt_ids, completion_ids], 1)
        mask = torch.cat([prompt_mask, torch.ones_like(completion_ids, dtype=torch.bool)], 1)
        output = self.model(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False
        )
        return output.logits[:, prompt_ids.shape[1] - 1 :]

    def _compute_packed(self, packing: Packing) -> Tensor:
        """Compute the hidden states [K, E] that predict the packed completion tokens."""
        model = self.bare_model
        with use_attention(model, PACKED):
            output = model.base_model(
                input_ids=packing.ids[None],
                position_ids=packing.positions[None],
                use_cache=False,
                packing=packing,
            )
        return output.last_hidden_state[0].index_select(0, packing.predicting)

    def target_hidden_states(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Compute packed rows if that saves tokens."""
        if self.computes_prompts_once and mask.numel() >= MIN_SAVING * int(mask.sum()):
            return self._compute_packed(Packing.of_rows(ids, mask, target_mask))
        return predicting(self._compute_rows(ids, mask, not bool(mask.all())), target_mask)


class FusedFixedDecoder(FixedDecoder):
    """The fused step in fixed shapes."""

    def __init__(self, policy: CausalPolicy, fused: FusedDecoder) -> None:
        self.policy, self.fused = policy, fused

    def attention(self) -> AbstractContextManager[None]:
        return nullcontext()  # the fused step has its own attention

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, FixedState]:
        logits, cache = self.policy.prefill_prompts(prompt_ids, prompt_mask)
        state = self.fused.make_fixed_state(cache, prompt_mask, group_size, capacity)
        return logits.repeat_interleave(group_size, 0), state

    def decode_step(self, tokens: Tensor, state: FixedState) -> tuple[Tensor, FixedState]:
        with torch.autocast(tokens.device.type, enabled=False):  # it casts to its own precision
            return self.fused.decode_grid_step(tokens, state)
