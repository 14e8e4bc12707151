"""Episodes in the training process, one call after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litgrpo.environments.base import Environment, EpisodePool, Failed, Message, Start
from litgrpo.environments.episode import Stage, Turns, generators, put_generators
from litgrpo.environments.failures import Failures


class EpisodesHere(EpisodePool):
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
        self.stage = Stage(environment, max_observation_chars, (Exception, SystemExit))
        self.failures = Failures(max_failed_frac)
        self.batch = 0
        self.ready: dict[int, Any] = {}

    def begin(self, starts: Sequence[Start]) -> list[str | list[Message] | Failed]:
        """Reset one episode for each start; those before are over.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        self.batch, self.ready = self.batch + 1, {}
        self.failures.begin(starts)
        for episode, start in enumerate(starts):
            self._play(Turns(self.batch, episode, start, ()))
        openings = self.heard(wait=True)
        return [openings[episode] for episode in range(len(starts))]

    def say(self, episode: int, said: str) -> None:
        """Answer a turn at once."""
        self._play(Turns(self.batch, episode, None, (said,)))

    def heard(self, *, wait: bool) -> dict[int, Any]:
        """The answers that came since the last call.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        ready, self.ready = self.ready, {}
        self.failures.count({n: each for n, each in ready.items() if isinstance(each, Failed)})
        return ready

    def alone(self) -> EpisodePool:
        """The same again."""
        stage = self.stage
        return EpisodesHere(
            stage.environment, max_observation_chars=stage.max_chars, max_failed_frac=1.0
        )

    def close(self) -> None:
        """End every episode."""
        self.stage.close()

    def _play(self, asked: Turns) -> None:
        outer = generators()
        try:
            self.ready[asked.episode] = self.stage.play(asked)
            self.stage.switch_to(None)
        finally:
            put_generators(outer, 0)
