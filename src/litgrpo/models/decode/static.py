"""Decoding and scoring of a policy in tensors whose shapes never change.

For devices that compile a program for each set of shapes (XLA): one graph computes prompts,
another feeds one token to all rows. Everything is a pure function of tensors, which a compiler can
trace. Transformers' model code runs unchanged, with the caches of `fixed`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from litgrpo.distributed.device import backend
from litgrpo.models.architectures import (
    DECODER_ONLY,
    LENGTH_DEPENDENT_ROPES,
    has_known_layers,
    list_rope_types,
)
from litgrpo.models.decode.fixed import (
    STATIC,
    FixedCache,
    FixedDecoder,
    FixedPrompts,
    FixedState,
    make_state,
)
from litgrpo.models.kernels.packed_attention import matmul_dtype
from litgrpo.models.transformers_compat import use_attention
from litgrpo.tensors import (
    ComparedModel,
    Head,
    positions,
    token_logprobs,
)
from litgrpo.types import TokenLogprobs, TokenRows


class RecomputedHead:
    """Output head whose chunks are recomputed in the backward pass even under a compiler.

    XLA merges equal computations (common subexpression elimination): it would keep the logits of
    the forward pass, and with them the memory that recomputation saves. The recomputation therefore
    reads its input through an optimization barrier.
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


class StaticDecoder(FixedDecoder):
    """A policy in static shapes: no shape depends on a value, and no value is read on the host."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @abstractmethod
    def hidden(self, rows: TokenRows) -> Tensor:
        """Compute hidden states [M, C, E] that predict every completion token, also padding."""

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
        head = RecomputedHead(self.policy.head)
        hidden = self.hidden(rows)
        if compared is not None:
            compared = replace(compared, hidden=compared.hidden.flatten(0, 1))
        columns = token_logprobs(
            hidden.flatten(0, 1),
            rows.completion_ids.flatten(),
            head.head,
            candidate_ids=None if candidates is None else candidates.flatten(0, 1),
            chunk_size=self.policy.chunk_size(mask.numel(), 1 if compared is None else 2),
            context_fn=head.contexts,
            compared=compared,
            score_norms=score_norms,
            **settings,
        )
        grids = [torch.where(mask, column.view_as(mask), 0.0) for column in columns]  # [M, C]
        return TokenLogprobs.from_columns(
            grids, compared=compared is not None, score_norms=score_norms
        )


class CausalStaticDecoder(StaticDecoder):
    """A decoder-only model in static shapes."""

    @contextmanager
    def attention(self) -> Iterator[None]:
        model = self.policy.bare_model
        config = model.config.to_dict()
        if not has_known_layers(model):
            raise ValueError(
                f"model type {config['model_type']!r} with layers of type "
                f"{sorted(set(config.get('layer_types') or ['unknown']))} cannot decode in static "
                f"shapes; known are {', '.join(DECODER_ONLY)}, with full or sliding attention. "
                "Use litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        rope_types = list_rope_types(config.get("rope_parameters")) & LENGTH_DEPENDENT_ROPES
        if rope_types:
            raise ValueError(
                f"rope_parameters of type {sorted(rope_types)} depend on the length of "
                "the longest row, so that this model cannot decode in static shapes. Use "
                "litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        _ = self.policy.logit_rules  # cached now, because torch.compile cannot trace the config
        with use_attention(model, STATIC), torch.no_grad():
            yield

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, FixedState]:
        prompts = FixedPrompts(prompt_mask)
        output = self.policy.bare_model.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,  # unused; without one GPT-2 reads values of `input_ids`
            position_ids=positions(prompt_mask),
            past_key_values=prompts,
            use_cache=True,
            static=prompts,
        )
        logits = self.policy.head(output.last_hidden_state[:, -1])
        logits = logits[:, None].expand(-1, group_size, -1).flatten(0, 1)
        # Rotary positions may be float32 under autocast; both products need equal types.
        dtype = matmul_dtype(prompts.tensors[0])
        tensors = [tensor.to(dtype) for tensor in prompts.tensors]
        return logits, make_state(prompt_mask, tensors, group_size, capacity)

    def decode_step(self, tokens: Tensor, state: FixedState) -> tuple[Tensor, FixedState]:
        cache = FixedCache(state)
        output = self.policy.bare_model.base_model(
            input_ids=tokens[:, None],
            attention_mask=torch.ones_like(tokens[:, None]),
            position_ids=cache.positions,
            past_key_values=cache,
            use_cache=True,
            static=cache,
        )
        return self.policy.head(output.last_hidden_state[:, -1]), cache.advance()

    def hidden(self, rows: TokenRows) -> Tensor:
        mask = torch.cat([rows.prompt_mask[rows.prompt_of], rows.completion_mask], 1)
        model = self.policy.bare_model
        with use_attention(model, STATIC):
            output = model.base_model(
                input_ids=torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1),
                attention_mask=mask,  # unused; without one GPT-2 reads values of `input_ids`
                position_ids=positions(mask),
                use_cache=False,
                static=FixedPrompts(mask),
            )
        # The hidden state of position t predicts token t + 1.
        return output.last_hidden_state[:, -rows.completion_ids.shape[1] - 1 : -1]
