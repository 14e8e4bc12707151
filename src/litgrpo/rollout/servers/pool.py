"""Distribute weights and requests over several servers of the same model, with retries."""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from litgrpo.distributed.collectives import all_gather_object, broadcast_object
from litgrpo.distributed.messages import log, rank
from litgrpo.http import MalformedReply
from litgrpo.models.policy import Policy
from litgrpo.rollout.servers.client import (
    SampleRequest,
    SampleResult,
    ServerClient,
    ServerFailure,
    ServersUnavailable,
    ServerUnavailable,
    StaleWeights,
    Weights,
    WeightsRejected,
    check_result,
)
from litgrpo.rollout.servers.weight_transfer import WeightSender
from litgrpo.text.visible import excerpt

Result = TypeVar("Result")
# Seconds between two attempts if all servers are unavailable.
PAUSE_S = 0.5
# Seconds during which an unavailable server gets no requests, if others are available.
UNAVAILABLE_S = 5.0
# Version of weights that litgrpo set: iteration, number of the publish, run.
VERSION = re.compile(r"(\d{1,9})-(\d{1,9})-(\w+)", re.ASCII)


class Submit(Protocol):
    """Starts a request in a thread."""

    def __call__(self, prompt: int, send: Callable[[ServerClient], Result]) -> Future[Result]:
        """Return the future of the result; see `Servers.ask`."""


class Servers:
    """Servers of the same model, of which some may be unavailable.

    Args:
        clients: of the servers, one or more.
        wait_s: seconds of retries if no server is available.
        option: option that has `wait_s`, for messages.
        sender: exports the policy's weights; None: servers keep those that they were started with.
        retries: how often a server with stale weights gets them again, per row, and how often a
            server that fails to load weights gets them again.

    Example::

        servers = Servers([VllmServer("http://10.0.0.2:8000")], wait_s=300.0, option="model.engine")
        servers.ask(0, threading.Event(), lambda server: server.tokenize("6*7="))
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        wait_s: float,
        option: str,
        sender: WeightSender | None = None,
        retries: int = 0,
    ) -> None:
        self.clients, self.wait_s, self.option = list(clients), wait_s, option
        self.sender, self.retries = sender, retries
        # {url: time.monotonic() until which the server gets no requests}
        self.unavailable: dict[str, float] = {}
        self.unchecked = {client.url for client in clients}
        self.weights = Weights("")
        self.run, self.num_published = "", 0
        self.rejected = Counter[str]()  # failures to load the weights in a row, by URL
        self.locks = {client.url: threading.Lock() for client in clients}

    # --- requests ---

    @contextmanager
    def requests(self, max_threads: int) -> Iterator[Submit]:
        """Yield a function that sends requests from threads; at the end the rest is cancelled."""
        threads = ThreadPoolExecutor(max_threads, thread_name_prefix="litgrpo-requests")
        stop = threading.Event()
        try:
            yield lambda prompt, send: threads.submit(self.ask, prompt, stop, send)
        finally:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def ask(
        self, prompt: int, stop: threading.Event, send: Callable[[ServerClient], Result]
    ) -> Result:
        """Return the result of a request, from any server that is available.

        Args:
            prompt: number of a prompt; see `_choose`.
            stop: set if the result is not needed any more.
            send: sends the request to a server; repeated after `ServerUnavailable`.
        """
        began = None
        while True:
            client = self._choose(prompt)
            try:
                result = send(client)
            except ServerUnavailable as error:
                self._mark_unavailable(client, error)
                if all(map(self._is_unavailable, self.clients)):
                    began = self._pause(began, stop)
            else:
                self.unavailable.pop(client.url, None)
                return result

    def _choose(self, prompt: int) -> ServerClient:
        """Return the server of a prompt, or the next one that is not marked as unavailable.

        The rows of a group share a server, because its prefix cache then holds their prompt.
        """
        first = prompt % len(self.clients)
        ring = self.clients[first:] + self.clients[:first]
        return min(ring, key=self._is_unavailable)

    def _is_unavailable(self, client: ServerClient) -> bool:
        return self.unavailable.get(client.url, 0.0) > time.monotonic()

    def _mark_unavailable(self, client: ServerClient, error: ServerUnavailable) -> None:
        if client.url not in self.unavailable:
            log.warning("server is unavailable: %s", error)
        self.unavailable[client.url] = time.monotonic() + UNAVAILABLE_S

    def _pause(self, began: float | None, stop: threading.Event) -> float:
        """Wait before the next attempt, up to `wait_s` in all; return when the first one failed."""
        now = time.monotonic()
        began = now if began is None else began
        if now - began >= self.wait_s or stop.wait(PAUSE_S):
            raise ServersUnavailable(
                f"No server responds: {', '.join(self.unavailable)} unavailable for "
                f"{now - began:.0f} s ({self.option}.wait_s is {self.wait_s:g}). Restart a server, "
                "then resume with --auto_resume true; this rollout was not trained on."
            )
        return began

    # --- weights ---

    def publish(self, policy: Policy, number: int, *, in_flight: bool = False) -> None:
        """Send the policy's weights to all servers; every rank must call this.

        An unavailable server gets them once it responds again.
        """
        assert self.sender is not None
        # The version distinguishes runs that share a server, and publishes of the same iteration.
        # The collective also keeps rank 0 from sending while other ranks sample with old weights.
        self.run = all_gather_object(self.run or uuid.uuid4().hex[:12])[0]
        self.num_published += 1
        version = f"{number}-{self.num_published}-{self.run}"
        with ExitStack() as locks:  # a server may be loading the files of the version before
            for lock in self.locks.values():
                locks.enter_context(lock)
            self.weights = replace(self.sender.prepare(policy, version), in_flight=in_flight)
        failure: ServerFailure | None = None
        if rank() == 0:
            try:
                self._send_to_all()
            except ServerFailure as error:
                failure = error
        # Tensors are the policy's own, which changes now. All ranks raise together; otherwise the
        # others would wait for rank 0 in a collective.
        sent = replace(self.weights, tensors=None)
        self.weights, failure = broadcast_object((sent, failure))
        if failure is not None:
            raise failure

    def _send_to_all(self) -> None:
        began, never = None, threading.Event()
        with ThreadPoolExecutor(len(self.clients)) as threads:
            while not any(threads.map(self._try_update, self.clients)):
                began = self._pause(began, never)

    def _try_update(self, client: ServerClient) -> bool:
        """Update a server's weights, and return True if it is available; see `update`."""
        try:
            self.update(client)
        except ServerUnavailable as error:
            self._mark_unavailable(client, error)
            return False
        return True

    def update(self, client: ServerClient, reason: str = "") -> None:
        """Send the current weights to a server if it has others, and log the reason if given."""
        url = client.url
        with self.locks[url]:
            if url in self.unchecked:
                client.check()
                self.unchecked.discard(url)
            try:
                if not client.has(self.weights):
                    # Rank 0 is about to send them, or they were tensors of the policy.
                    if not (self.weights.folder or self.weights.tensors):
                        raise ServerUnavailable(f"{url} (it gets the next weights)")
                    client.load(self.weights)
                    log.log(logging.WARNING if reason else logging.DEBUG, "%s%s", url, reason)
            except WeightsRejected as error:
                self.rejected[url] += 1
                if self.rejected[url] <= self.retries:
                    raise
                raise ServerFailure(
                    f"{error}: the server failed to load the policy's weights "
                    f"{self.rejected[url]} times. Its log has the cause. Usually it serves "
                    "another model than the one that is trained: start it with that of "
                    "model.pretrained. Or it is on another host and does not see the folder of "
                    "the weights: set model.engine.weight_transfer.path to one that both see."
                ) from error
            self.rejected[url] = 0
            self.unavailable.pop(url, None)

    # --- samples ---

    def sample(self, submit: Submit, request: SampleRequest) -> Future[SampleResult]:
        """Start the request for a turn; a server with other weights gets the current ones again."""
        num_sent = 0

        def send(client: ServerClient) -> SampleResult:
            nonlocal num_sent
            while True:
                weights = self.weights
                try:
                    return sample_turn(client, request, weights)
                except StaleWeights as stale:
                    num_sent += 1
                    if num_sent > self.retries:
                        raise ServerFailure(
                            f"{client.url} samples with weights of version {stale.sampled}, "
                            f"although version {weights.version} was sent {num_sent} times. None "
                            "of its tokens were trained on. Restart the server."
                        ) from stale
                    self.update(client, f" had weights of version {stale.sampled}; sent again")

        return submit(request.prompt, send)


