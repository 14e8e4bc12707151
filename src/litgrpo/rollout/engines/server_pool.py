"""Distribute weights and sample requests over several vLLM servers, with retries."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from litgrpo.distributed.collectives import broadcast_object
from litgrpo.distributed.messages import log, rank
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.served import SampleChannel, SampleRequest, SampleResult
from litgrpo.rollout.engines.vllm_client import (
    Server,
    ServerFailure,
    ServersUnavailable,
    ServerUnavailable,
    StaleWeights,
)
from litgrpo.rollout.engines.weight_transfer import WeightSender

# Seconds between two attempts if all servers are unavailable.
PAUSE_S = 0.5
# Seconds during which an unavailable server gets no requests, if others are available.
UNAVAILABLE_S = 5.0


class ServerPool:
    """Servers that hold the same weights.

    Args:
        servers: one or more.
        sender: sends the weights.
        logprobs_mode: `--logprobs-mode` that servers must run with.
        wait_s: seconds of retries if no server is available.
        retries: how often a server with stale weights gets them again, per row.
    """

    def __init__(
        self,
        servers: list[Server],
        sender: WeightSender,
        logprobs_mode: str,
        wait_s: float,
        retries: int,
    ) -> None:
        self.servers, self.sender, self.logprobs_mode = servers, sender, logprobs_mode
        self.unchecked = {server.url for server in servers}
        self.wait_s, self.retries = wait_s, retries
        self.version = ""
        # {url: time.monotonic() until which the server gets no requests}
        self.unavailable: dict[str, float] = {}
        self.locks = {server.url: threading.Lock() for server in servers}

    def publish(self, policy: Policy, number: int) -> None:
        """Send the policy's weights to all servers; every rank must call this.

        An unavailable server gets them once it responds again.

        Args:
            policy: policy with the new weights.
            number: number of finished iterations.

        Raises:
            ServerFailure: no server accepts them.
        """
        # The suffix distinguishes runs that share a server, and repeated publishes of an iteration.
        version = broadcast_object(f"{number}-{uuid.uuid4().hex[:12]}")
        failure: ServerFailure | None = None
        self.sender.prepare(policy, version)
        self.version = version
        if rank() == 0:
            try:
                self._send_to_all()
            except ServerFailure as error:
                failure = error
        # All ranks raise together; otherwise the others would wait for rank 0 in a collective.
        self.sender.location, failure = broadcast_object((self.sender.location, failure))
        if failure is not None:
            raise failure

    def _send_to_all(self) -> None:
        timer = RetryTimer(self.wait_s, threading.Event())
        with ThreadPoolExecutor(len(self.servers)) as threads:
            while not any(threads.map(self._try_update, self.servers)):
                timer.wait(", ".join(self.unavailable))

    def _try_update(self, server: Server, reason: str = "") -> bool:
        """Update a server's weights, and return True if it is available; see `update`."""
        try:
            self.update(server, reason)
        except ServerUnavailable as error:
            self._mark_unavailable(server, error)
            return False
        return True

    def update(self, server: Server, reason: str = "") -> None:
        """Send the current weights to a server, if it has others.

        Args:
            server: a server of this pool.
            reason: logged as a warning if weights are sent.

        Raises:
            ServerUnavailable: the server cannot receive them now.
        """
        with self.locks[server.url]:
            if server.url in self.unchecked:
                server.check_logprobs(self.logprobs_mode)
                self.unchecked.discard(server.url)
            if server.version != self.version:
                with server.updating_weights(self.version):
                    self.sender.send(server)
                log.log(logging.WARNING if reason else logging.DEBUG, "%s%s", server.url, reason)
            self.unavailable.pop(server.url, None)

    def sample(self, request: SampleRequest, stop: threading.Event) -> SampleResult:
        """Return the result of a request, from any server that has the current weights.

        Args:
            request: request for a turn of a row.
            stop: set if the result is not needed any more.

        Raises:
            ServerFailure: no server responded for `wait_s` seconds, or one keeps stale weights.
        """
        timer, updates = RetryTimer(self.wait_s, stop), 0
        while True:
            server = self._choose(request.prompt)
            try:
                return server.complete(request, self.version)
            except StaleWeights as stale:
                updates += 1
                if updates > self.retries:
                    raise ServerFailure(
                        f"{server.url} samples with weights of version {stale.found}, although "
                        f"version {self.version} was sent {updates} times. None of its tokens were "
                        "trained on. Restart the server."
                    ) from stale
                self._try_update(server, f" had weights of version {stale.found}; sent again")
            except ServerUnavailable as error:
                self._mark_unavailable(server, error)
                if all(map(self._is_unavailable, self.servers)):
                    timer.wait(", ".join(self.unavailable))

    def _choose(self, prompt: int) -> Server:
        """Return the server of a prompt, or the next one that is not marked as unavailable.

        The rows of a group share a server, because its prefix cache then holds their prompt.
        """
        first = prompt % len(self.servers)
        ring = self.servers[first:] + self.servers[:first]
        return min(ring, key=self._is_unavailable)

    def _is_unavailable(self, server: Server) -> bool:
        return self.unavailable.get(server.url, 0.0) > time.monotonic()

    def _mark_unavailable(self, server: Server, error: ServerUnavailable) -> None:
        if server.url not in self.unavailable:
            log.warning("vLLM server is unavailable: %s", error)
        self.unavailable[server.url] = time.monotonic() + UNAVAILABLE_S


class RetryTimer:
    """Pauses between retries, up to a time limit.

    Args:
        limit_s: seconds of retries since the first call of `wait`.
        stop: ends a pause early.
    """

    def __init__(self, limit_s: float, stop: threading.Event) -> None:
        self.limit_s, self.stop = limit_s, stop
        self.began = math.inf

    def wait(self, urls: str) -> None:
        """Pause before the next attempt.

        Args:
            urls: unavailable servers, for the message.

        Raises:
            ServersUnavailable: the time limit has passed, or `stop` was set.
        """
        now = time.monotonic()
        self.began = min(now, self.began)
        if now - self.began >= self.limit_s or self.stop.wait(PAUSE_S):
            raise ServersUnavailable(
                f"No vLLM server responds: {urls} unavailable for {now - self.began:.0f} s "
                f"(model.engine.wait_s is {self.limit_s:g}). Restart a server, then resume with "
                "--auto_resume true; this rollout was not trained on."
            )


class ServerChannel(SampleChannel):
    """Sends requests to a server pool from threads.

    Args:
        pool: servers that sample.
        max_threads: maximal number of requests at the same time.
    """

    def __init__(self, pool: ServerPool, max_threads: int) -> None:
        self.pool, self.stop = pool, threading.Event()
        self.threads = ThreadPoolExecutor(max_threads, thread_name_prefix="litgrpo-requests")
        self.done: queue.SimpleQueue[tuple[int, Future[SampleResult]]] = queue.SimpleQueue()

    def __enter__(self) -> ServerChannel:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel requests whose results are not needed any more, without waiting for them."""
        self.stop.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def put(self, requests: Sequence[SampleRequest]) -> None:
        """See `SampleChannel.put`."""
        for request in requests:
            future = self.threads.submit(self.pool.sample, request, self.stop)
            future.add_done_callback(lambda done, row=request.row: self.done.put((row, done)))  # type: ignore[misc]

    def take(self, timeout_s: float | None) -> list[tuple[int, SampleResult]]:
        """See `SampleChannel.take`."""
        finished = []
        try:
            finished.append(self.done.get(timeout=timeout_s))
            while True:
                finished.append(self.done.get_nowait())
        except queue.Empty:
            return [(row, future.result()) for row, future in finished]
