"""Distribute weights and sample requests over several vLLM servers, with retries."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

from litgrpo.distributed.collectives import all_gather_object, broadcast_object
from litgrpo.distributed.messages import log, rank
from litgrpo.models.policy import Policy
from litgrpo.rollout.servers.served import SampleChannel, SampleRequest, SampleResult
from litgrpo.rollout.servers.vllm_client import (
    Server,
    ServerFailure,
    ServersUnavailable,
    ServerUnavailable,
    StaleWeights,
)
from litgrpo.rollout.servers.weight_transfer import WeightSender, WeightsRejected

Result = TypeVar("Result")
# Seconds between two attempts if all servers are unavailable.
PAUSE_S = 0.5
# Seconds during which an unavailable server gets no requests, if others are available.
UNAVAILABLE_S = 5.0


class ServerRing:
    """Servers of the same model, of which some may be unavailable.

    Args:
        servers: one or more.
        wait_s: seconds of retries if no server is available.
        option: option that has `wait_s`, for messages.

    Example::

        ring = ServerRing([Server("http://10.0.0.2:8000")], wait_s=300.0, option="model.engine")
        ring.ask(0, threading.Event(), lambda server: server.version)
    """

    def __init__(self, servers: list[Server], wait_s: float, option: str) -> None:
        self.servers, self.wait_s, self.option = servers, wait_s, option
        # {url: time.monotonic() until which the server gets no requests}
        self.unavailable: dict[str, float] = {}

    def ask(self, prompt: int, stop: threading.Event, send: Callable[[Server], Result]) -> Result:
        """Return the result of a request, from any server that is available.

        Args:
            prompt: number of a prompt; see `_choose`.
            stop: set if the result is not needed any more.
            send: sends the request to a server; repeated after `ServerUnavailable`.

        Raises:
            ServersUnavailable: no server responded for `wait_s` seconds.
        """
        timer = RetryTimer(self.wait_s, stop, self.option)
        while True:
            server = self._choose(prompt)
            try:
                result = send(server)
            except ServerUnavailable as error:
                self._mark_unavailable(server, error)
                if all(map(self._is_unavailable, self.servers)):
                    timer.wait(", ".join(self.unavailable))
            else:
                self.unavailable.pop(server.url, None)
                return result

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


class ServerPool(ServerRing):
    """Servers that hold the same weights, which they receive from the trainer.

    Args:
        servers: one or more.
        sender: sends the weights.
        logprobs_mode: `--logprobs-mode` that servers must run with.
        wait_s: seconds of retries if no server is available.
        retries: how often a server with stale weights gets them again, per row, and how often a
            server that fails to load weights gets them again.
    """

    def __init__(
        self,
        servers: list[Server],
        sender: WeightSender,
        logprobs_mode: str,
        wait_s: float,
        retries: int,
    ) -> None:
        super().__init__(servers, wait_s, "model.engine")
        self.sender, self.logprobs_mode, self.retries = sender, logprobs_mode, retries
        self.unchecked = {server.url for server in servers}
        self.version = ""
        self.in_flight = False  # rows may be sampled by several versions
        self.run, self.num_published = "", 0
        self.rejected = Counter[str]()  # failures to load the weights in a row, by URL
        self.locks = {server.url: threading.Lock() for server in servers}

    def publish(self, policy: Policy, number: int, *, in_flight: bool = False) -> None:
        """Send the policy's weights to all servers; every rank must call this.

        An unavailable server gets them once it responds again.

        Args:
            policy: policy with the new weights.
            number: number of finished iterations.
            in_flight: rows that are being sampled continue with the new weights.

        Raises:
            ServerFailure: no server accepts them.
        """
        # The version distinguishes runs that share a server, and publishes of the same iteration.
        # The collective also keeps rank 0 from sending while other ranks sample with old weights.
        self.run = all_gather_object(self.run or uuid.uuid4().hex[:12])[0]
        self.num_published += 1
        version = f"{number}-{self.num_published}-{self.run}"
        failure: ServerFailure | None = None
        with ExitStack() as locks:  # a server that restarts now needs weights and version together
            for lock in self.locks.values():
                locks.enter_context(lock)
            self.sender.prepare(policy, version)
            self.version, self.in_flight = version, in_flight
        if rank() == 0:
            try:
                self._send_to_all()
            except ServerFailure as error:
                failure = error
        self.sender.finish_publish()
        # All ranks raise together; otherwise the others would wait for rank 0 in a collective.
        self.sender.location, failure = broadcast_object((self.sender.location, failure))
        if failure is not None:
            raise failure

    def _send_to_all(self) -> None:
        timer = RetryTimer(self.wait_s, threading.Event(), self.option)
        with ThreadPoolExecutor(len(self.servers)) as threads:
            while not any(threads.map(self._try_update, self.servers)):
                timer.wait(", ".join(self.unavailable))

    def _try_update(self, server: Server) -> bool:
        """Update a server's weights, and return True if it is available; see `update`."""
        try:
            self.update(server)
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
            ServerFailure: it fails to load them again and again.
        """
        with self.locks[server.url]:
            if server.url in self.unchecked:
                server.check_logprobs(self.logprobs_mode)
                self.unchecked.discard(server.url)
            try:
                updated = self.sender.update(server, self.version, in_flight=self.in_flight)
            except WeightsRejected as error:
                self.rejected[server.url] += 1
                if self.rejected[server.url] <= self.retries:
                    raise
                raise ServerFailure(
                    f"{error}: the server failed to load the policy's weights "
                    f"{self.rejected[server.url]} times. Its log has the cause. Usually it serves "
                    "another model than the one that is trained: start it with that of "
                    "model.pretrained. Or it is on another host and does not see the folder of "
                    "the weights: set model.engine.weight_transfer.path to one that both see."
                ) from error
            self.rejected[server.url] = 0
            if updated:
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
        updates = 0

        def complete(server: Server) -> SampleResult:
            nonlocal updates
            while True:
                try:
                    return server.complete(
                        request,
                        self.version,
                        in_flight=self.in_flight,
                        is_adapter=self.sender.is_adapter,
                    )
                except StaleWeights as stale:
                    updates += 1
                    if updates > self.retries:
                        raise ServerFailure(
                            f"{server.url} samples with weights of version {stale.found}, although "
                            f"version {self.version} was sent {updates} times. None of its tokens "
                            "were trained on. Restart the server."
                        ) from stale
                    self.update(server, f" had weights of version {stale.found}; sent again")

        return self.ask(request.prompt, stop, complete)


class RetryTimer:
    """Pauses between retries, up to a time limit.

    Args:
        limit_s: seconds of retries since the first call of `wait`.
        stop: ends a pause early.
        option: option that has the limit as `wait_s`.
    """

    def __init__(self, limit_s: float, stop: threading.Event, option: str) -> None:
        self.limit_s, self.stop, self.option = limit_s, stop, option
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
                f"({self.option}.wait_s is {self.limit_s:g}). Restart a server, then resume with "
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
