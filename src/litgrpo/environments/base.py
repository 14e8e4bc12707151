"""Environment interface, its data classes, and the pool that plays episodes in parallel."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from litgrpo.arguments import at_least, at_most
from litgrpo.workers.failures import WorkerError

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
    from transformers.utils import chat_template_utils  # slow

    tools = environment.tools
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


@runtime_checkable
class DescribesTools(Protocol):
    """What may tell of its tools in the prompt itself, as text: `list_tools_in_prompt`."""

    list_tools_in_prompt: bool


def shown_schemas_of(environment: object) -> list[dict[str, Any]]:
    """The same for chat templates to show: none where the environment tells of them itself."""
    told = isinstance(environment, DescribesTools) and environment.list_tools_in_prompt
    return [] if told else schemas_of(environment)


@dataclass(frozen=True)
class EpisodeStart:
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
class FailedEpisode:
    """An episode that the environment could not go on with; its row teaches nothing.

    Args:
        reason: one line, such as `timed out` or `ValueError: ...`.
    """

    reason: str


class EpisodePool(ABC):
    """Plays episodes of one environment side by side; knows texts and no tokens."""

    @abstractmethod
    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        """Reset one episode for each start; those before are over.

        Returns:
            What each adds to its prompt.
        """

    @abstractmethod
    def send(self, episode: int, said: str) -> None:
        """Hand over a turn; the answer comes by `heard`.

        Args:
            episode: its number among the starts.
            said: the turn's text.
        """

    @abstractmethod
    def receive(self, *, wait: bool) -> dict[int, StepResult | FailedEpisode]:
        """The answers that came since the last call.

        Args:
            wait: until there is one, where an episode has not been answered.

        Returns:
            {number of the episode: its answer}; nothing follows a failure or `StepResult.done`.
        """

    @abstractmethod
    def close(self) -> None:
        """End every episode, and processes where there are some."""

    def single_process_pool(self) -> EpisodePool | None:
        """A pool of the same environment in one process, to see whether it is a function.

        Returns:
            None where that cannot be asked, or where it need not be one.
        """
        return None


log = logging.getLogger(__name__)


class EnvironmentFailure(RuntimeError):
    """So many episodes failed that going on would train on few. The message is one line."""

    exit_code = 2


class FailureCounter:
    """Counts the episodes that failed, shows the first, stops the run where too many do.

    Args:
        max_failed_frac: share of the episodes of a batch that may fail.
    """

    def __init__(self, max_failed_frac: float) -> None:
        at_least("episode.max_failed_frac", max_failed_frac, 0)
        at_most("episode.max_failed_frac", max_failed_frac, 1)
        self.max_failed_frac = max_failed_frac
        self.reasons: Counter[str] = Counter()  # of the whole run
        self.starts: Sequence[EpisodeStart] = ()
        self.failed: dict[int, str] = {}
        self.stories: dict[int, str] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> None:
        """A new batch."""
        self.starts, self.failed, self.stories = starts, {}, {}

    def lost(self, episode: int, error: WorkerError) -> None:
        """Keep what a worker showed before it ended, such as where a step hung."""
        self.stories[episode] = str(error)

    def count(self, failed: Mapping[int, FailedEpisode]) -> None:
        """Add the failures of some episodes of the batch.

        Raises:
            EnvironmentFailure: more failed than may.
        """
        for episode, each in failed.items():
            before = self.reasons.total()
            self.failed[episode] = each.reason
            self.reasons[each.reason] += 1
            if not before:
                log.warning(
                    "%s failed and is left out: %s. %s",
                    *(self._named(episode), each.reason, self.stories.get(episode, "")),
                )
            elif self.reasons.total().bit_length() > before.bit_length():  # the total doubled
                listed = ", ".join(f"{why}: {n}" for why, n in self.reasons.most_common(3))
                log.warning("%d episodes failed so far (%s)", self.reasons.total(), listed)
        if len(self.failed) > self.max_failed_frac * len(self.starts):
            first = min(self.failed)
            raise EnvironmentFailure(
                f"environment: {len(self.failed)} of {len(self.starts)} episodes failed; the first"
                f" is {self._named(first)}: {self.failed[first]}. Mend the environment, or give"
                " its steps more time by episode.timeout_s."
            )

    def _named(self, episode: int) -> str:
        _, _, prompt, completion = self.starts[episode].key
        return f"the episode of completion {completion} of prompt {prompt}"
