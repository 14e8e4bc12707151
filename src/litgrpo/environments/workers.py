"""Episodes in worker processes that can be killed, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from litgrpo.arguments import above, at_least, one_of, require
from litgrpo.environments.base import (
    Environment,
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    FailureCounter,
    Message,
    StepResult,
)
from litgrpo.environments.episode import InProcessEpisodes, PlayRequest
from litgrpo.environments.response_log import ResponseLog
from litgrpo.workers.failures import TIMEOUT, WorkerError
from litgrpo.workers.pool import Worker, WorkerPool

MOST_WORKERS = 64
MOST_STARTED_ANEW = 4  # where a process has threads and cannot be forked
OnTimeout = Literal["fail", "reply"]
LATE = "The answer took too long and was given up."
HANDLER = "litgrpo.environments.episode:handle_request"


@dataclass(eq=False)
class RunningEpisode:
    """An episode as the run knows it.

    Args:
        number: in its batch.
        start: how it began.
        process: place of the process that plays it.
    """

    number: int
    start: EpisodeStart
    process: WorkerSlot
    said: list[str] = field(default_factory=list)  # everything, for the response_log
    stepped: list[str] = field(default_factory=list)  # without turns that were given up
    held_by: Worker | None = None  # the worker that has it in memory
    lost: int = 0  # workers that this turn has cost


@dataclass(eq=False)
class WorkerSlot:
    """A place for a worker, and the episodes that wait for it."""

    worker: Worker | None = None
    waiting: deque[RunningEpisode] = field(default_factory=deque)
    playing: RunningEpisode | None = None


def episode_pool(
    environment: Environment,
    *,
    num_workers: int | None = None,
    timeout_s: float = 10.0,
    on_timeout: OnTimeout = "fail",
    max_observation_chars: int | None = None,
    response_log: ResponseLog | None = None,
) -> EpisodePool:
    """Episodes in worker processes, or with `num_workers=0` in this one; see `EpisodeWorkers`."""
    if num_workers == 0:
        require(
            response_log is None,
            "episode.record_responses needs worker processes; episode.num_workers is 0. Leave it"
            " out.",
        )
        return InProcessEpisodes(environment, max_observation_chars=max_observation_chars)
    return EpisodeWorkers(
        environment,
        num_workers=num_workers,
        timeout_s=timeout_s,
        on_timeout=on_timeout,
        max_observation_chars=max_observation_chars,
        response_log=response_log,
    )


class EpisodeWorkers(EpisodePool):
    """Plays episodes in worker processes, one for each episode while there are enough.

    A step that takes too long, crashes or floods its output is ended with its process. The process
    is replaced; its episodes begin again from their seeds and repeat what was said in them.

    Args:
        environment: the pattern; every episode is played by a copy.
        timeout_s: seconds that `reset` or `step` may take, without waiting for a processor.
        on_timeout: what becomes of an episode whose step takes too long: `fail` gives its row up,
            `reply` answers with a fixed sentence, as if the turn had not reached the environment.
        num_workers: processes at most; default: one for each episode, at most 64.
        max_observation_chars: of a text that is heard; longer ones are cut in the middle.
        max_failed_frac: share of the episodes of a batch that may fail; more stop the run.
        late: what is heard by `on_timeout: reply`.
        response_log: of tools that are no functions of what was said.
        pool: another's, whose launcher has loaded the environment; it is left open.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_s: float = 10.0,
        on_timeout: OnTimeout = "fail",
        num_workers: int | None = None,
        max_observation_chars: int | None = None,
        max_failed_frac: float = 0.5,
        late: str | list[Message] = LATE,
        response_log: ResponseLog | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        above("episode.timeout_s", timeout_s, 0)
        one_of("episode.on_timeout", on_timeout, ("fail", "reply"))
        at_least("episode.num_workers", num_workers, 1)
        at_least("episode.max_observation_chars", max_observation_chars, 1)
        self.objects = (environment, max_observation_chars)
        self.timeout_s = timeout_s
        self.reply = StepResult(late) if on_timeout == "reply" else None
        self.most_workers = num_workers or MOST_WORKERS
        self.response_log = response_log
        self.failures = FailureCounter(max_failed_frac)
        self.is_guest = pool is not None
        self.pool = pool or WorkerPool(self.most_workers, HANDLER)
        self.batch = 0
        self.processes: list[WorkerSlot] = []
        self.playing: list[RunningEpisode] = []
        self.ready: dict[int, Any] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        """Reset one episode for each start; those before are over.

        Returns:
            What each adds to its prompt.

        Raises:
            ValueError: the environment cannot be sent to a process, or loaded there.
            EnvironmentFailure: too many episodes failed.
        """
        self.pool.kill_busy()
        self.batch, self.ready = self.batch + 1, {}
        self.failures.reset(starts)
        self._register()
        wanted = min(len(starts), self.most_workers)
        for process in self.processes:
            process.waiting, process.playing = deque(), None
        self.processes += [WorkerSlot() for _ in range(wanted - len(self.processes))]
        self.playing = [
            RunningEpisode(n, s, self.processes[n % wanted]) for n, s in enumerate(starts)
        ]
        for episode in self.playing:
            self._answer_or_ask(episode)
        openings: dict[int, Any] = {}
        while len(openings) < len(starts):
            openings |= self.receive(wait=True)
        return [openings[n] for n in range(len(starts))]

    def send(self, episode: int, said: str) -> None:
        """Hand over a turn; the answer comes by `heard`."""
        playing = self.playing[episode]
        playing.said.append(said)
        playing.stepped.append(said)
        playing.lost = 0
        self._answer_or_ask(playing)

    def receive(self, *, wait: bool) -> dict[int, Any]:
        """The answers that came since the last call.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        while True:
            patient = wait and not self.ready
            for worker, answer, _ in self.pool.receive(wait=patient):
                self._received(worker, answer)
            if self.ready or not patient or not any(each.playing for each in self.processes):
                break
        ready, self.ready = self.ready, {}
        self.failures.count(
            {n: each for n, each in ready.items() if isinstance(each, FailedEpisode)}
        )
        return ready

    def single_process_pool(self) -> EpisodePool | None:
        """Return a pool with one process, unless a response log marks the tools non-deterministic.

        The two pools share the launcher, which has imported the environment.
        """
        if self.response_log is not None:
            return None
        environment, most = self.objects
        return EpisodeWorkers(
            environment,
            timeout_s=self.timeout_s,
            num_workers=1,
            max_observation_chars=most,
            max_failed_frac=1.0,
            pool=self.pool,
        )

    def close(self) -> None:
        """End every episode and its process; they start again when needed."""
        if self.is_guest:
            mine = [each.worker for each in self.processes if each.worker in self.pool.workers]
            for worker in filter(None, mine):
                self.pool.kill(worker)
        else:
            self.pool.close()
        self.processes, self.playing, self.ready = [], [], {}
        if self.response_log is not None:
            self.response_log.close()

    def _register(self) -> None:
        """Have the environment loaded, and find out how many workers there may be."""
        troubles = self.pool.register({"environment": self.objects})
        if troubles:
            raise ValueError(
                f"the environment cannot be sent to worker processes ({troubles['environment']})."
                " Give it only what can be pickled, and open files, locks and connections in reset;"
                " or set episode.num_workers: 0, which plays episodes in this process, where a hang"
                " cannot be stopped."
            )
        if not self.processes:
            first = self.pool.launch()
            self.processes = [WorkerSlot(first)]
            if first is not None and first.launcher.used_up:
                self.most_workers = min(self.most_workers, MOST_STARTED_ANEW)
        if self.pool.failed:
            raise ValueError(f"the environment's module {self.pool.failed['environment']}")

    def _answer_or_ask(self, episode: RunningEpisode) -> None:
        """Answer from the response_log, or let the episode wait for its process."""
        known = self.response_log and self.response_log.find(episode.start, tuple(episode.said))
        if known is None:
            episode.process.waiting.append(episode)
            self._ask_next(episode.process)
            return
        episode.held_by = None  # what it has in memory lacks this turn
        if known == self.reply:
            episode.stepped.pop()
        self.ready[episode.number] = known

    def _ask_next(self, process: WorkerSlot) -> None:
        """Hand the turn of the next episode to a process that waits; start one if there is none."""
        if process.playing is not None or not process.waiting:
            return
        episode = process.playing = process.waiting.popleft()
        if process.worker not in self.pool.workers:
            process.worker = self.pool.launch()
        worker = process.worker
        if worker is None:
            (error,) = self.pool.failed.values()
            raise ValueError(f"the environment's module {error}")
        again = episode.held_by is not worker
        start = episode.start if again else None
        turns = tuple(episode.stepped if again else episode.stepped[-1:])
        limit_s = self.timeout_s * (again + len(turns))
        episode.held_by = worker
        self.pool.send(worker, PlayRequest(self.batch, episode.number, start, turns), limit_s)

    def _received(self, worker: Worker, answer: Any) -> None:
        """Enter an answer, or ask again where the worker was lost."""
        process = next(each for each in self.processes if each.worker is worker)
        episode, process.playing = process.playing, None
        assert episode is not None
        if isinstance(answer, WorkerError):
            answer = self._failure(episode, answer)
        if answer is None:
            process.waiting.appendleft(episode)
        else:
            if self.response_log is not None:
                answer = self.response_log.keep(episode.start, tuple(episode.said), answer)
            self.ready[episode.number] = answer
        self._ask_next(process)

    def _failure(
        self, episode: RunningEpisode, error: WorkerError
    ) -> StepResult | FailedEpisode | None:
        """What follows from the loss of a worker; None: the turn is asked again."""
        episode.lost += 1
        self.failures.lost(episode.number, error)
        if error.cause == TIMEOUT and episode.said and self.reply is not None:
            episode.stepped.pop()
            return self.reply
        if error.cause == TIMEOUT:
            return FailedEpisode(f"timed out after {self.timeout_s:g} s")
        return FailedEpisode(f"{error.cause}, twice") if episode.lost > 1 else None