def sample_turn(client: ServerClient, request: SampleRequest, weights: Weights) -> SampleResult:
    """Return a turn that a server sampled, with everything checked that the server says."""
    result = client.sample(request, weights)
    versions = [version for version, _ in result.spans] or ["None"]
    wrong = {
        version
        for version in versions
        if version != weights.version
        and not (weights.in_flight and is_newer(version, weights.version))
    }
    if wrong:
        raise StaleWeights(excerpt(" and ".join(sorted(wrong))))
    try:
        check_result(request, result)
        if weights.in_flight:
            result = replace(result, versions=token_versions(result.spans, len(result.ids)))
    except MalformedReply as error:
        raise ServerFailure(f"{client.url} returned {error}.") from error
    return result


def is_newer(version: str, earlier: str) -> bool:
    """Return True if the same run published a server's version after another one.

    Example:
        >>> is_newer("7-8-5f0c9a1be2d4", "6-7-5f0c9a1be2d4")
        True
        >>> is_newer("default", "6-7-5f0c9a1be2d4")
        False
    """
    new, old = VERSION.fullmatch(version), VERSION.fullmatch(earlier)
    if new is None or old is None or new[3] != old[3]:
        return False
    return int(new[2]) > int(old[2]) and int(new[1]) >= int(old[1])


def token_versions(spans: Sequence[tuple[str, int]], num_tokens: int) -> list[int]:
    """Return the iteration of the weights that sampled each token of a turn.

    Example:
        >>> token_versions([("6-7-5f0c9a1be2d4", 0), ("7-8-5f0c9a1be2d4", 2)], num_tokens=3)
        [6, 6, 7]
    """
    begins = [start for _, start in spans]
    if begins[0] != 0 or begins != sorted(set(begins)) or begins[-1] >= num_tokens:
        raise MalformedReply(
            f"weight versions that begin at tokens {excerpt(str(begins))} of {num_tokens}"
        )
    ends = [*begins[1:], num_tokens]
    iterations = [int(version.split("-")[0]) for version, _ in spans]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return [number for number, size in zip(iterations, sizes, strict=True) for _ in range(size)]
