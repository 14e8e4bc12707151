"""Episodes in this process, one step after the other: for tests, and environments that are fast."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from litgrpo.environments.interface import (
    Environment,
    EpisodePool,
    Failed,
    Heard,
    Message,
    Start,
)


class InProcessPool(EpisodePool):
    """Answers at once; an environment that hangs hangs the run.

    Args:
        environment: the pattern; every episode is played by a deep copy.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.episodes: list[Environment] = []
        self.answers: dict[int, Heard | Failed] = {}

    def begin(self, starts: Sequence[Start]) -> list[str | list[Message] | Failed]:
        """See `EpisodePool.begin`."""
        self.close()
        self.episodes = [copy.deepcopy(self.environment) for _ in starts]
        return [self._reset(*pair) for pair in zip(self.episodes, starts, strict=True)]

    def _reset(self, episode: Environment, start: Start) -> str | list[Message] | Failed:
        try:
            return episode.reset(dict(start.row), start.seed)
        except Exception as error:  # whatever a user's code raises
            return failed(error)

    def say(self, episode: int, said: str) -> None:
        """See `EpisodePool.say`."""
        try:
            heard = self.episodes[episode].step(said)
            right = isinstance(heard, Heard)
            wrong = Failed(f"step returned {type(heard).__name__}, not a Heard")
            self.answers[episode] = heard if right else wrong
        except Exception as error:  # whatever a user's code raises
            self.answers[episode] = failed(error)

    def heard(self, *, wait: bool) -> dict[int, Heard | Failed]:
        """See `EpisodePool.heard`."""
        answers, self.answers = self.answers, {}
        return answers

    def close(self) -> None:
        """See `EpisodePool.close`."""
        for episode in self.episodes:
            if "close" in dir(episode):
                episode.close()  # type: ignore[attr-defined]
        self.episodes, self.answers = [], {}


def failed(error: Exception) -> Failed:
    """One line that names an error."""
    text = " ".join(str(error).split())[:200]
    return Failed(f"{type(error).__name__}: {text}" if text else type(error).__name__)
