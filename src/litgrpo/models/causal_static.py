"""Decoder-only models in shapes that never change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from litgrpo.models.architectures import (
    DECODER_ONLY,
    LENGTH_DEPENDENT_ROPES,
    has_known_layers,
    rope_types,
)
from litgrpo.models.shared_prefix import (
    attention,
)
from litgrpo.models.static_cache import STATIC, StaticPrompts, StaticRows, StaticState, per_row
from litgrpo.models.static_decoder import StaticDecoder
from litgrpo.tensors import (
    positions,
)
from litgrpo.types import TokenRows


class CausalStaticDecoder(StaticDecoder):
    """A decoder-only model in shapes that never change."""

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Attend in static shapes; see `StaticDecoder.attending`."""
        model = self.policy.bare_model
        config = model.config.to_dict()
        if not has_known_layers(model):
            raise ValueError(
                f"model type {config['model_type']!r} with layers of type "
                f"{sorted(set(config.get('layer_types') or ['unknown']))} cannot decode in static "
                f"shapes; known are {', '.join(DECODER_ONLY)}, with full or sliding attention. "
                "Use litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        kinds = rope_types(config.get("rope_parameters")) & LENGTH_DEPENDENT_ROPES
        if kinds:
            raise ValueError(
                f"rope_parameters of type {sorted(kinds)} depend on the length of "
                "the longest row, so that this model cannot decode in static shapes. Use "
                "litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
            )
        _ = self.policy._logit_rules  # read now: a compiler cannot
        with attention(model, STATIC), torch.no_grad():
            yield

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """Read the prompts, each once; see `StaticDecoder.prefill`."""
        prompts = StaticPrompts(prompt_mask)
        output = self.policy.bare_model.base_model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,  # `static` has it, but without one GPT-2 looks for padding
            position_ids=positions(prompt_mask),
            past_key_values=prompts,
            use_cache=True,
            static=prompts,
        )
        logits = self.policy.head(output.last_hidden_state[:, -1])
        return per_row(logits, group_size), prompts.state(group_size, capacity)

    def step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """Feed one token to every row; see `StaticDecoder.step`."""
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
        """Hidden states of every completion token; see `StaticDecoder.hidden`."""
        mask = torch.cat([rows.prompt_mask[rows.prompt_of], rows.completion_mask], 1)
        model = self.policy.bare_model
        with attention(model, STATIC):
            output = model.base_model(
                input_ids=torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1),
                attention_mask=mask,  # `static` has it, but without one GPT-2 looks for padding
                position_ids=positions(mask),
                use_cache=False,
                static=StaticPrompts(mask),
            )
        return predicting_last(output.last_hidden_state, rows.completion_ids.shape[1])


def predicting_last(hidden: Tensor, length: int) -> Tensor:
    """The hidden states that predict the last tokens of each row, whether they are real or not.

    Args:
        hidden: [M, T, E] hidden states.
        length: C, below T.

    Returns:
        [M, C, E].
    """
    return hidden[:, -length - 1 : -1]
