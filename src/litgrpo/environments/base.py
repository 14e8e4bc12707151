"""What an environment is, what it answers, and how many episodes of it are played side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]  # {"role": "user" | "tool", "content": ...}, as chat templates take them


@dataclass(frozen=True)
class StepResult:
    """What a turn of the policy is answered with.

    Args:
        observation: a text that stands as it is, or messages that go through the chat template.
        reward: for this turn; None abstains.
        done: the episode is over; nothing of `observation` is read any more.
        state: equal states of a group are compared turn by turn (GiGPO, arXiv:2505.10978).
        log: {name: number} for the logs, averaged over turns.
        calls: {tool: (calls, calls that failed)} of this turn.
    """

    observation: str | list[Message] = ""
    reward: float | None = 0.0
    done: bool = False
    state: Hashable | None = None
    log: dict[str, float] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; a function of row, seed and what was said.

    An object that a recipe names is the pattern: every episode is played by a copy of its own.
    Optional: `tools`, functions that the chat template shows to the model; `close()`.
    """

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode.

        Args:
            row: {column: value} of the prompt's row; `prompt` is its text.
            seed: the same for all episodes of a group, so that they begin in the same state.

        Returns:
            What is added to the prompt: a text, at the end of its last user message, or messages;
            "" for nothing.
        """

    def step(self, action: str) -> StepResult:
        """Answer one turn.

        Args:
            action: what the policy action in it, without the token that ended the turn.
        """


@runtime_checkable
class ShowsTools(Protocol):
    """What has tools for the model to see: `tools`, typed functions or their JSON schemas."""

    tools: Sequence[Any]


def schemas_of(environment: object) -> list[dict[str, Any]]:
    """JSON schemas of the tools that an environment shows to the model; of any other object, none.

    Raises:
        ValueError: a function lacks what a schema is made of: types and a docstring.
    """
    if not isinstance(environment, ShowsTools):
        return []
    from transformers.utils import chat_template_utils as made  # slow

    tools = environment.tools
    try:
        return [tool if isinstance(tool, dict) else made.get_json_schema(tool) for tool in tools]
    except (made.DocstringParsingException, made.TypeHintParsingException) as error:
        raise ValueError(f"a tool cannot be shown to the model: {error}") from error


@runtime_checkable
class DescribesTools(Protocol):
    """What may tell of its tools in the prompt itself, as text: `list_tools_in_prompt`."""

    list_tools_in_prompt: bool


def shown_schemas_of(environment: object) -> list[dict[str, Any]]:
    """The same for chat templates to show: none where the environment tells of them itself."""
    told = isinstance(environment, DescribesTools) and environment.list_tools_in_prompt
    return [] if told else schemas_of(environment)


@dataclass(frozen=True)
class Start:
    """How an episode begins.

    Args:
        row: {column: value} of its prompt.
        seed: of its environment; the same in a group.
        key: (iteration, attempt, prompt, completion): names the episode in journals and messages.
    """

    row: dict[str, Any]
    seed: int
    key: tuple[int, int, int, int]


@dataclass(frozen=True)
class Failed:
    """An episode that the environment could not go on with; its row teaches nothing.

    Args:
        reason: one line, such as `timed out` or `ValueError: ...`.
    """

    reason: str


class EpisodePool(ABC):
    """Plays episodes of one environment side by side; knows texts and no tokens."""

    @abstractmethod
    def begin(self, starts: Sequence[Start]) -> list[str | list[Message] | Failed]:
        """Reset one episode for each start; those before are over.

        Returns:
            What each adds to its prompt.
        """

    @abstractmethod
    def say(self, episode: int, said: str) -> None:
        """Hand over a turn; the answer comes by `heard`.

        Args:
            episode: its number among the starts.
            said: the turn's text.
        """

    @abstractmethod
    def heard(self, *, wait: bool) -> dict[int, StepResult | Failed]:
        """The answers that came since the last call.

        Args:
            wait: until there is one, where an episode has not been answered.

        Returns:
            {number of the episode: its answer}; nothing follows a failure or `StepResult.done`.
        """

    @abstractmethod
    def close(self) -> None:
        """End every episode, and processes where there are some."""

    def alone(self) -> EpisodePool | None:
        """A pool of the same environment in one process, to see whether it is a function.

        Returns:
            None where that cannot be asked, or where it need not be one.
        """
        return None
