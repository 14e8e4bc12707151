"""Play episodes in this process; also used inside worker processes."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np  # its generator must not first exist in the middle of an episode

from litgrpo.environments.base import (
    Environment,
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    FailureCounter,
    Message,
    StepResult,
)
from litgrpo.workers.failures import cause_of

Observation = str | list[Message]
Generators = dict[str, Any]


class PlayRequest(NamedTuple):
    """What is asked of an episode: to begin, to go on, or both.

    Args:
        batch: number of the batch; the episodes of the one before are over.
        episode: its number in the batch.
        start: begin it, also where it is known; None goes on.
        said: turns, one after the other. The answer is that to the last, or what `reset` gave.
    """

    batch: int
    episode: int
    start: EpisodeStart | None
    said: tuple[str, ...]


class EpisodePlayer:
    """The episodes that are played in one process, one call at a time.

    The global generators of `random`, numpy and torch are each episode's own: seeded when it
    begins, and put back when it is called again after another one was.

    Args:
        environment: the pattern; every episode is played by a copy.
        max_chars: of a text that an environment says; longer ones are cut in the middle.
        caught: what an environment may raise; it fails the episode.
    """

    def __init__(
        self,
        environment: Environment,
        max_chars: int | None = None,
        caught: tuple[type[BaseException], ...] = (BaseException,),
    ) -> None:
        self.environment, self.max_chars, self.caught = environment, max_chars, caught
        self.batch = -1
        self.copies: dict[int, Environment] = {}
        self.seeds: dict[int, int] = {}
        self.generators: dict[int, Generators] = {}
        self.current: int | None = None  # whose generators are in place

    def play(self, asked: PlayRequest) -> Observation | StepResult | FailedEpisode:
        """The answer to the last of some turns."""
        if asked.batch != self.batch:
            self.close()
            self.batch = asked.batch
        try:
            return self._play(asked.episode, asked.start, asked.said)
        except self.caught as error:
            return FailedEpisode(cause_of(error))

    def _play(
        self, episode: int, start: EpisodeStart | None, said: tuple[str, ...]
    ) -> Observation | StepResult:
        answer: Observation | StepResult = ""
        self.switch_to(episode if start is None else None)
        if start is not None:
            self._end(episode)
            self.seeds[episode], self.current = start.seed, episode
            seed_rngs(start.seed)
            self.copies[episode] = copy.deepcopy(self.environment)
            opening = self.copies[episode].reset(copy.deepcopy(start.row), start.seed)
            answer = shorten(check_observation(opening), self.max_chars)
        for text in said:
            heard = check_result(self.copies[episode].step(text))
            answer = replace(heard, observation=shorten(heard.observation, self.max_chars))
        return answer

    def switch_to(self, episode: int | None) -> None:
        """Put the generators of an episode in place, and keep those of the one before."""
        if self.current == episode:
            return
        if self.current is not None:
            self.generators[self.current] = get_rng_states()
        if episode is not None:
            set_rng_states(self.generators[episode], self.seeds[episode])
        self.current = episode

    def _end(self, episode: int) -> None:
        """Close an episode, if there is one and its environment can be closed."""
        played = self.copies.pop(episode, None)
        if hasattr(played, "close"):
            played.close()

    def close(self) -> None:
        """End all episodes."""
        self.current = None
        for episode in list(self.copies):
            self._end(episode)


def handle_request(
    loaded: dict[str, Any], asked: PlayRequest, send: Any
) -> Observation | StepResult | FailedEpisode:
    """Answer in a worker; see `processes.worker.Handler`."""
    if "stage" not in loaded:
        loaded["stage"] = EpisodePlayer(*loaded["environment"])
    stage: EpisodePlayer = loaded["stage"]
    return stage.play(asked)


def get_rng_states() -> Generators:
    """The states of the global generators of `random`, numpy and, where it is loaded, torch."""
    states: Generators = {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def set_rng_states(states: Generators, seed: int) -> None:
    """Put states in place; torch, where it was loaded since, is seeded."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    elif "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed % 2**63)


