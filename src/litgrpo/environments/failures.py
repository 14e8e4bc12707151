"""Episodes that failed: counted, named, and too many of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from litgrpo.arguments import at_least, at_most
from litgrpo.environments.base import Failed, Start
from litgrpo.workers.failures import WorkerError

log = logging.getLogger(__name__)


class EnvironmentFailure(RuntimeError):
    """So many episodes failed that going on would train on few. The message is one line."""


class Failures:
    """Counts the episodes that failed, shows the first, stops the run where too many do.

    Args:
        max_failed_frac: share of the episodes of a batch that may fail.
    """

    def __init__(self, max_failed_frac: float) -> None:
        at_least("episode.max_failed_frac", max_failed_frac, 0)
        at_most("episode.max_failed_frac", max_failed_frac, 1)
        self.max_failed_frac = max_failed_frac
        self.reasons: Counter[str] = Counter()  # of the whole run
        self.starts: Sequence[Start] = ()
        self.failed: dict[int, str] = {}
        self.stories: dict[int, str] = {}

    def begin(self, starts: Sequence[Start]) -> None:
        """A new batch."""
        self.starts, self.failed, self.stories = starts, {}, {}

    def lost(self, episode: int, error: WorkerError) -> None:
        """Keep what a worker showed before it ended, such as where a step hung."""
        self.stories[episode] = str(error)

    def count(self, failed: Mapping[int, Failed]) -> None:
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
