"""Decoder-only models: Gemma 2, Qwen 2, Llama, GPT-2 and their kin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from litgrpo.device import threads
from litgrpo.policies import linears
from litgrpo.policies.attention import SHARED_PREFIX, SharedPrefixCache, attention
from litgrpo.policies.policy import DecodeState, Policy
from litgrpo.tensors import positions, predicting, token_logprobs
from litgrpo.types import TokenLogprobs

# A product of fewer multiplications than this is done before several threads have met.
WORTH_THREADS = 2**23


class CausalPolicy(Policy):
    """A decoder-only model; its prompt is read once per group."""

    head_chunk = 1024
    kernels = linears.Kernels()

    def use_kernels(self, kernels: linears.Kernels) -> None:
        """Compute the linear layers with these kernels from now on."""
        self.kernels = kernels
        linears.use(self.model, kernels)

    @contextmanager
    def decoding(self, rows: int) -> Iterator[None]:
        """Pack the weights if that is faster; small products run on one thread."""
        layers = linears.fast_linears(self.model)
        largest = max((layer.weight.numel() for layer in layers), default=0)
        pack = self.kernels.decode == "onednn"
        with (
            threads(1 if rows * largest < WORTH_THREADS else torch.get_num_threads()),
            linears.packed(self.model) if pack else nullcontext(),
        ):
            yield

    @property
    def bare_model(self) -> PreTrainedModel:
        """The library's model, with adapter layers in place but without the adapter wrapper."""
        return self.model.get_base_model() if self.has_adapter else self.model  # type: ignore[operator]

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA layers are trained instead of the weights."""
        return not isinstance(self.model, PreTrainedModel)

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
        logits = self.bare_model.get_output_embeddings()(hidden)
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
        state = SharedPrefixCache(cache, prompt_mask, group_size, capacity)
        return self.head(output.last_hidden_state[:, -1]), state

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Feed one token to every live row; see `Policy.step`."""
        assert isinstance(state, SharedPrefixCache)
        model = self.bare_model
        with attention(model, SHARED_PREFIX):
            output = model.base_model(
                input_ids=tokens[:, None],
                position_ids=state.position_ids(),
                past_key_values=state,
                use_cache=True,
                shared_prefix=state,
            )
        state.fed += 1
        return self.head(output.last_hidden_state[:, -1])

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
        prompts = prompt_mask[prompt_of]
        mask = torch.cat([prompts, completion_mask], 1)
        ids = torch.cat([prompt_ids[prompt_of], completion_ids], 1)
        targets = torch.cat([torch.zeros_like(prompts), completion_mask], 1)
        logprobs, entropy = token_logprobs(
            predicting(self.hidden(ids, mask), targets),
            completion_ids[completion_mask],
            self.head,
            support=None if support is None else support[completion_mask],
            temperature=temperature,
            chunk_size=self.head_chunk,
            entropy_grad=entropy_grad,
        )
        padded = logprobs.new_zeros(completion_ids.shape)
        return TokenLogprobs(
            padded.masked_scatter(completion_mask, logprobs),
            padded.masked_scatter(completion_mask, entropy),
        )
