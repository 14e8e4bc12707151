"""Worker processes that run agents, with a time limit between two calls."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from litgrpo.arguments import at_least
from litgrpo.environments.agent import Agent, AgentRequest, AgentResult, run_agent
from litgrpo.environments.base import FailedEpisode
from litgrpo.environments.workers import MAX_WORKERS, fail_episode, start_pool
from litgrpo.workers.failures import WorkerError
from litgrpo.workers.process import Worker, WorkerPool, receive


class AgentPool:
    """Runs an agent on many rows, one process per row up to a limit.

    Args:
        agent: the agent.
        timeout_s: seconds that it may take until its first call, between a reply and its next call,
            and after its last one.
        num_workers: maximal number of processes; default: one per row, up to 64.
    """

    def __init__(
        self, agent: Agent, *, timeout_s: float = 10.0, num_workers: int | None = None
    ) -> None:
        at_least("model.episode.num_workers", num_workers, 1)
        self.agent, self.timeout_s = agent, timeout_s
        self.size = num_workers or MAX_WORKERS
        self.pool: WorkerPool | None = None
        self.waiting: deque[tuple[int, AgentRequest]] = deque()
        self.running: dict[int, Worker] = {}
        self.left: dict[int, float] = {}  # seconds of the limits that are paused
        self.since: dict[int, float] = {}  # when a row's agent began to run without a call
        self.seconds: defaultdict[int, float] = defaultdict(float)  # for which it did so before

    def start(self, requests: Sequence[AgentRequest]) -> None:
        """Run the agent on some rows; agents of earlier rows are killed.

        Raises:
            ValueError: the agent cannot be sent to a process, or loaded there.
        """
        if self.pool is None:
            self.pool = start_pool(
                partial(run_agent, self.agent),
                self.size,
                "agent",
                "open connections in the function.",
            )
        self.pool.take_all_back()
        self.running = {}
        self.since, self.left, self.seconds = {}, {}, defaultdict(float)
        self.waiting = deque(enumerate(requests))
        self._launch()

    def receive(self) -> Mapping[int, AgentResult | FailedEpisode]:
        """Return {row: result} of the agents that ended since the last call; does not wait."""
        results: dict[int, AgentResult | FailedEpisode] = {}
        assert self.pool is not None
        row_of = {worker: row for row, worker in self.running.items()}
        for worker, answer, _ in receive(self.running.values(), wait=False):
            row = row_of[worker]
            del self.running[row]
            self.pool.give_back(worker)
            self._count_seconds(row, time.monotonic())
            failed = isinstance(answer, WorkerError)
            results[row] = fail_episode(answer, self.timeout_s) if failed else answer
        self._launch()
        return results

    def pause_limit(self, row: int, since: float) -> None:
        """Stop the time limit of an agent, whose call arrived at `time.monotonic() == since`."""
        worker = self.running.get(row)
        if worker is not None and worker.deadline < inf:
            self.left[row] = worker.deadline - since
            worker.deadline = inf
            self._count_seconds(row, since)

    def resume_limit(self, row: int) -> None:
        """Continue the time limit of an agent whose call was rejected, from where it stopped."""
        if row in self.running and row in self.left:
            self.since[row] = time.monotonic()
            self.running[row].deadline = self.since[row] + self.left.pop(row)

    def restart_limit(self, row: int) -> None:
        """Start the time limit of an agent, which has its reply."""
        if row in self.running:
            self.since[row] = time.monotonic()
            self.running[row].deadline = self.since[row] + self.timeout_s

    @property
    def is_done(self) -> bool:
        """True if all agents have ended."""
        return not (self.waiting or self.running)

    def close(self) -> None:
        """Kill all agents."""
        if self.pool is not None:
            self.pool.close()
        self.pool = None
        self.waiting, self.running = deque(), {}

    def _count_seconds(self, row: int, until: float) -> None:
        if row in self.since:
            self.seconds[row] += until - self.since.pop(row)

    def _launch(self) -> None:
        assert self.pool is not None
        while self.waiting and (worker := self.pool.take()) is not None:
            row, request = self.waiting.popleft()
            self.running[row], self.since[row] = worker, time.monotonic()
            worker.send(request, self.timeout_s)
