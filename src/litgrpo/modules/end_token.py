"""The token with which a chat template ends a turn: completions end there as well."""

from __future__ import annotations

from typing import Any

from litgrpo.data.modules import SourceData
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.learning.steppers import is_attached
from litgrpo.models.policy import Policy


def add_end_token(module: Any, policy: Policy) -> None:
    """Let completions end with the token that ends a turn in the chat template of the data.

    Base models often have another end token: a policy that was fine-tuned on the template would
    continue after its turn up to the length limit. The token also becomes part of the generation
    config that is exported with the model.

    Args:
        module: may have data in a chat format, and `sampling`.
        policy: gets the end token.
    """
    token_id = _end_token_of_data(module)
    sampling = getattr(module, "sampling", None)  # SFT has none
    stop_token_ids = () if sampling is None else sampling.stop_token_ids
    if token_id is None or token_id in {*policy.eos_ids, *stop_token_ids}:
        return
    policy.eos_ids = tuple(sorted({*policy.eos_ids, token_id}))
    config: Any = policy.bare_model.generation_config
    if config is not None:
        config.eos_token_id = list(policy.eos_ids)
    text = policy.tokenizer.convert_ids_to_tokens(token_id)
    rank_zero_info(
        f"End tokens: the chat template ends turns with {text!r} ({token_id}), so completions end "
        "there as well; it is added to the generation config of the saved model"
    )


def find_end_token(module: Any, policy: Policy) -> int:
    """Return the token that ends a completion of the data: that of a turn, or the end token."""
    token_id = _end_token_of_data(module)
    return int(policy.tokenizer.eos_token_id) if token_id is None else token_id


def _end_token_of_data(module: Any) -> int | None:
    data = module.trainer.datamodule if is_attached(module) else None
    if not isinstance(data, SourceData) or data.final_format is None:
        return None
    prompt_format, tokenizer = data.final_format
    return prompt_format.find_end_token(tokenizer)
