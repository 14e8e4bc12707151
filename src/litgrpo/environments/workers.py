"""Episodes in worker processes, each in its own, which is killed if a step hangs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from litgrpo.arguments import above, at_least, one_of
from litgrpo.environments.base import (
    Environment,
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    Message,
    StepResult,
)
from litgrpo.environments.episode import EpisodePlayer, InProcessEpisodes, seed_rngs
from litgrpo.workers.failures import TIMEOUT, WorkerError
from litgrpo.workers.process import Send, Worker, WorkerPool, receive

MAX_WORKERS = 64
OnTimeout = Literal["fail", "reply"]
TIMEOUT_REPLY = "The answer took too long and was given up."


class PlayRequest(NamedTuple):
    """Request to a worker; see `EpisodePlayer.play`."""

    start: EpisodeStart | None
    actions: tuple[str, ...]


def answer_request(player: EpisodePlayer, request: PlayRequest, send: Send) -> Any:
    """Answer a request in a worker; a new episode seeds the global random generators."""
    if request.start is not None:
        seed_rngs(request.start.seed)
    return player.play(*request)


@dataclass(eq=False)
class RunningEpisode:
    """An episode."""

    number: int  # index in its batch
    start: EpisodeStart  # row, seed and key
    # turns that the environment has received, or is to receive
    actions: list[str] = field(default_factory=list)
    # process that plays it; None: it waits for one, or has not had its first turn
    worker: Worker | None = None


def episode_pool(
    environment: Environment,
    *,
    num_workers: int | None = None,
    timeout_s: float = 10.0,
    on_timeout: OnTimeout = "fail",
    max_observation_chars: int | None = None,
) -> EpisodePool:
    """Return a pool of worker processes, or with `num_workers=0` one in this process."""
    if num_workers == 0:
        return InProcessEpisodes(environment, max_observation_chars=max_observation_chars)
    return EpisodeWorkers(
        environment,
        num_workers=num_workers,
        timeout_s=timeout_s,
        on_timeout=on_timeout,
        max_observation_chars=max_observation_chars,
    )


def start_pool(function: Callable[..., Any], size: int, name: str, advice: str) -> WorkerPool:
    """Return worker processes that call a function, after loading it in one of them.

    Args:
        function: can be pickled.
        size: maximal number of processes.
        name: what the function runs, for errors.
        advice: how to give it only what can be pickled.

    Raises:
        ValueError: it cannot be sent to a process, or loaded there.
    """
    try:
        pool = WorkerPool(function, size)
        pool.load()
    except WorkerError as error:
        raise ValueError(f"the {name}'s module {error}") from error
    except Exception as error:  # pickling runs the user's own code
        raise ValueError(
            f"the {name} cannot be sent to worker processes ({type(error).__name__}: {error}). "
            f"Give it only what can be pickled, and {advice}"
        ) from error
    return pool


def fail_episode(error: WorkerError, timeout_s: float) -> FailedEpisode:
    """Return the episode that ended with an error of its process, which had a time limit."""
    is_late = error.cause == TIMEOUT
    reason = f"timed out after {timeout_s:g} s" if is_late else error.cause
    return FailedEpisode(reason, str(error))


class EpisodeWorkers(EpisodePool):
    """Plays episodes in worker processes, at most one at a time in each."""

    # If a step times out or crashes, its process is killed, and its episode fails; with
    # `on_timeout="reply"`, the policy gets `late`, as if the turn had not reached the environment,
    # which plays the turns before it again. If there are more episodes than processes, the rest
    # wait until others are over. They are reset once more then, because what `reset` adds to the
    # prompts is needed before the first turn of any.

    def __init__(
        self,
        environment: Environment,
        *,
        timeout_s: float = 10.0,
        on_timeout: OnTimeout = "fail",
        num_workers: int | None = None,
        max_observation_chars: int | None = None,
        late: str | list[Message] = TIMEOUT_REPLY,
    ) -> None:
        above("model.episode.timeout_s", timeout_s, 0)
        one_of("model.episode.on_timeout", on_timeout, ("fail", "reply"))
        at_least("model.episode.num_workers", num_workers, 1)
        at_least("model.episode.max_observation_chars", max_observation_chars, 1)
        self.player = EpisodePlayer(environment, max_observation_chars)
        self.timeout_s = timeout_s
        self.reply = StepResult(late) if on_timeout == "reply" else None
        self.max_parallel: int = num_workers or MAX_WORKERS
        self.pool: WorkerPool | None = None
        self._clear()

    def _clear(self) -> None:
        self.episodes: list[RunningEpisode] = []
        self.waiting: deque[RunningEpisode] = deque()  # for a process
        self.stepping: dict[Worker, RunningEpisode] = {}
        self.ready: dict[int, Any] = {}

    def reset(self, starts: Sequence[EpisodeStart]) -> list[str | list[Message] | FailedEpisode]:
        pool = self._start_pool()
        pool.take_all_back()
        self._clear()
        self.episodes = [RunningEpisode(n, start) for n, start in enumerate(starts)]
        # The first keep their process. It would be taken from them if the rest came later.
        first, rest = self.episodes[: self.max_parallel], self.episodes[self.max_parallel :]
        self.waiting.extend([*rest, *first])
        self._assign()
        openings: dict[int, Any] = {}
        while len(openings) < len(starts):
            openings |= self.receive(wait=True)
        return [openings[n] for n in range(len(starts))]

    def send(self, episode: int, action: str) -> None:
        playing = self.episodes[episode]
        playing.actions.append(action)
        if playing.worker is None:
            self.waiting.append(playing)
            self._assign()
        else:
            self._ask(playing, PlayRequest(None, (action,)))

    def end(self, episode: int) -> None:
        """End an episode: another one may have its process."""
        worker, self.episodes[episode].worker = self.episodes[episode].worker, None
        if worker is not None:
            assert self.pool is not None
            self.pool.give_back(worker)
            self._assign()

    def receive(self, *, wait: bool) -> dict[int, Any]:
        while True:
            blocking = wait and not self.ready
            for worker, answer, _ in receive(self.stepping, wait=blocking):
                self._record(self.stepping.pop(worker), answer)
            if not blocking or self.ready or not self.stepping:
                break
        if wait and not self.ready and self.waiting:
            raise ValueError(
                f"model.episode.num_workers is {self.max_parallel}, but the model decodes all rows "
                "of a group together: each of them needs a process. Set it to model.group_size or "
                "more."
            )
        ready, self.ready = self.ready, {}
        return ready

    def close(self) -> None:
        """Kill all workers; they are started again when needed."""
        if self.pool is not None:
            self.pool.close()
        self.pool = None
        self._clear()

    def _start_pool(self) -> WorkerPool:
        """Return the processes; at first, load the environment in one."""
        if self.pool is None:
            self.pool = start_pool(
                partial(answer_request, self.player),
                self.max_parallel,
                "environment",
                "open files, locks and connections in reset; or set model.episode.num_workers: 0, "
                "which plays episodes in this process, where a hang cannot be stopped.",
            )
            self.max_parallel = self.pool.size
        return self.pool

    def _assign(self) -> None:
        """Give processes to the episodes that wait for one."""
        assert self.pool is not None
        while self.waiting and (worker := self.pool.take()) is not None:
            episode = self.waiting.popleft()
            episode.worker = worker
            self._ask(episode, PlayRequest(episode.start, tuple(episode.actions)))

    def _ask(self, episode: RunningEpisode, request: PlayRequest) -> None:
        assert episode.worker is not None
        self.stepping[episode.worker] = episode
        calls = len(request.actions) + (request.start is not None)
        episode.worker.send(request, self.timeout_s * calls)

    def _record(self, episode: RunningEpisode, answer: Any) -> None:
        """Keep the result of an episode, which leaves its process if it does not need it."""
        if isinstance(answer, WorkerError):
            if answer.cause == TIMEOUT and episode.actions and self.reply is not None:
                episode.actions.pop()
                answer = self.reply
            else:
                answer = fail_episode(answer, self.timeout_s)
        self.ready[episode.number] = answer
        assert episode.worker is not None
        is_over = isinstance(answer, FailedEpisode) or getattr(answer, "done", False)
        has_no_turn = not episode.actions and episode.number >= self.max_parallel
        if is_over or has_no_turn or episode.worker.is_lost:
            self.end(episode.number)
