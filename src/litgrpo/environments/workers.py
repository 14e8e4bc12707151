"""Episodes in parallel worker processes, which are killed if a step hangs."""

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
from litgrpo.workers.pool import WorkerPool
from litgrpo.workers.process import MAX_LOADING, Worker

MAX_WORKERS = 64
OnTimeout = Literal["fail", "reply"]
TIMEOUT_REPLY = "The answer took too long and was given up."
HANDLER = "litgrpo.environments.episode:handle_request"


@dataclass(eq=False)
class RunningEpisode:
    """State of an episode in the parent process, sufficient to replay it in another worker.

    Args:
        number: index in its batch.
        start: row, seed and key.
        process: slot of the worker that plays it.
        actions: all turns, the key of the response log.
        stepped: turns to replay, without those that timed out.
        held_by: worker that has the episode in memory.
        num_lost: workers lost while playing the current turn.
    """

    number: int
    start: EpisodeStart
    process: WorkerSlot
    actions: list[str] = field(default_factory=list)
    stepped: list[str] = field(default_factory=list)
    held_by: Worker | None = None
    num_lost: int = 0


@dataclass(eq=False)
class WorkerSlot:
    """A worker, replaced when it is lost, and the queue of its episodes."""

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
    """Return a pool of worker processes, or with `num_workers=0` one in this process."""
    if num_workers == 0:
        require(
            response_log is None,
            "model.episode.record_responses needs worker processes; model.episode.num_workers is "
            "0. Leave it out.",
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
    """Plays episodes in worker processes, one per episode up to a limit.

    If a step times out, crashes or floods its output, its process is killed and replaced. The other
    episodes of that process are reset with their seeds, and their turns are replayed.

    Args:
        environment: prototype; every episode is played by a copy.
        timeout_s: time limit of `reset` and `step`, not counting time spent waiting for a CPU.
        on_timeout: `fail` excludes an episode whose step times out; `reply` returns `late` to the
            policy, as if the turn had not reached the environment.
        num_workers: maximal number of processes; default: one per episode, up to 64.
        max_observation_chars: length limit of an observation; longer ones are cut in the middle.
        max_failed_frac: allowed fraction of failed episodes per batch; more stop the run.
        late: observation after a timeout, with `on_timeout: reply`.
        response_log: log for tools that are not deterministic.
        pool: pool of another owner, whose launcher has loaded the environment; stays open.

    Example::

        pool = EpisodeWorkers(NumberGame(), num_workers=8, timeout_s=2.0)
        openings = pool.reset(starts)
        pool.send(0, "7")
        results = pool.receive(wait=True)  # {0: StepResult(...)}
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
        late: str | list[Message] = TIMEOUT_REPLY,
        response_log: ResponseLog | None = None,
        pool: WorkerPool | None = None,
    ) -> None:
        above("model.episode.timeout_s", timeout_s, 0)
        one_of("model.episode.on_timeout", on_timeout, ("fail", "reply"))
        at_least("model.episode.num_workers", num_workers, 1)
        at_least("model.episode.max_observation_chars", max_observation_chars, 1)
        self.objects = (environment, max_observation_chars)
        self.timeout_s = timeout_s
        self.reply = StepResult(late) if on_timeout == "reply" else None
        self.most_workers = num_workers or MAX_WORKERS
        self.response_log = response_log
        self.failures = FailureCounter(max_failed_frac)
        self.is_guest = pool is not None
        self.pool = pool or WorkerPool(self.most_workers, HANDLER)
        self.batch = 0
        self.processes: list[WorkerSlot] = []
        self.playing: list[RunningEpisode] = []
        self.ready: dict[int, Any] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        """Reset one episode for each start; earlier episodes end.

        Returns:
            Addition of each episode to its prompt.

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
            self._look_up_or_queue(episode)
        openings: dict[int, Any] = {}
        while len(openings) < len(starts):
            openings |= self.receive(wait=True)
        return [openings[n] for n in range(len(starts))]

    def send(self, episode: int, action: str) -> None:
        """Send a turn to an episode; `receive` returns the result."""
        playing = self.playing[episode]
        playing.actions.append(action)
        playing.stepped.append(action)
        playing.num_lost = 0
        self._look_up_or_queue(playing)

    def receive(self, *, wait: bool) -> dict[int, Any]:
        """Return the results that arrived since the last call.

        Raises:
            EnvironmentFailure: too many episodes failed.
        """
        while True:
            # Output, or the loss of a worker whose turn is retried, also ends the pool's wait.
            blocking = wait and not self.ready
            for worker, answer, _ in self.pool.receive(wait=blocking):
                self._handle_reply(worker, answer)
            if self.ready or not blocking or not any(each.playing for each in self.processes):
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
        """Kill all workers; they are started again when needed."""
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
        """Load the environment in the launcher and start the first worker.

        Raises:
            ValueError: the environment cannot be pickled, or loading it broke the process.
        """
        troubles = self.pool.register({"environment": self.objects})
        if troubles:
            raise ValueError(
                f"the environment cannot be sent to worker processes ({troubles['environment']})."
                " Give it only what can be pickled, and open files, locks and connections in reset;"
                " or set model.episode.num_workers: 0, which plays episodes in this process, where "
                "a hang cannot be stopped."
            )
        if not self.processes:
            first = self.pool.take()
            self.processes = [WorkerSlot(first)]
            if self.pool.launcher is not None and not self.pool.launcher.preloads:
                self.most_workers = min(self.most_workers, MAX_LOADING)
        if self.pool.failed:
            raise ValueError(f"the environment's module {self.pool.failed['environment']}")

    def _look_up_or_queue(self, episode: RunningEpisode) -> None:
        """Take the result from the response log, or queue the turn for its worker."""
        recorded = None
        if self.response_log is not None:
            recorded = self.response_log.find(episode.start, tuple(episode.actions))
        if recorded is None:
            episode.process.waiting.append(episode)
            self._ask_next(episode.process)
            return
        episode.held_by = (
            None  # its state in memory misses this turn: replay it before the next one
        )
        if recorded == self.reply:  # the turn timed out, so the environment never saw it
            episode.stepped.pop()
        self.ready[episode.number] = recorded

    def _ask_next(self, process: WorkerSlot) -> None:
        """Send the next queued turn if the worker is idle; replace a lost worker."""
        if process.playing is not None or not process.waiting:
            return
        episode = process.playing = process.waiting.popleft()
        if process.worker not in self.pool.workers:
            process.worker = self.pool.launch()
        worker = process.worker
        if worker is None:
            (error,) = self.pool.failed.values()
            raise ValueError(f"the environment's module {error}")
        # Another worker must reset the episode and replay all turns. Results depend only
        # on row, seed and turns, so the replay reaches the same state. Each call has `timeout_s`.
        if episode.held_by is worker:
            start, turns = None, tuple(episode.stepped[-1:])
            limit_s = self.timeout_s * len(turns)
        else:
            start, turns = episode.start, tuple(episode.stepped)
            limit_s = self.timeout_s * (1 + len(turns))
        episode.held_by = worker
        self.pool.send(worker, PlayRequest(self.batch, episode.number, start, turns), limit_s)

    def _handle_reply(self, worker: Worker, answer: Any) -> None:
        """Record a result, or retry the turn if its worker was lost for the first time."""
        process = next(each for each in self.processes if each.worker is worker)
        episode, process.playing = process.playing, None
        assert episode is not None
        if isinstance(answer, WorkerError):
            answer = self._handle_loss(episode, answer)
        if answer is None:
            process.waiting.appendleft(episode)  # retry first, in a new worker
        else:
            if self.response_log is not None:
                answer = self.response_log.save(episode.start, tuple(episode.actions), answer)
            self.ready[episode.number] = answer
        self._ask_next(process)

    def _handle_loss(
        self, episode: RunningEpisode, error: WorkerError
    ) -> StepResult | FailedEpisode | None:
        """Return the result after the loss of a worker; None retries the turn.

        A crash is retried once, because something outside the episode may have caused it, such as
        the OOM killer. A timeout is not: the retry would only take as long again.
        """
        episode.num_lost += 1
        self.failures.record_details(episode.number, error)
        if error.cause == TIMEOUT and episode.actions and self.reply is not None:
            episode.stepped.pop()
            return self.reply
        if error.cause == TIMEOUT:
            return FailedEpisode(f"timed out after {self.timeout_s:g} s")
        return FailedEpisode(f"{error.cause}, twice") if episode.num_lost > 1 else None
