"""Environment interface, its data classes, and the pool that plays episodes in parallel."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from litgrpo.workers.failures import FailureCounter

Message = dict[str, Any]  # {"role": "user" | "tool", "content": ...}, as chat templates take them


@dataclass(frozen=True)
class StepResult:
    """Answer of an environment to one turn of the policy.

    Args:
        observation: text that is inserted as it is, or messages that go through the chat template.
        reward: reward of this turn; None abstains.
        done: the episode is over; the policy does not see `observation`.
        state: turns of a group with equal states are compared with each other (GiGPO,
            arXiv:2505.10978).
        log: {name: number} to log, averaged over turns.
        calls: {tool: (calls, failed calls)} of this turn.

    Example:
        >>> StepResult("too low", reward=0.0, state=(8, 15), calls={"guess": (1, 0)}).done
        False
    """

    observation: str | list[Message] = ""
    reward: float | None = 0.0
    done: bool = False
    state: Hashable | None = None
    log: dict[str, float] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode at a time; a pure function of row, seed and the policy's turns.

    The object in a recipe is a prototype: every episode is played by its own copy.
    Optional: `tools`, functions that the chat template shows to the model; `close()`.

    Example::

        class Guess:
            def reset(self, row, seed):
                self.number = random.Random(seed).randint(1, 7)
                return "Guess a number from 1 to 7."

            def step(self, action):
                correct = action.strip() == str(self.number)
                return StepResult("Try again.", reward=float(correct), done=correct)
    """

    def reset(self, row: dict[str, Any], seed: int) -> str | list[Message]:
        """Begin an episode.

        Args:
            row: {column: value} of the prompt's row; `prompt` is its text.
            seed: equal for all episodes of a group, so that they begin in the same state.

        Returns:
            Addition to the prompt: a text, appended to its last user message, or messages; "" for
            nothing.
        """

    def step(self, action: str) -> StepResult:
        """Answer one turn.

        Args:
            action: text that the policy generated in this turn, without its end token.
        """


def schemas_of(environment: object) -> list[dict[str, Any]]:
    """Return the JSON schemas of an environment's `tools`; [] for objects without."""
    tools: Sequence[Any] = getattr(environment, "tools", ())
    if not tools:
        return []
    from transformers.utils import chat_template_utils  # slow

    try:
        return [
            tool if isinstance(tool, dict) else chat_template_utils.get_json_schema(tool)
            for tool in tools
        ]
    except (
        chat_template_utils.DocstringParsingException,
        chat_template_utils.TypeHintParsingException,
    ) as error:
        raise ValueError(f"a tool cannot be shown to the model: {error}") from error


def shown_tools_of(environment: object) -> Any:
    """Return the schemas that the chat template shows, or {task: schemas} if tasks differ."""
    # Environments whose prompt text lists the tools, or whose tools depend on the task of a row,
    # say so by an attribute `shown_tools`.
    shown = getattr(environment, "shown_tools", None)
    return schemas_of(environment) if shown is None else shown


@dataclass(frozen=True)
class EpisodeStart:
    """Start of an episode."""

    row: dict[str, Any]  # {column: value} of its prompt
    seed: int  # seed of its environment; equal within a group
    # (iteration, attempt, prompt, completion): identifies the episode in logs and messages
    key: tuple[int, int, int, int]


@dataclass(frozen=True)
class FailedEpisode:
    """Episode whose environment failed; it does not contribute to the loss."""

    reason: str  # one line, such as `timed out` or `ValueError: ...`
    # of a lost process, such as the stack of a step that hung
    details: str = field(default="", compare=False)


class EpisodePool(ABC):
    """Plays episodes of one environment in parallel, as texts without tokens.

    Attributes: `max_parallel`, the number of episodes that it can play at once; None: no limit.
    """

    max_parallel: int | None = None

    @abstractmethod
    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        """Reset one episode for each start, and return its addition to its prompt.

        Earlier episodes end.
        """

    @abstractmethod
    def send(self, episode: int, action: str) -> None:
        """Send a turn to the episode of this index; `receive` returns the result."""

    @abstractmethod
    def end(self, episode: int) -> None:
        """End an episode that gets no further turn."""

    @abstractmethod
    def receive(self, *, wait: bool) -> dict[int, StepResult | FailedEpisode]:
        """Return {episode: result} since the last call; a failure or `done` is the last one.

        `wait` blocks until there is a result, if one is outstanding.
        """

    @abstractmethod
    def close(self) -> None:
        """End all episodes and worker processes."""


log = logging.getLogger(__name__)

MAX_FAILED_FRAC = 0.5  # of the episodes of a batch


class EnvironmentFailure(RuntimeError):
    """Too many episodes failed. The message is one line."""

    exit_code = 2


class EpisodeFailures:
    """Counts failed episodes, logs the first, and ends the run if over half of a batch fail."""

    def __init__(self) -> None:
        self.reasons = FailureCounter()  # of the whole run
        self.starts: Sequence[EpisodeStart] = ()
        self.failed: dict[int, str] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> None:
        """Start a new batch."""
        self.starts, self.failed = starts, {}

    def count(self, results: Mapping[int, object]) -> None:
        """Add the failures among the results of some episodes of the batch."""
        for episode, result in results.items():
            if not isinstance(result, FailedEpisode):
                continue
            is_first = not self.reasons
            self.failed[episode] = result.reason
            has_doubled = self.reasons.add([result.reason])
            if is_first:
                log.warning(
                    "%s failed and is excluded from training: %s. %s",
                    *(self._describe(episode), result.reason, result.details),
                )
            elif has_doubled:
                log.warning("%d episodes failed so far (%s)", self.reasons.total(), self.reasons)
        if len(self.failed) > MAX_FAILED_FRAC * len(self.starts):
            first = min(self.failed)
            raise EnvironmentFailure(
                f"environment: {len(self.failed)} of {len(self.starts)} episodes failed; the first"
                f" is {self._describe(first)}: {self.failed[first]}. Fix the environment, or raise"
                " model.episode.timeout_s if its steps are slow."
            )

    def _describe(self, episode: int) -> str:
        _, _, prompt, completion = self.starts[episode].key
        return f"the episode of completion {completion} of prompt {prompt}"
