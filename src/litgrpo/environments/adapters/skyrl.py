"""Adapter for SkyRL-Gym and other environments with its interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from litgrpo.arguments import import_object, import_package, require
from litgrpo.environments.adapters.external import (
    ExternalEnvironment,
    construct,
    format_opening,
    game_result,
)
from litgrpo.environments.base import Message, StepResult


@dataclass(eq=False)
class SkyRL(ExternalEnvironment):
    """Environment with the interface of `BaseTextEnv`: `init(prompt)`, `step(text)`.

    Each episode has a new instance, with the row as `extras` and without a seed. Messages that
    `init` adds to the prompt precede the first turn. The state is a digest of the conversation.

    Args:
        env_id: id of a SkyRL-Gym environment, such as gsm8k_multi_turn.
        factory: instead of `env_id`, a class, or its import path.
        kwargs: further arguments of the environment, such as `env_config`.
        extras_from_columns: {entry: column} of the data, dots for entries inside entries, such as
            {reward_spec.ground_truth: answer}. Other columns keep their names.
        extras: {entry: value} for every row, such as {max_turns: 3}.

    Example::

        SkyRL("gsm8k_multi_turn", extras_from_columns={"reward_spec.ground_truth": "answer"})
    """

    env_id: str | None = None
    factory: str | Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    extras_from_columns: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # An instance needs a row, so only the class is looked up here.
        alone = (self.env_id is None) != (self.factory is None)
        require(alone, "SkyRL needs either env_id: gsm8k_multi_turn, or factory: an.import.path.")
        if self.env_id is not None:
            gym = import_package("skyrl_gym", "skyrl-gym")
            construct(f"env_id: {self.env_id}", lambda: gym.spec(self.env_id))
        if self.factory is not None:
            is_callable = callable(import_object("factory", self.factory))
            require(is_callable, f"factory is {self.factory!r}; it must be a class or a function.")

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Construct the environment for a row; see `Environment.reset`.

        Raises:
            ValueError: a column is missing, or the environment could not be constructed.
        """
        self.close()
        extras = dict(row) | self.extras
        for entry, column in self.extras_from_columns.items():
            columns = ", ".join(row)
            require(
                column in row,
                f"extras_from_columns: the data have no column {column!r}; they have: {columns}.",
            )
            _put(extras, entry.split("."), row[column])
        kwargs = {**self.kwargs, "extras": extras}
        self._game = construct(
            f"SkyRL environment {self.env_id or self.factory}", lambda: self._make_game(kwargs)
        )
        prompt = [{"role": "user", "content": str(row.get("prompt", ""))}]
        messages, _ = self._game.init(list(prompt))
        self._conversation = [*messages]
        is_unchanged = list(messages[:1]) == prompt
        require(
            is_unchanged, "init changed the prompt; it may only add messages. Put it into the data."
        )
        new = _text_or_messages(messages[1:])
        return format_opening(row, new) if new and isinstance(new, str) else new

    def step(self, action: str) -> StepResult:
        output = self._game.step(action)
        new = [dict(message) for message in output["observations"]]
        self._conversation += [{"role": "assistant", "content": action}, *new]
        state = repr(self._conversation)
        return game_result(
            _text_or_messages(new), output["reward"], done=bool(output["done"]), state=state
        )

    def _make_game(self, kwargs: dict[str, Any]) -> Any:
        if self.factory is not None:
            return import_object("factory", self.factory)(**kwargs)
        return import_package("skyrl_gym", "skyrl-gym").make(self.env_id, **kwargs)


def _text_or_messages(messages: Sequence[Message]) -> str | list[Message]:
    """Return one text if all messages are a user's, which inline turns can use as well."""
    alone = all(message["role"] == "user" for message in messages)
    return "\n\n".join(message["content"] for message in messages) if alone else [*messages]


def _put(entries: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a nested entry; dicts on the path are copied, because the row shares them."""
    for name in path[:-1]:
        entries[name] = dict(entries.get(name) or {})
        entries = entries[name]
    entries[path[-1]] = value
