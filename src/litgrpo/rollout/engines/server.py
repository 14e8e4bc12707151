"""Rollouts by vLLM servers: one interface, whatever happens to them on the way."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from litgrpo.arguments import above, at_least, require
from litgrpo.distributed.messages import log, rank
from litgrpo.distributed.together import from_first
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.publishing import FolderTransfer, WeightSender, WeightTransfer
from litgrpo.rollout.engines.served import Answer, Ask, Channel, ServedEngine
from litgrpo.rollout.engines.vllm_server import (
    Away,
    Server,
    ServerFailure,
    ServersAway,
    Stale,
    checked_url,
)

PAUSE_S = 0.5  # between two attempts where all servers are away
# {send_uniforms: vLLM's `--logprobs-mode`}; a server that draws with our numbers leaves one token.
MODES = {False: "processed_logprobs", True: "raw_logprobs"}
AWAY_S = 5.0  # for which a server that is away is not asked while others are there


@dataclass(frozen=True)
class ServerEngine(ServedEngine):
    """Samples with vLLM servers, which take over the policy's weights before each rollout.

    Every answer names the weights that sampled it: others than those of the last publish are not
    learned from. A server that came back without them gets them again, and its rows are asked
    again. Servers need VLLM_SERVER_DEV_MODE=1 and --enable-scale-out; see docs/scale.md.

    Args:
        urls: addresses of the servers, in a private network; the prompts are dealt out among them.
        weight_transfer: how the weights get there.
        send_uniforms: send each row's random numbers to servers that sample with them
            (`vllm_uniforms`): tokens are then those of `LocalEngine` up to rounding, and
            log-probabilities count as the policy's own, which holds in float32. By default each
            row gets a seed derived from its random numbers.
        timeout_s: seconds that an answer, or a publish, may take.
        wait_s: seconds to wait for a server to come back where no other can answer.
        retries: how often a server that has other weights gets them again, for one row.
        max_concurrent_requests: rows that are asked at the same time by this process; servers
            queue them.
        allow_public: let addresses be public ones. Whoever reaches such a server can run code
            there.
    """

    urls: list[str]
    weight_transfer: WeightTransfer = FolderTransfer()  # noqa: RUF009 (frozen)
    send_uniforms: bool = False
    timeout_s: float = 600.0
    wait_s: float = 300.0
    retries: int = 2
    max_concurrent_requests: int = 256
    allow_public: bool = False

    def __post_init__(self) -> None:
        """Check addresses and ranges."""
        require(bool(self.urls), "engine.urls is empty; give the address of a vLLM server.")
        for url in self.urls:
            checked_url(url, self.allow_public)
        above("engine.timeout_s", self.timeout_s, 0)
        at_least("engine.wait_s", self.wait_s, 0)
        at_least("engine.retries", self.retries, 0)
        at_least("engine.max_concurrent_requests", self.max_concurrent_requests, 1)

    @property
    def samples_elsewhere(self) -> bool:
        """Servers keep the weights of the last `sync_weights`."""
        return True

    @property
    def takes_uniforms(self) -> bool:  # type: ignore[override]
        """As `send_uniforms`."""
        return self.send_uniforms

    @cached_property
    def fleet(self) -> Fleet:
        """The servers."""
        urls = [checked_url(url, self.allow_public) for url in self.urls]
        servers = [Server(url, self.timeout_s, self.allow_public) for url in urls]
        mode = MODES[self.send_uniforms]
        return Fleet(servers, self.weight_transfer.sender(), mode, self.wait_s, self.retries)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Publish the weights; see `RolloutEngine.sync_weights`.

        Raises:
            ServerFailure: no server takes them.
        """
        self.fleet.publish(policy, version)

    @contextmanager
    def channel(self, requests: RolloutRequest) -> Iterator[Channel]:
        """Open one connection per row, at most `max_concurrent_requests`."""
        with Connections(
            self.fleet, min(self.max_concurrent_requests, requests.num_rows)
        ) as connections:
            yield connections


