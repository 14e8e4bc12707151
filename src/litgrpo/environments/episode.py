"""Episodes played in the calling process; also used inside worker processes."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np  # imported here, so that its generator exists before the first seeding

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
    """Request to reset an episode, to continue it, or both.

    Args:
        batch: number of the batch; a new number ends the episodes of the previous one.
        episode: index in the batch.
        start: resets the episode; None continues it.
        actions: turns to step through. The result of the last is returned, or that of `reset`.

    Example:
        >>> PlayRequest(batch=1, episode=0, start=None, actions=("7",)).actions
        ('7',)
    """

    batch: int
    episode: int
    start: EpisodeStart | None
    actions: tuple[str, ...]


class EpisodePlayer:
    """Plays the episodes of one process, one call at a time.

    Each episode has separate states of the global generators of `random`, numpy and torch. They are
    seeded at its reset and restored before each of its steps. An episode that draws from them is
    therefore independent of the other episodes in its process.

    Args:
        environment: prototype; every episode is played by a copy.
        max_chars: length limit of an observation; longer ones are cut in the middle.
        caught: exceptions that fail the episode instead of propagating.

    Example:
        >>> from litgrpo.environments.examples import NumberGame
        >>> player = EpisodePlayer(NumberGame(maximum=1))
        >>> start = EpisodeStart({}, 0, (0, 0, 0, 0))
        >>> player.play(PlayRequest(0, 0, start, ("1",))).reward
        1.0
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
        self.current: int | None = None  # episode whose generator states are active

    def play(self, request: PlayRequest) -> Observation | StepResult | FailedEpisode:
        """Run a request; return the result of its last turn."""
        if request.batch != self.batch:
            self.close()
            self.batch = request.batch
        try:
            return self._play(request.episode, request.start, request.actions)
        except self.caught as error:
            return FailedEpisode(cause_of(error))

    def _play(
        self, episode: int, start: EpisodeStart | None, actions: tuple[str, ...]
    ) -> Observation | StepResult:
        result: Observation | StepResult = ""
        self.switch_to(episode if start is None else None)
        if start is not None:
            self._end(episode)
            self.seeds[episode], self.current = start.seed, episode
            seed_rngs(start.seed)
            # Copies: an environment may change its own attributes or the row.
            self.copies[episode] = copy.deepcopy(self.environment)
            opening = self.copies[episode].reset(copy.deepcopy(start.row), start.seed)
            result = shorten(check_observation(opening), self.max_chars)
        for action in actions:
            step = check_result(self.copies[episode].step(action))
            result = replace(step, observation=shorten(step.observation, self.max_chars))
        return result

    def switch_to(self, episode: int | None) -> None:
        """Save the generator states of the current episode and restore those of another."""
        if self.current == episode:
            return
        if self.current is not None:
            self.generators[self.current] = get_rng_states()
        if episode is not None:
            set_rng_states(self.generators[episode], self.seeds[episode])
        self.current = episode

    def _end(self, episode: int) -> None:
        """Close an episode's environment, if it has `close`."""
        environment = self.copies.pop(episode, None)
        if environment is not None and hasattr(environment, "close"):
            environment.close()

    def close(self) -> None:
        """End all episodes."""
        self.current = None
        for episode in list(self.copies):
            self._end(episode)


def handle_request(
    loaded: dict[str, Any], request: PlayRequest, send: Any
) -> Observation | StepResult | FailedEpisode:
    """Answer a request in a worker; see `workers.pool.Handler`."""
    # A worker answers many requests; the player keeps its episodes between them.
    if "player" not in loaded:
        loaded["player"] = EpisodePlayer(*loaded["environment"])
    player: EpisodePlayer = loaded["player"]
    return player.play(request)


