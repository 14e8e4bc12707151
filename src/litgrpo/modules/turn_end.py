"""The token with which a chat template ends a turn: completions end there as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litgrpo.data.messages import ASSISTANT
from litgrpo.data.modules import SourceData
from litgrpo.data.rendering import (
    TEMPLATE_ERRORS,
    ChatPromptFormat,
    PromptFormat,
    apply_chat_template,
)
from litgrpo.data.tokenization import special_token_texts
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.learning.steppers import is_attached
from litgrpo.models.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLY = "\ue000reply\ue001"  # characters of the private use area, which occur in no template


def add_turn_end(module: Any, policy: Policy) -> None:
    """Let completions end with the token that ends a turn in the chat template of the data.

    Base models often have another end token: a policy that was fine-tuned on the template would
    continue after its turn up to the length limit. The token also becomes part of the generation
    config that is exported with the model.

    Args:
        module: may have data in a chat format, and `sampling`.
        policy: gets the end token.
    """
    token_id = _turn_end_of_data(module)
    sampling = getattr(module, "sampling", None)  # SFT has none
    known = {*policy.eos_ids, *(sampling.stop_token_ids if sampling is not None else ())}
    if token_id is None or token_id in known:
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


def completion_end(module: Any, policy: Policy) -> int:
    """Return the token that ends a completion of the data: that of a turn, or the end token.

    Args:
        module: may have data in a chat format.
        policy: that would generate it.
    """
    token_id = _turn_end_of_data(module)
    return int(policy.tokenizer.eos_token_id) if token_id is None else token_id


def _turn_end_of_data(module: Any) -> int | None:
    data = module.trainer.datamodule if is_attached(module) else None
    if not isinstance(data, SourceData) or data.final_format is None:
        return None
    return find_turn_end(*data.final_format)


def find_turn_end(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the first special token after a reply in the chat template; None without one.

    Args:
        prompt_format: of the data.
        tokenizer: tokenizer with a chat template.
    """
    if not isinstance(prompt_format, ChatPromptFormat):
        return None
    messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": REPLY}]
    try:
        text = apply_chat_template(
            messages, prompt_format.chat, tokenizer, add_generation_prompt=False
        )
    except TEMPLATE_ERRORS:  # prompts of other roles may be all that the template renders
        return None
    tail = text.rpartition(REPLY)[2] if REPLY in text else ""
    places = [(tail.find(each), -len(each), each) for each in special_token_texts(tokenizer)]
    found = min((place for place in places if place[0] >= 0), default=None)
    token_id: Any = None if found is None else tokenizer.convert_tokens_to_ids(found[2])
    return None if token_id is None else int(token_id)
