"""Decoder-only models: Gemma 2, Qwen 2, Llama, GPT-2 and their kin."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor
from transformers import DynamicCache

from litgrpo.distributed.device import threads
from litgrpo.models.causal_static import CausalStaticDecoder
from litgrpo.models.fused_decode import FusedDecoder, is_known
from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels.selective_recompute import Recomputed, recomputed_of, recomputing
from litgrpo.models.offloaded_rows import CachedRowsAway
from litgrpo.models.packed_shared_prefix import PACKED
from litgrpo.models.packing import WORTH, Packing, can_share, sharing_pays
from litgrpo.models.policy import DecodeState, Policy, lower_precision
from litgrpo.models.shared_prefix import (
    SHARED_PREFIX,
    SharedPrefixCache,
    attention,
)
from litgrpo.tensors import padding_mask, positions, predicting, softcapped, widened
from litgrpo.types import TokenRows

log = logging.getLogger(__name__)

# A product of fewer multiplications than this is done before several threads have met.
WORTH_THREADS = 2**20


class CausalPolicy(Policy):
    """A decoder-only model; its prompt is read once per group."""

    static_decoder = CausalStaticDecoder
    _decoder: FusedDecoder | None = None  # while decoding, if the model is known to it

    @property
    def shares_prompts(self) -> bool:
        """Whether `logprobs` reads a prompt once for all of its completions."""
        return self.share_prompts and not self.static_shapes and self._can_share

    @cached_property
    def _can_share(self) -> bool:
        return can_share(self.bare_model)

    @contextmanager
    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> Iterator[None]:
        """Fuse or pack the weights where that is faster; small products run on one thread."""
        few = threads(1 if rows * self._largest < WORTH_THREADS else torch.get_num_threads())
        with few, lower_precision(self.model.device, dtype), torch.no_grad():
            if fused and self.can_fuse:
                self._decoder = self._fused()
            pack = self.kernels.decode == "onednn" and self._decoder is None
            try:
                with linears.packed(self.model) if pack else nullcontext():
                    yield
            finally:
                self._decoder = None

    @cached_property
    def _largest(self) -> int:
        """Numbers in the largest weight of a linear layer."""
        return max((layer.weight.numel() for layer in linears.linears(self.model)), default=0)

    @cached_property
    def can_fuse(self) -> bool:
        """Whether the fused decoder knows this model and says the same on a first try."""
        if not is_known(self.bare_model):
            return False
        with torch.autocast(self.model.device.type, enabled=False), torch.no_grad():
            ids = torch.arange(1, 11, device=self.model.device).view(2, 5) % self.vocab_size
            mask = torch.ones_like(ids, dtype=torch.bool)
            self._decoder = self._fused()
            try:
                state = self.prefill(ids[:, :3], mask[:, :3], 1, 2)[1]
                found = [self.step(ids[:, column], state) for column in (3, 4)]
            finally:
                self._decoder = None
            expected = self.dense_logits(ids[:, :3], mask[:, :3], ids[:, 3:])[:, 1:]
        gap = (torch.stack(found, 1).log_softmax(-1) - widened(expected).log_softmax(-1)).abs()
        tolerance = max(1e-3, 32 * torch.finfo(self.model.dtype).eps)
        if not bool(gap.max() <= tolerance):
            log.warning("The fused decoder is off by %.1e nats and stays unused.", gap.max())
            return False
        return True

    def _fused(self) -> FusedDecoder:
        """The weights as they are now, made ready for decoding in the precision of this moment."""
        device = self.model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        pack = self.kernels.decode == "onednn" and linears.packs(dtype or self.model.dtype)
        return FusedDecoder(self.bare_model, self._finished, dtype=dtype, pack=pack)

    @cached_property
    def _logit_rules(self) -> tuple[float | None, float | None, float | None]:
        """What the config does to logits; read once, because `head` runs for every token."""
        config = self.bare_model.config.to_dict()
        # Cohere multiplies, Granite divides, Gemma 2 caps.
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        multiplier, divisor, cap = (config.get(name) for name in names)
        return multiplier, divisor, cap

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., E] -> logits [..., V], with the model's logit scale and soft-cap."""
        return self._finished(self.bare_model.get_output_embeddings()(hidden))

    def _finished(self, logits: Tensor) -> Tensor:
        """Logits as the head gives them -> with the model's logit scale and soft-cap."""
        multiplier, divisor, cap = self._logit_rules
        if multiplier is not None:
            logits = logits * multiplier
        if divisor is not None:
            logits = logits / divisor
        return logits if cap is None else softcapped(logits / cap, cap)

    def hidden(self, rows: TokenRows) -> Tensor:
        """Hidden states that predict the completion tokens; each prompt is read once if it pays."""
        if self.shares_prompts and sharing_pays(rows):
            return self._packed_hidden(Packing.of_groups(rows))
        prompt_mask = rows.prompt_mask[rows.prompt_of]
        ids = torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1)
        mask = torch.cat([prompt_mask, rows.completion_mask], 1)
        targets = torch.cat([torch.zeros_like(prompt_mask), rows.completion_mask], 1)
        return predicting(self._row_hidden(ids, mask), targets)

    def _row_hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states [M, T, E] of the last layer, of rows [M, T] padded on either side."""
        with self._recomputing():
            output = self.bare_model.base_model(
                input_ids=ids,
                attention_mask=padding_mask(mask),
                position_ids=positions(mask),
                use_cache=False,
            )
        return output.last_hidden_state

    def _recomputing(self) -> AbstractContextManager[None]:
        """What to learn within: less is kept for the backward pass where the model is known.

        Checkpointing keeps less still.
        """
        wanted = self.selective_recompute and not self.bare_model.is_activation_checkpointing
        parts = self._recomputed if wanted and torch.is_grad_enabled() else None
        return nullcontext() if parts is None else recomputing(parts)

    @cached_property
    def _recomputed(self) -> Recomputed | None:
        return recomputed_of(self.bare_model)

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Read the prompts, each once; see `Policy.prefill`."""
        cache = DynamicCache()  # without the config: keep keys and values beyond sliding windows
        output = self.bare_model.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask.long(),
            position_ids=positions(prompt_mask),
            past_key_values=cache,
            use_cache=True,
        )
        if self._decoder is not None:
            cache = self._decoder.receive(cache, prompt_mask.shape[1] + capacity)
        state = SharedPrefixCache(cache, prompt_mask, group_size, capacity)
        state.can_join = True
        return self.head(output.last_hidden_state[:, -1]), state

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Feed one token to every live row; see `Policy.step`."""
        assert isinstance(state, SharedPrefixCache)
        if self._decoder is not None:
            device = self.model.device.type
            if not torch.is_autocast_enabled(device):
                return self._decoder.step(tokens, state)
            with torch.autocast(device, enabled=False):  # it has its own precision
                return self._decoder.step(tokens, state)
        model = self.bare_model
        with attention(model, SHARED_PREFIX):
            output = model.base_model(
                input_ids=tokens[:, None],
                position_ids=state.begin_step(),
                past_key_values=state,
                use_cache=True,
                shared_prefix=state,
            )
        state.fed += 1
        return self.head(output.last_hidden_state[:, -1])

    def away(self, state: DecodeState) -> CachedRowsAway:
        """See `Policy.away`."""
        order = None if self._decoder is None else self._decoder.pairs
        return CachedRowsAway(self.bare_model.base_model, self.head, state, order)

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Logits by the model's own forward pass; see `Policy.dense_logits`."""
        ids = torch.cat([prompt_ids, completion_ids], 1)
        mask = torch.cat([prompt_mask, torch.ones_like(completion_ids, dtype=torch.bool)], 1)
        output = self.model(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False
        )
        return output.logits[:, prompt_ids.shape[1] - 1 :]

    def _packed_hidden(self, packing: Packing) -> Tensor:
        """[K, E] hidden states that predict the completion tokens, each prompt read once."""
        model = self.bare_model
        with attention(model, PACKED), self._recomputing():
            output = model.base_model(
                input_ids=packing.ids[None],
                position_ids=packing.positions[None],
                use_cache=False,
                packing=packing,
            )
        return output.last_hidden_state[0].index_select(0, packing.predicting)

    def predictors(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Hidden states of the tokens before the marked ones; see `Policy.predictors`.

        Padding is not computed where there is much of it.
        """
        if self.shares_prompts and mask.numel() >= WORTH * int(mask.sum()):
            return self._packed_hidden(Packing.of_rows(ids, mask, target_mask))
        return predicting(self._row_hidden(ids, mask), target_mask)
