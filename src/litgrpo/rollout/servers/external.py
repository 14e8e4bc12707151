"""Base classes for engines backed by an external sampler, in this process or behind HTTP.

`ExternalEngine` is the base of all: of `RemoteEngine`, the base of engines with servers such as
`ServerEngine`, and of `ColocatedEngine`, which samples with vLLM in this process.

litgrpo applies limits, turns and random numbers; the sampler holds weights, caches and batches.
"""

from __future__ import annotations

import queue
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import above, at_least, require
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.servers.client import SampleRequest, SampleResult, ServerClient
from litgrpo.rollout.servers.http_client import normalize_url
from litgrpo.rollout.servers.pool import Servers
from litgrpo.rollout.servers.weight_transfer import FolderTransfer, WeightTransfer
from litgrpo.types import Rollout, pad_rows

# Seconds between checks for results while environments are also being waited for.
POLL_S = 0.02
# Starts to sample turns, and returns a future for each.
SampleTurns = Callable[[Sequence[SampleRequest]], Sequence[Future[SampleResult]]]


class ExternalEngine(RolloutEngine):
    """Base of engines that generate with an external sampler, one request per turn of a row.

    Subclasses: `RemoteEngine` for servers, and `ColocatedEngine` for vLLM in this process.

    The request for a later turn contains the whole row so far, so the sampler's prefix cache
    applies.
    """

    allows = frozenset({"episodes"})  # see `RowsInProgress`
    # True if a row's random numbers are sent to the sampler, instead of a seed derived from them.
    takes_uniforms = False

    @property
    def exact_logprobs(self) -> bool:
        """True if the sampler draws with litgrpo's random numbers."""
        return self.takes_uniforms

    @abstractmethod
    def open_sampler(self, request: RolloutRequest) -> AbstractContextManager[SampleTurns]:
        """Open the sampler for one rollout."""

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        check_request(request, self.takes_uniforms)
        rows = RowsInProgress(request, self.takes_uniforms)
        in_flight: dict[Future[SampleResult], int] = {}  # {turn that is being sampled: its row}
        finished: queue.SimpleQueue[Future[SampleResult]] = queue.SimpleQueue()
        with self.open_sampler(request) as sample_turns:

            def start(numbers: Sequence[int]) -> None:
                turns = sample_turns([rows.next_request(row) for row in numbers]) if numbers else ()
                in_flight.update(zip(turns, numbers, strict=True))
                for turn in turns:
                    turn.add_done_callback(finished.put)

            start(range(request.num_rows))
            while in_flight or rows.awaiting_observation:
                if in_flight:
                    for turn in _take(finished, POLL_S if rows.awaiting_observation else None):
                        rows.add_turn(in_flight.pop(turn), turn.result())
                start(rows.add_observations(wait=not in_flight))
        return rows.rollout()


def _take(
    finished: queue.SimpleQueue[Future[SampleResult]], timeout_s: float | None
) -> Iterator[Future[SampleResult]]:
    """Yield finished turns; wait up to `timeout_s` seconds for the first one."""
    with suppress(queue.Empty):
        yield finished.get(timeout=timeout_s)
        while True:
            yield finished.get_nowait()


def check_request(request: RolloutRequest, takes_uniforms: bool) -> None:
    """Raise for requests whose samples could not be trained on."""
    sampling = request.sampling
    # Training would have to normalize over the candidate set of the filters.
    require(
        not sampling.has_filters,
        f"model.sampling has top_k {sampling.top_k}, top_p {sampling.top_p} and min_p "
        f"{sampling.min_p}, but this engine's sampler does not return the candidate sets of these "
        "filters. Set them to 0, 1.0 and 0.0, or use `model.engine: LocalEngine`.",
    )
    require(
        not takes_uniforms or sampling.temperature in (0, 1),
        f"model.sampling.temperature is {sampling.temperature}; with model.engine.send_uniforms it "
        "must be 1, because the server then returns log-probabilities before temperature. Set "
        "send_uniforms to false.",
    )
    require(
        not request.policy.bare_model.config.is_encoder_decoder,
        "This engine does not support encoder-decoder models. Use `model.engine: LocalEngine`.",
    )


