"""Context length of a model, and checks that prompts and tokens fit it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.models.architectures import list_rope_parameters
from litgrpo.models.policy import Policy

# Names of the number of positions in configs, and of position embeddings in models.
NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length")
POSITION_EMBEDDING = re.compile(r"wpe|position|pos_e")
# Beyond this multiple of the positions that a model was trained for, the length is a mistake.
MAX_EXTRAPOLATION = 8
MAX_SPARE_ROWS = 8  # position embeddings begin with a few rows for padding: 2 in OPT


@dataclass(frozen=True)
class ContextLength:
    """Maximum number of tokens of a prompt and its completion."""

    positions: int
    # The model has an embedding per position and fails beyond (GPT-2); else it was only not trained
    # on longer texts (Qwen 2).
    hard: bool
    # Type of a rotary embedding that rotates earlier tokens differently in longer texts, so that
    # log-probabilities of sampling and training would differ (Phi-3).
    rope: str | None = None


def find_context_length(model: PreTrainedModel) -> ContextLength | None:
    """Return the context length of a decoder-only model; None if unlimited or not in its config."""
    if switch := find_rope_switch(model.config):
        return ContextLength(switch[1], hard=True, rope=switch[0])
    positions = read_max_positions(model.config)
    if positions is None or model.config.is_encoder_decoder:
        return None
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lengths = [
        table.shape[0] for name, table in tensors if POSITION_EMBEDDING.search(name) and table.ndim
    ]
    hard = any(positions <= length <= positions + MAX_SPARE_ROWS for length in lengths)
    return ContextLength(positions, hard)


def find_rope_switch(config: Any) -> tuple[str, int] | None:
    """Return type and limit of a rotary embedding that depends on the length of the text.

    Within the limit it depends on positions alone; beyond, on the longest row of a batch.
    """
    config = config.get_text_config()
    switches = []
    for rope in list_rope_parameters(getattr(config, "rope_parameters", None)):
        rope_type = str(rope.get("rope_type", "default"))
        if rope_type == "longrope":
            default = getattr(config, "original_max_position_embeddings", None)
            limit = rope.get("original_max_position_embeddings") or default
            switches.append((rope_type, int(limit or config.max_position_embeddings)))
        elif "dynamic" in rope_type:  # as transformers asks
            switches.append((rope_type, int(config.max_position_embeddings)))
    return min(switches, key=lambda switch: switch[1], default=None)


def check_rope_length(policy: Policy, tokens: int) -> None:
    """Raise if a rollout of prompts and completions of so many tokens reaches a rope's limit.

    The rotary embedding would change during the rollout; see `find_rope_switch`.
    """
    context = find_context_length(policy.bare_model)
    if context is not None and context.rope is not None:
        subject = f"A prompt with its completion may have {tokens} tokens"
        check_length(policy, tokens, 0, "max_prompt_length", subject)


def read_max_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions in a config; None if it has none."""
    settings = config.to_dict()
    values = (settings.get(name) for name in NAMES)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def check_lengths(policy: Policy, longest: dict[str, int], completion: int, key: str) -> None:
    """Raise or warn if prompts leave too few positions for their completions.

    Args:
        policy: its model limits the length.
        longest: {dataset name: tokens of its longest prompt}.
        completion: maximum tokens of a completion; 0 if `longest` includes them.
        key: option that limits the length of the rows, such as `max_prompt_length`.
    """
    name = max(longest, key=lambda dataset: longest[dataset], default="")
    tokens = longest.get(name, 0)
    subject = f"The longest row of the {name} data has {tokens} tokens"
    check_length(policy, tokens, completion, key, subject)


def check_length(policy: Policy, tokens: int, completion: int, key: str, subject: str) -> None:
    """Raise or warn if one row does not fit; see `check_lengths`.

    A ValueError if the model has no position embeddings for the last tokens, or was trained for
    texts that are many times shorter. `subject` names the row and its length in the message.
    """
    context = find_context_length(policy.bare_model)
    if context is None or tokens + completion <= context.positions:
        return
    num_positions, available = tokens + completion, context.positions
    if completion:
        subject += f" and model.max_completion_length is {completion}"
    model_type = policy.bare_model.config.model_type
    verb = "has" if context.hard else "was trained for"
    message = f"{subject}: {num_positions} positions, but {model_type} {verb} {available}."
    if context.rope is not None:
        message = (
            f"{subject}: {num_positions} positions, but beyond {available} the rotary embedding of "
            f"this {model_type} ({context.rope}) depends on the length of the text: tokens would "
            "be sampled with other probabilities than they are trained with."
        )
    remedies = []
    if available > completion:
        too_long = "long_examples" if key == "max_length" else "long_prompts"
        remedies.append(
            f"set data.{key} to at most {available - completion} (data.{too_long}: what to do with "
            "longer rows)"
        )
    if completion:
        remedies.append(f"lower model.max_completion_length by {num_positions - available}")
    remedy = f"Remedy: {' or '.join(remedies)}."
    if context.hard or num_positions > MAX_EXTRAPOLATION * available:
        raise ValueError(f"{message} {remedy}")
    rank_zero_warn(f"{message} Text beyond that is usually noise. {remedy}")


def check_tokens(policy: Policy, sets: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Check that every token id has an embedding; `sets` are {dataset name: ids of each row}."""
    embedding: Any = policy.bare_model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    for name, dataset in sets.items():
        largest_ids = [max(ids, default=0) for ids in dataset]
        token = max(largest_ids, default=0)
        if token >= rows:
            raise ValueError(
                f"Row {largest_ids.index(token) + 1} of the {name} data contains the token "
                f"{policy.tokenizer.convert_ids_to_tokens(token)!r} (id {token}), but the model "
                f"has embeddings for {rows} tokens. Remove it from the text, or call "
                "model.resize_token_embeddings and save model and tokenizer again."
            )