def get_rng_states() -> Generators:
    """Return the states of the global generators of `random`, numpy and, if imported, torch."""
    states: Generators = {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
    return states


def set_rng_states(states: Generators, seed: int) -> None:
    """Restore generator states; seed torch if it was imported after they were saved."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    elif "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed % 2**63)


def seed_rngs(seed: int) -> None:
    """Seed the global generators of `random`, numpy and, if imported, torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(seed % 2**63)


def check_result(result: object) -> StepResult:
    """Return the value of `step` unchanged.

    Raises:
        TypeError, ValueError: it is not a `StepResult`, or its reward is not finite.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"step returned {type(result).__name__} instead of StepResult")
    check_observation(result.observation)
    if result.reward is not None and not isfinite(result.reward):
        raise ValueError(
            f"the reward of a turn is {result.reward}, expected a finite number or None"
        )
    return result


def check_observation(observation: object) -> Observation:
    """Return an observation unchanged.

    Raises:
        TypeError: it is neither a text nor a list of messages.
        UnicodeEncodeError: a text has half a surrogate pair, which no tokenizer accepts.
    """
    if isinstance(observation, str):
        observation.encode()
        return observation
    if isinstance(observation, list) and all(type(each) is dict for each in observation):
        for each in observation:
            str(each.get("content")).encode()
        return observation
    kind = type(observation).__name__
    raise TypeError(f"the environment returned {kind}, expected a text or a list of messages")


def shorten(observation: Observation, max_chars: int | None) -> Observation:
    """Cut texts longer than `max_chars` in the middle, and mark the cut.

    Beginning and end are kept, because results and errors are often at the end.

    Example:
        >>> shorten("abcdefghij", 4)
        'ab ... (6 characters left out) ... ij'
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
    first, last = (max_chars + 1) // 2, max_chars // 2
    left_out = len(text) - max_chars
    return f"{text[:first]} ... ({left_out} characters left out) ... {text[len(text) - last :]}"


class InProcessEpisodes(EpisodePool):
    """Plays episodes in this process: fastest for tools that take no time.

    An exception fails its episode, but a hang or a crash stops the run. The process's random
    generators are restored after each call.

    Args:
        environment: prototype; every episode is played by a copy.
        max_observation_chars: length limit of an observation; longer ones are cut in the middle.
        max_failed_frac: allowed fraction of failed episodes per batch; more stop the run.

    Example:
        >>> from litgrpo.environments.examples import NumberGame
        >>> pool = InProcessEpisodes(NumberGame(maximum=1))
        >>> pool.reset([EpisodeStart({}, 0, (0, 0, 0, 0))])
        ['']
        >>> pool.send(0, "1")
        >>> pool.receive(wait=True)[0].done
        True
    """

    def __init__(
        self,
        environment: Environment,
        *,
        max_observation_chars: int | None = None,
        max_failed_frac: float = 0.5,
    ) -> None:
        self.player = EpisodePlayer(environment, max_observation_chars, (Exception, SystemExit))
        self.failures = FailureCounter(max_failed_frac)
        self.batch = 0
        self.ready: dict[int, Any] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        """Reset one episode for each start; earlier episodes end.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        self.batch, self.ready = self.batch + 1, {}
        self.failures.reset(starts)
        for episode, start in enumerate(starts):
            self._play(PlayRequest(self.batch, episode, start, ()))
        openings = self.receive(wait=True)
        return [openings[episode] for episode in range(len(starts))]

    def send(self, episode: int, action: str) -> None:
        """Step an episode at once; see `EpisodePool.send`."""
        self._play(PlayRequest(self.batch, episode, None, (action,)))

    def receive(self, *, wait: bool) -> dict[int, Any]:
        """Return the results that arrived since the last call.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        ready, self.ready = self.ready, {}
        self.failures.count(
            {n: each for n, each in ready.items() if isinstance(each, FailedEpisode)}
        )
        return ready

    def single_process_pool(self) -> EpisodePool:
        """Return another pool of the same environment."""
        player = self.player
        return InProcessEpisodes(
            player.environment, max_observation_chars=player.max_chars, max_failed_frac=1.0
        )

    def close(self) -> None:
        """End all episodes."""
        self.player.close()

    def _play(self, request: PlayRequest) -> None:
        # Training draws from the same global generators; an episode must not advance them.
        outer = get_rng_states()
        try:
            self.ready[request.episode] = self.player.play(request)
            self.player.switch_to(None)
        finally:
            set_rng_states(outer, 0)