class Connections(Channel):
    """Asks a fleet from threads.

    Args:
        fleet: answers.
        number: threads at most.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.stop = fleet, threading.Event()
        self.threads = ThreadPoolExecutor(number, thread_name_prefix="litgrpo-asks")
        self.done: queue.SimpleQueue[tuple[int, Future[Answer]]] = queue.SimpleQueue()

    def __enter__(self) -> Connections:
        """Open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody waits for what was asked and is not needed any more."""
        self.stop.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def put(self, asks: Sequence[Ask]) -> None:
        """See `Channel.put`."""
        for ask in asks:
            future = self.threads.submit(self.fleet.answer, ask, self.stop)
            future.add_done_callback(lambda done, row=ask.row: self.done.put((row, done)))  # type: ignore[misc]

    def take(self, timeout_s: float | None) -> list[tuple[int, Answer]]:
        """See `Channel.take`."""
        found = []
        try:
            found.append(self.done.get(timeout=timeout_s))
            while True:
                found.append(self.done.get_nowait())
        except queue.Empty:
            return [(row, future.result()) for row, future in found]


class Fleet:
    """Servers of equal weights.

    Args:
        servers: one or more.
        sender: has the weights.
        mode: of their log-probabilities.
        wait_s: for one of them to come back.
        retries: publishes to a server that has other weights, for one row.
    """

    def __init__(
        self, servers: list[Server], sender: WeightSender, mode: str, wait_s: float, retries: int
    ) -> None:
        self.servers, self.sender, self.mode = servers, sender, mode
        self.unchecked = {server.url for server in servers}
        self.wait_s, self.retries = wait_s, retries
        self.version = ""
        self.away: dict[str, float] = {}  # until when nobody asks
        self.locks = {server.url: threading.Lock() for server in servers}

    def publish(self, policy: Policy, number: int) -> None:
        """Give all servers the policy's weights; every process takes part.

        A server that is away gets them when it answers again.

        Args:
            policy: has them.
            number: of finished iterations.

        Raises:
            ServerFailure: no server takes them.
        """
        # No other publish has this name, in this run or another one.
        version = from_first(f"{number}-{uuid.uuid4().hex[:12]}")
        failure: ServerFailure | None = None
        self.sender.prepare(policy, version)
        self.version = version
        if rank() == 0:
            try:
                self._send_to_all()
            except ServerFailure as error:
                failure = error
        self.sender.place, failure = from_first((self.sender.place, failure))
        if failure is not None:
            raise failure

    def _send_to_all(self) -> None:
        waits = Waits(self.wait_s, threading.Event())
        with ThreadPoolExecutor(len(self.servers)) as threads:
            while not any(threads.map(self._reached, self.servers)):
                waits.again(self._told_away())

    def _reached(self, server: Server, said: str = "") -> bool:
        """Whether a server has the weights; says why they are given, where they are."""
        try:
            self.give(server, said)
        except Away as error:
            self._note_away(server, error)
            return False
        return True

    def give(self, server: Server, said: str = "") -> None:
        """Let a server take the weights, if it has others.

        Args:
            server: one of these.
            said: to the user, if it does.

        Raises:
            Away: it cannot now.
        """
        with self.locks[server.url]:
            for url in self.unchecked & {server.url}:
                server.check_logprobs(self.mode)
                self.unchecked.discard(url)
            if server.version != self.version:
                with server.exchanging(self.version):
                    self.sender.send(server)
                log.log(logging.WARNING if said else logging.DEBUG, "%s%s", server.url, said)
            self.away.pop(server.url, None)

    def answer(self, ask: Ask, stop: threading.Event) -> Answer:
        """The answer to a row, from whichever server can give it.

        Args:
            ask: of the row.
            stop: nobody needs the answer any more.

        Raises:
            ServerFailure: no server could for `wait_s`, or one keeps other weights.
        """
        waits, healed = Waits(self.wait_s, stop), 0
        while True:
            server = self._choice(ask.prompt)
            try:
                return server.complete(ask, self.version)
            except Stale as stale:
                healed += 1
                self._check_heals(server, stale, healed)
                self._reached(server, f" had weights of version {stale.found}; published again")
            except Away as error:
                self._note_away(server, error)
                if all(map(self._is_away, self.servers)):
                    waits.again(self._told_away())

    def _check_heals(self, server: Server, stale: Stale, healed: int) -> None:
        if healed > self.retries:
            raise ServerFailure(
                f"{server.url} answers with weights of version {stale.found}, but {self.version} "
                f"were published to it {healed} times: nothing was learned from them. Restart it."
            )

    def _choice(self, prompt: int) -> Server:
        """The server of a prompt, or the next one that is not known to be away."""
        first = prompt % len(self.servers)
        ring = self.servers[first:] + self.servers[:first]
        return min(ring, key=self._is_away)

    def _is_away(self, server: Server) -> bool:
        return self.away.get(server.url, 0.0) > time.monotonic()

    def _note_away(self, server: Server, error: Away) -> None:
        if server.url not in self.away:
            log.warning("vLLM server is away: %s", error)
        self.away[server.url] = time.monotonic() + AWAY_S

    def _told_away(self) -> str:
        return ", ".join(self.away)


class Waits:
    """How long servers were waited for.

    Args:
        limit_s: seconds at most, since the first time.
        stop: ends the waiting.
    """

    def __init__(self, limit_s: float, stop: threading.Event) -> None:
        self.limit_s, self.stop = limit_s, stop
        self.began = math.inf

    def again(self, who: str) -> None:
        """Wait a little.

        Raises:
            ServersAway: it was too long.
        """
        now = time.monotonic()
        self.began = min(now, self.began)
        if now - self.began >= self.limit_s or self.stop.wait(PAUSE_S):
            raise ServersAway(
                f"No vLLM server answers: {who} away for {now - self.began:.0f} s "
                f"(engine.wait_s {self.limit_s:g}). Start it again, then go on with --auto_resume "
                "true: nothing was learned from this rollout."
            )