def seed_rngs(seed: int) -> None:
    """Seed the global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed % 2**63)


def check_result(heard: object) -> StepResult:
    """What `step` returned.

    Raises:
        TypeError, ValueError: it is no `StepResult`, or its reward no number.
    """
    if not isinstance(heard, StepResult):
        raise TypeError(f"step returned {type(heard).__name__} instead of StepResult")
    check_observation(heard.observation)
    if heard.reward is not None and not isfinite(heard.reward):
        raise ValueError(f"the reward of a turn is {heard.reward}")
    return heard


def check_observation(said: object) -> Observation:
    """What `reset` returned, or what was heard.

    Raises:
        TypeError: it is neither a text nor a list of messages.
    """
    messages = said if isinstance(said, list) else []
    if isinstance(said, str) or (said is messages and all(type(one) is dict for one in messages)):
        return said
    raise TypeError(f"the environment said {type(said).__name__} instead of a text or messages")


def shorten(said: Observation, max_chars: int | None) -> Observation:
    """A text, or the texts of messages, cut in the middle, and saying so, where they are longer.

    Example:
        >>> shorten("abcdefghij", 4)
        'ab ... (6 characters left out) ... ij'
    """
    if max_chars is None:
        return said
    if not isinstance(said, str):
        return [
            {
                name: _cut(value, max_chars) if name == "content" else value
                for name, value in m.items()
            }
            for m in said
        ]
    return _cut(said, max_chars)


def _cut(text: Any, max_chars: int) -> Any:
    if not isinstance(text, str) or len(text) <= max_chars:
        return text
    first, last = (max_chars + 1) // 2, max_chars // 2
    left_out = len(text) - max_chars
    return f"{text[:first]} ... ({left_out} characters left out) ... {text[len(text) - last :]}"


class InProcessEpisodes(EpisodePool):
    """Plays episodes in this process: the quickest for tools that take no time.

    What raises fails its episode; what hangs or crashes cannot be survived. The global random
    generators are an episode's own while it is called, and are put back.

    Args:
        environment: the pattern; every episode is played by a copy.
        max_observation_chars: of a text that is heard; longer ones are cut in the middle.
        max_failed_frac: share of the episodes of a batch that may fail; more stop the run.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        max_observation_chars: int | None = None,
        max_failed_frac: float = 0.5,
    ) -> None:
        self.stage = EpisodePlayer(environment, max_observation_chars, (Exception, SystemExit))
        self.failures = FailureCounter(max_failed_frac)
        self.batch = 0
        self.ready: dict[int, Any] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        """Reset one episode for each start; those before are over.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        self.batch, self.ready = self.batch + 1, {}
        self.failures.reset(starts)
        for episode, start in enumerate(starts):
            self._play(PlayRequest(self.batch, episode, start, ()))
        openings = self.receive(wait=True)
        return [openings[episode] for episode in range(len(starts))]

    def send(self, episode: int, said: str) -> None:
        """Answer a turn at once."""
        self._play(PlayRequest(self.batch, episode, None, (said,)))

    def receive(self, *, wait: bool) -> dict[int, Any]:
        """The answers that came since the last call.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        ready, self.ready = self.ready, {}
        self.failures.count(
            {n: each for n, each in ready.items() if isinstance(each, FailedEpisode)}
        )
        return ready

    def single_process_pool(self) -> EpisodePool:
        """The same again."""
        stage = self.stage
        return InProcessEpisodes(
            stage.environment, max_observation_chars=stage.max_chars, max_failed_frac=1.0
        )

    def close(self) -> None:
        """End every episode."""
        self.stage.close()

    def _play(self, asked: PlayRequest) -> None:
        outer = get_rng_states()
        try:
            self.ready[asked.episode] = self.stage.play(asked)
            self.stage.switch_to(None)
        finally:
            set_rng_states(outer, 0)
