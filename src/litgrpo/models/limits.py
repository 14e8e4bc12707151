"""How many positions and which tokens a model can read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from litgrpo.arguments import require
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.models.policy import Policy

# What configs call the number of positions, and how models name a table of them.
NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length")
TABLE = re.compile(r"wpe|position|pos_e")
SPARE_ROWS = 8  # tables begin with a few rows for padding: 2 in OPT


@dataclass(frozen=True)
class Context:
    """How far a model can look.

    Args:
        positions: tokens of a prompt and its completion.
        hard: a table of embeddings ends there; else the model was trained no further.
    """

    positions: int
    hard: bool


def context_of(model: PreTrainedModel) -> Context | None:
    """How far a decoder-only model can look; None where nothing limits it, or its config is silent.

    Args:
        model: the library's.
    """
    positions = positions_of(model.config)
    if positions is None or model.config.is_encoder_decoder:
        return None
    named = [*model.named_parameters(), *model.named_buffers()]
    tables = [table for name, table in named if TABLE.search(name)]
    lengths = [rows for rows, *_ in (table.shape for table in tables if table.ndim)]
    hard = any(positions <= length <= positions + SPARE_ROWS for length in lengths)
    return Context(positions, hard)


def positions_of(config: PretrainedConfig) -> int | None:
    """The number of positions that a config names; None if it names none."""
    settings = config.to_dict()
    named = (settings.get(name) for name in NAMES)
    return next((each for each in named if isinstance(each, int) and each > 0), None)


def check_lengths(policy: Policy, longest: dict[str, int], completion: int, key: str) -> None:
    """Refuse, or warn of, prompts that leave no room for their completions.

    Args:
        policy: reads them.
        longest: {name of a set: tokens of its longest prompt}.
        completion: tokens of a completion at most; 0 where `longest` counts them.
        key: of the recipe that limits the length of the sets' rows.

    Raises:
        ValueError: the model has no embeddings for the last positions.
    """
    name = max(longest, key=lambda each: longest[each], default="")
    said = f"The longest of the {name} data has {longest.get(name, 0)} tokens"
    check_length(policy, longest.get(name, 0), completion, key, said)


def check_length(policy: Policy, tokens: int, completion: int, key: str, said: str) -> None:
    """The same for one row.

    Args:
        policy: reads it.
        tokens: of its prompt.
        completion: tokens of a completion at most; 0 where `tokens` counts them.
        key: of the recipe that limits the length.
        said: which row that is, and how long.

    Raises:
        ValueError: the model has no embeddings for the last positions.
    """
    context = context_of(policy.bare_model)
    if context is None or tokens + completion <= context.positions:
        return
    asked, most = tokens + completion, context.positions
    and_completion = f" and model.max_completion_length is {completion}" if completion else ""
    said = (
        f"{said}{and_completion}: {asked} positions, but {policy.bare_model.config.model_type} "
        f"{'has' if context.hard else 'was made for'} {most}."
    )
    room = most - completion
    too_long = {"max_length": "long_examples"}.get(key, "long_prompts")
    ways = [f"set data.{key} to {room} or less (data.{too_long}: what to do with longer rows)"]
    ways = ways * (room > 0) + [f"lower model.max_completion_length by {asked - most}"] * bool(
        completion
    )
    lower = f"Remedy: {' or '.join(ways)}."
    require(not context.hard, f"{said} {lower}")
    rank_zero_warn(f"{said} Beyond that its text is usually noise. {lower}")


def check_tokens(policy: Policy, sets: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Refuse token ids that the model has no embedding of.

    Args:
        policy: reads them.
        sets: {name: token ids of each row}.

    Raises:
        ValueError: with the largest such token and the number of its row.
    """
    embedding: Any = policy.bare_model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    for name, texts in sets.items():
        largest = [max(ids, default=0) for ids in texts]
        token = max(largest, default=0)
        require(
            token < rows,
            f"Row {largest.index(token) + 1 if texts else 0} of the {name} data contains the token "
            f"{policy.tokenizer.convert_ids_to_tokens(token)!r} (number {token}), but the model "
            f"has embeddings for {rows} tokens. Take it out of the text, or resize the "
            "embedding with model.resize_token_embeddings and save model and tokenizer again.",
        )
