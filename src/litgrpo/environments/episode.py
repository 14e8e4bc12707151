"""Episodes played in the calling process; also used inside worker processes."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import numpy as np

from litgrpo.environments.base import (
    Environment,
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    Message,
    StepResult,
)
from litgrpo.workers.failures import cause_of

Observation = str | list[Message]


class EpisodePlayer:
    """Plays an episode with a copy of an environment; the next one begins with another copy."""

    # Longer observations than `max_chars` are cut in the middle. Exceptions in `caught` fail the
    # episode, others propagate.

    def __init__(
        self,
        environment: Environment,
        max_chars: int | None = None,
        caught: tuple[type[BaseException], ...] = (BaseException,),
    ) -> None:
        self.environment, self.max_chars, self.caught = environment, max_chars, caught
        self.copy: Environment | None = None

    def play(
        self, start: EpisodeStart | None, actions: Sequence[str]
    ) -> Observation | StepResult | FailedEpisode:
        """Begin an episode, or continue the last one if `start` is None, and step through turns.

        Return the result of the last turn; without turns that of `reset`.
        """
        try:
            return self._play(start, actions)
        except self.caught as error:
            return FailedEpisode(cause_of(error))

    def _play(self, start: EpisodeStart | None, actions: Sequence[str]) -> Observation | StepResult:
        result: Observation | StepResult = ""
        if start is not None:
            self.close()
            # Copies: an environment may change its own attributes or the row.
            self.copy = copy.deepcopy(self.environment)
            opening = self.copy.reset(copy.deepcopy(start.row), start.seed)
            result = shorten(check_observation(opening), self.max_chars)
        assert self.copy is not None
        for action in actions:
            step = check_result(self.copy.step(action))
            result = replace(step, observation=shorten(step.observation, self.max_chars))
        return result

    def close(self) -> None:
        """End the episode: close its environment, if it has `close`."""
        environment, self.copy = self.copy, None
        if environment is not None and hasattr(environment, "close"):
            environment.close()


def seed_rngs(seed: int) -> None:
    """Seed the global generators of `random`, numpy and, if imported, torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed % 2**63)


def check_result(result: object) -> StepResult:
    """Return the value of `step` unchanged; raise if it is no `StepResult` with a finite reward."""
    if not isinstance(result, StepResult):
        raise TypeError(f"step returned {type(result).__name__} instead of StepResult")
    check_observation(result.observation)
    if result.reward is not None and not isfinite(result.reward):
        raise ValueError(
            f"the reward of a turn is {result.reward}, expected a finite number or None"
        )
    return result


def check_observation(observation: object) -> Observation:
    """Return an observation unchanged; raise if it is neither a text nor a list of messages."""
    # No tokenizer accepts half a surrogate pair.
    if isinstance(observation, str):
        observation.encode()
        return observation
    if isinstance(observation, list) and all(type(message) is dict for message in observation):
        for message in observation:
            str(message.get("content")).encode()
        return observation
    kind = type(observation).__name__
    raise TypeError(f"the environment returned {kind}, expected a text or a list of messages")


def shorten(observation: Observation, max_chars: int | None) -> Observation:
    """Cut texts longer than `max_chars` in the middle, and mark the cut.

    Beginning and end are kept, because results and errors are often at the end.
    """
    if max_chars is None:
        return observation
    if not isinstance(observation, str):
        return [
            {
                name: _cut(value, max_chars) if name == "content" else value
                for name, value in m.items()
            }
            for m in observation
        ]
    return _cut(observation, max_chars)


def _cut(text: Any, max_chars: int) -> Any:
    if not isinstance(text, str) or len(text) <= max_chars:
        return text
    head, tail = (max_chars + 1) // 2, max_chars // 2
    left_out = len(text) - max_chars
    return f"{text[:head]} ... ({left_out} characters left out) ... {text[len(text) - tail :]}"


class InProcessEpisodes(EpisodePool):
    """Plays episodes in this process: fastest for tools that take no time."""

    # An exception fails its episode, but a hang or a crash stops the run. All episodes and the
    # training share the global random generators, which are not seeded.

    def __init__(
        self, environment: Environment, *, max_observation_chars: int | None = None
    ) -> None:
        self.environment, self.max_chars = environment, max_observation_chars
        self.players: list[EpisodePlayer] = []
        self.ready: dict[int, Any] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        self.close()
        caught = (Exception, SystemExit)  # Ctrl-C must reach the run
        self.players = [EpisodePlayer(self.environment, self.max_chars, caught) for _ in starts]
        openings: list[Any] = [
            player.play(start, ()) for player, start in zip(self.players, starts, strict=True)
        ]
        return openings

    def send(self, episode: int, action: str) -> None:
        self.ready[episode] = self.players[episode].play(None, (action,))

    def end(self, episode: int) -> None:
        self.players[episode].close()

    def receive(self, *, wait: bool) -> dict[int, Any]:
        ready, self.ready = self.ready, {}
        return ready

    def close(self) -> None:
        for player in self.players:
            player.close()
        self.players, self.ready = [], {}