@dataclass
class RowInProgress:
    """Tokens of a row so far; in observations their log-probability is 0, turn and version are -1.

    `versions` are numbers of finished iterations of the weights, or -1 if the sampler does not say.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)  # of the completion, as the lists below
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: int = 0  # the current one
    truncated: bool = False  # a token limit ended the last turn

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float], turn: int, versions: Sequence[int] = ()
    ) -> None:
        """Append tokens of a turn, or observation tokens (turn -1)."""
        self.ids += ids
        self.logprobs += logprobs
        self.turns += [turn] * len(ids)
        self.versions += versions or [-1] * len(ids)


class RowsInProgress:
    """The rows of a rollout while they are sampled."""

    def __init__(self, request: RolloutRequest, takes_uniforms: bool) -> None:
        self.request, self.takes_uniforms = request, takes_uniforms
        self.vocab_size = request.policy.vocab_size
        prompts = request.prompts
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        prompt_ids = [ids[mask].tolist() for ids, mask in pairs]
        self.rows = [RowInProgress(ids) for ids in prompt_ids for _ in range(request.group_size)]
        limits = request.row_limits or [request.uniforms.shape[1]] * request.num_rows
        rows = zip(request.uniforms.tolist(), limits, strict=True)
        self.uniforms: list[list[float]] = [numbers[:limit] for numbers, limit in rows]
        self.awaiting_observation: set[int] = set()

    def next_request(self, row: int) -> SampleRequest:
        """Return the request for a row's next turn.

        Its seed is a function of the row's random numbers, and thus of prompt and iteration: it
        depends neither on batch size nor on the server.
        """
        state, request, uniforms = self.rows[row], self.request, self.uniforms[row]
        done, listener = len(state.ids), request.listener
        left = len(uniforms) - done
        max_tokens = left if listener is None else min(listener.max_turn_tokens, left)
        sends_uniforms = self.takes_uniforms and not request.sampling.greedy
        return SampleRequest(
            row,
            row // request.group_size,
            state.prompt + state.ids,
            max_tokens,
            end_ids=request.end_ids,
            vocab_size=self.vocab_size,
            temperature=request.sampling.temperature,
            stops=() if request.stops is None else tuple(request.stops.stops),
            seed=int(uniforms[done] * 2**31),
            uniforms=uniforms[done : done + max_tokens] if sends_uniforms else None,
        )

    def add_turn(self, row: int, result: SampleResult) -> None:
        """Append a generated turn, and pass it to the listener."""
        state, stops, ids = self.rows[row], self.request.stops, result.ids
        if stops is not None:
            ids = ids[: stops.length(ids)]  # a server may return tokens after the stop string
        state.add(ids, result.logprobs[: len(ids)], state.turn, result.versions[: len(ids)])
        has_end = ids[-1] in self.request.end_ids
        if stops is not None:
            has_end = has_end or stops.completes(ids)
        state.truncated = not has_end
        if self.request.listener is not None:
            self.request.listener.on_turn_end(row, ids, truncated=state.truncated)
            self.awaiting_observation.add(row)

    def add_observations(self, *, wait: bool) -> list[int]:
        """Append the observations that have arrived, and return the rows that go on.

        With `wait` it blocks until one arrives, if a row is waiting for its observation.
        """
        listener = self.request.listener
        if listener is None or not self.awaiting_observation:
            return []
        arrived = listener.take_observations(wait=wait)
        self.awaiting_observation -= arrived.keys()
        observations = {row: ids for row, ids in arrived.items() if ids is not None}
        for row, ids in observations.items():
            self.rows[row].add(ids, [0.0] * len(ids), -1)
            self.rows[row].turn += 1
        return list(observations)

    def rollout(self) -> Rollout:
        """Return the finished rollout, on the device of the prompts."""
        request, rows = self.request, self.rows
        device = request.prompts.prompt_ids.device
        pad_id = request.policy.pad_id
        ids = pad_rows([row.ids for row in rows], pad_id, torch.long, device)
        lengths = torch.tensor([len(row.ids) for row in rows], device=device)
        turns = pad_rows([row.turns for row in rows], -1, torch.int16, device)
        versions = pad_rows([row.versions for row in rows], -1, torch.int32, device)
        return Rollout(
            prompts=request.prompts,
            group_size=request.group_size,
            completion_ids=ids,
            completion_mask=torch.arange(ids.shape[1], device=device) < lengths[:, None],
            sampler_logprobs=pad_rows([row.logprobs for row in rows], 0.0, torch.float32, device),
            truncated=torch.tensor([row.truncated for row in rows], device=device),
            token_versions=versions if bool((versions >= 0).any()) else None,
            turns=None if request.listener is None else turns,
        )


@check_field_types
@dataclass(frozen=True)
class RemoteEngine(ExternalEngine):
    """Base of engines that sample with servers, of any kind; `ServerEngine` is the one for vLLM.

    Servers receive the policy's weights before each rollout. A subclass connects to one kind of
    server with `connect`, and sets `takes_uniforms` if its servers can draw with litgrpo's random
    numbers; tests/support/other_server.py is an example.
    Every reply names the version of the weights that sampled it, and replies of another version are
    rejected. A restarted server gets the weights again, and its rows are requested again.

    Args:
        urls: addresses of the servers, in a private network; prompts are distributed over them.
        weight_transfer: how servers receive the weights.
        timeout_s: seconds that a request or a weight update may take, to the last byte of the
            response.
        wait_s: if no server responds, retry for this many seconds.
        retries: how often a server with stale weights gets them again, per row, and how often a
            server that fails to load weights gets them again.
        max_concurrent_requests: maximal rows requested at the same time by this process; servers
            queue them.
        allow_public: allow public addresses. Anyone who reaches such a server can run code there.
    """

    samples_in = "servers"
    allows = frozenset({"episodes", "in-flight updates"})

    urls: list[str]
    weight_transfer: WeightTransfer = FolderTransfer()  # noqa: RUF009 (frozen)
    timeout_s: float = 600.0
    wait_s: float = 300.0
    retries: int = 2
    max_concurrent_requests: int = 256
    allow_public: bool = False

    def __post_init__(self) -> None:
        require(bool(self.addresses), "model.engine.urls is empty; set the address of a server.")
        above("model.engine.timeout_s", self.timeout_s, 0)
        at_least("model.engine.wait_s", self.wait_s, 0)
        at_least("model.engine.retries", self.retries, 0)
        at_least("model.engine.max_concurrent_requests", self.max_concurrent_requests, 1)

    @abstractmethod
    def connect(self, url: str) -> ServerClient:
        """Return the client of a server."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(normalize_url(url, self.allow_public) for url in self.urls)

    @cached_property
    def servers(self) -> Servers:
        """The servers."""
        clients = [self.connect(url) for url in self.addresses]
        sender = self.weight_transfer.sender()
        return Servers(clients, self.wait_s, "model.engine", sender, self.retries)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Send the weights to all servers; see `RolloutEngine.sync_weights`."""
        self.servers.publish(policy, version)

    def update_in_flight(self, policy: Policy, version: int) -> None:
        """Send the weights to all servers, which go on with the rows that they sample."""
        self.servers.publish(policy, version, in_flight=True)

    @contextmanager
    def open_sampler(self, request: RolloutRequest) -> Iterator[SampleTurns]:
        """See `ExternalEngine.open_sampler`; has up to `max_concurrent_requests` threads."""
        num_threads = min(self.max_concurrent_requests, request.num_rows)
        with self.servers.requests(num_threads) as submit:
            yield lambda requests: [self.servers.sample(submit, turn) for turn in requests]
