"""Decoder-only models: Gemma 2, Qwen 2, Llama, GPT-2 and their kin."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from litgrpo.models.attention.decode_shared_prefix import (
    SHARED_PREFIX,
    SharedPrefixCache,
    attention,
)
from litgrpo.models.attention.packed_shared_prefix import (
    KNOWN,
    PROMPT_TREE,
    WORTH,
    PromptTree,
    can_share,
    has_known_layers,
    sharing_pays,
)
from litgrpo.models.attention.static import STATIC, StaticPrompts, StaticRows, StaticState, per_row
from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels.fused_decoder import FusedDecoder, is_known
from litgrpo.models.policy import DecodeState, Policy, lower_precision
from litgrpo.parallel.device import threads
from litgrpo.tensors import (
    head_chunk,
    positions,
    predicting,
    predicting_last,
    token_logprobs,
    widened,
)
from litgrpo.types import TokenLogprobs

log = logging.getLogger(__name__)

# A product of fewer multiplications than this is done before several threads have met.
WORTH_THREADS = 2**20
# Turns of positions that depend on how long the longest row is.
LENGTHENING = {"dynamic", "longrope"}


class CausalPolicy(Policy):
    """A decoder-only model; its prompt is read once per group."""

    _decoder: FusedDecoder | None = None  # while decoding, if the model is known to it

    @property
    def shares_prompts(self) -> bool:
        """Whether `logprobs` reads a prompt once for all of its completions."""
        return self.share_prompts and not self.fixed_shapes and self._can_share

    @cached_property
    def _can_share(self) -> bool:
        return can_share(self.bare_model)

    @contextmanager
    def decoding(
        self, rows: int, *, dtype: torch.dtype | None = None, fused: bool = True
    ) -> Iterator[None]:
        """Fuse or pack the weights where that is faster; small products run on one thread."""
        layers = linears.fast_linears(self.model)
        largest = max((layer.weight.numel() for layer in layers), default=0)
        few = threads(1 if rows * largest < WORTH_THREADS else torch.get_num_threads())
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
    def can_fuse(self) -> bool:
        """Whether the fused decoder knows this model and says the same on a first try."""
        if not is_known(self.bare_model):
            return False
        with torch.autocast(self.model.device.type, enabled=False), torch.no_grad():
            ids = torch.arange(1, 11, device=self.model.device).view(2, 5)
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
        pack = self.kernels.decode == "onednn"
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
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states of the last layer.

        Args:
            ids: [M, T] token ids, padded on either side.
            mask: [M, T] True marks a real token.

        Returns:
            [M, T, E].
        """
        output = self.bare_model.base_model(
            input_ids=ids,
            attention_mask=None if bool(mask.all()) else mask.long(),
            position_ids=positions(mask),
            use_cache=False,
        )
        return output.last_hidden_state

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

    @contextmanager
    def static_decoding(self) -> Iterator[None]:
        """Attend in fixed shapes; see `Policy.static_decoding`."""
        model = self.bare_model
        config = model.config.to_dict()
        if not has_known_layers(model):
            raise ValueError(
                f"model type {config['model_type']!r} with layers of type "
                f"{sorted(set(config.get('layer_types') or ['unknown']))} cannot decode in fixed "
                f"shapes; known are {', '.join(sorted(KNOWN))}, with full or sliding attention. "
                "Use litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        kinds = rope_types(config.get("rope_parameters"))
        if kinds & LENGTHENING:
            raise ValueError(
                f"rope_parameters of type {sorted(kinds & LENGTHENING)} depend on the length of "
                "the longest row, so that this model cannot decode in fixed shapes. Use "
                "litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        _ = self._logit_rules  # read now: a compiler cannot
        with attention(model, STATIC), torch.no_grad():
            yield

    def static_prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """Read the prompts, each once; see `Policy.static_prefill`."""
        prompts = StaticPrompts(prompt_mask)
        output = self.bare_model.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,  # `static` has it, but without one GPT-2 looks for padding
            position_ids=positions(prompt_mask),
            past_key_values=prompts,
            use_cache=True,
            static=prompts,
        )
        logits = self.head(output.last_hidden_state[:, -1])
        return per_row(logits, group_size), prompts.state(group_size, capacity)

    def static_step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """Feed one token to every row; see `Policy.static_step`."""
        rows = StaticRows(state)
        output = self.bare_model.base_model(
            input_ids=tokens[:, None],
            attention_mask=torch.ones_like(tokens[:, None]),
            position_ids=rows.positions,
            past_key_values=rows,
            use_cache=True,
            static=rows,
        )
        return self.head(output.last_hidden_state[:, -1]), rows.after

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Logits by the model's own forward pass; see `Policy.dense_logits`."""
        ids = torch.cat([prompt_ids, completion_ids], 1)
        mask = torch.cat([prompt_mask, torch.ones_like(completion_ids, dtype=torch.bool)], 1)
        output = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions(mask),
            use_cache=False,
        )
        return output.logits[:, prompt_ids.shape[1] - 1 :]

    def logprobs(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt_of: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        support: Tensor | None = None,
        temperature: float = 1.0,
        entropy_grad: bool = False,
    ) -> TokenLogprobs:
        """Log-probabilities of completions, with gradient; see `Policy.logprobs`."""
        rows = prompt_ids, prompt_mask, prompt_of, completion_ids, completion_mask
        if self.fixed_shapes:
            return self.logprobs_of_places(
                self.hidden_of_places(*rows),
                completion_ids,
                completion_mask,
                support=support,
                temperature=temperature,
                entropy_grad=entropy_grad,
            )
        if self.shares_prompts and sharing_pays(*rows):
            hidden = self._hidden_of_tree(PromptTree.grow(*rows))
        else:
            prompts = prompt_mask[prompt_of]
            mask = torch.cat([prompts, completion_mask], 1)
            ids = torch.cat([prompt_ids[prompt_of], completion_ids], 1)
            targets = torch.cat([torch.zeros_like(prompts), completion_mask], 1)
            hidden = predicting(self.hidden(ids, mask), targets)
        logprobs, entropy = token_logprobs(
            hidden,
            completion_ids[completion_mask],
            self.head,
            support=None if support is None else support[completion_mask],
            temperature=temperature,
            chunk_size=self.head_chunk or head_chunk(len(hidden), self.vocab_size),
            entropy_grad=entropy_grad,
        )
        padded = logprobs.new_zeros(completion_ids.shape)
        return TokenLogprobs(
            padded.masked_scatter(completion_mask, logprobs),
            padded.masked_scatter(completion_mask, entropy),
        )

    def hidden_of_places(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        prompt_of: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
    ) -> Tensor:
        """Hidden states of every completion place; see `Policy.hidden_of_places`."""
        mask = torch.cat([prompt_mask[prompt_of], completion_mask], 1)
        model = self.bare_model
        with attention(model, STATIC):
            output = model.base_model(
                input_ids=torch.cat([prompt_ids[prompt_of], completion_ids], 1),
                attention_mask=mask,  # `static` has it, but without one GPT-2 looks for padding
                position_ids=positions(mask),
                use_cache=False,
                static=StaticPrompts(mask),
            )
        return predicting_last(output.last_hidden_state, completion_ids.shape[1])

    def _hidden_of_tree(self, tree: PromptTree) -> Tensor:
        """[K, E] hidden states that predict the completion tokens, each prompt read once."""
        model = self.bare_model
        with attention(model, PROMPT_TREE):
            output = model.base_model(
                input_ids=tree.ids[None],
                position_ids=tree.positions[None],
                use_cache=False,
                prompt_tree=tree,
            )
        return output.last_hidden_state[0].index_select(0, tree.predicting)

    def predictors(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Hidden states of the tokens before the marked ones; see `Policy.predictors`.

        Padding is not computed where there is much of it.
        """
        if self.shares_prompts and mask.numel() >= WORTH * int(mask.sum()):
            return self._hidden_of_tree(PromptTree.of_rows(ids, mask, target_mask))
        return predicting(self.hidden(ids, mask), target_mask)


def rope_types(parameters: dict[str, Any] | None) -> set[str]:
    """How positions are turned, in all kinds of layers; a config has one set or one for each."""
    if not parameters:
        return set()
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return {each["rope_type"] for each in sets if each}
