"""Calls of a server by engines and reference models, with their values and errors.

`ServerClient` is all that a class has to implement to connect another kind of server; `Servers`
retries and counts versions, `RemoteEngine` is the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from litgrpo.http import MalformedReply, repr_of

MAX_LOGPROB = 1e-3  # rounding may give a certain token a log-probability slightly above 0


class ServerFailure(RuntimeError):
    """A server cannot do what a rollout needs, and a retry would not help."""

    exit_code = 2


class ServersUnavailable(ServerFailure):
    """No server responds; the run can resume once one is available again."""

    exit_code = 75  # EX_TEMPFAIL: schedulers may restart the run later


class ServerUnavailable(ConnectionError):
    """A server cannot be reached, or reports an internal error; a retry may help."""


class WeightsRejected(ServerUnavailable):
    """A server that works could not load the weights; another attempt may succeed."""


class StaleWeights(Exception):
    """A server sampled with other weights, `sampled`, than the published ones."""

    def __init__(self, sampled: str) -> None:
        super().__init__(sampled)
        self.sampled = sampled


@dataclass(frozen=True)
class Weights:
    """Weights that all servers have to sample with.

    Args:
        version: name of them; `Servers` makes it.
        in_flight: rows that are being sampled continue with them.
        folder: exported model or adapter, which trainer and server see under this path.
        is_adapter: `folder` has an adapter, to be loaded beside the base model as `version`.
        tied_head: name of the tensor in `folder` that is the output head, too; None: not tied.
        tensors: {name: tensor} to be sent by a collective, instead of `folder`; rank 0 has them
            while it publishes.
        sender: address of rank 0 as servers see it, for this collective; empty: its host name.
    """

    version: str
    in_flight: bool = False
    folder: str = ""
    is_adapter: bool = False
    tied_head: str | None = None
    tensors: Mapping[str, Tensor] | None = None
    sender: str = ""


@dataclass(frozen=True)
class SampleRequest:
    """Request for the next turn of a row.

    Tokens are drawn from the whole vocabulary, without filters or penalties, and the
    log-probability of each is returned.

    Args:
        row: number of the row.
        prompt: number of the row's prompt; all rows of a group use the same server.
        ids: tokens of the row so far, including its prompt.
        max_tokens: the turn ends after at most this many tokens.
        end_ids: the turn ends with one of these tokens; the model's own have no other effect.
        vocab_size: V of the policy.
        temperature: of the softmax; 0 takes the most likely token.
        stops: the turn may end with one of these texts; the rest is cut off in any case.
        seed: of the turn, for servers with random numbers of their own.
        uniforms: [max_tokens] random numbers in [0, 1), for servers that draw tokens with them as
            `sampling.draw_tokens` does; None: the server draws by its `seed`.
    """

    row: int
    prompt: int
    ids: list[int]
    max_tokens: int
    end_ids: tuple[int, ...]
    vocab_size: int
    temperature: float = 1.0
    stops: tuple[str, ...] = ()
    seed: int = 0
    uniforms: list[float] | None = None


@dataclass(frozen=True)
class SampleResult:
    """Tokens generated for a request, and their log-probabilities; see `check_result`.

    Args:
        ids: token ids, at least one.
        logprobs: log-probability of each.
        finish_reason: `stop` after an end token or a stop string, `length` after `max_tokens`.
        spans: (version of the weights, first token that they sampled) in order; a client returns
            what the server says.
        versions: number of finished iterations of the weights that sampled each token; filled in
            by `Servers`. Empty: those of the last `sync_weights` sampled all.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: Sequence[tuple[str, int]] = ()
    versions: Sequence[int] = ()


class ServerClient(Protocol):
    """Client of one server.

    All calls raise `ServerUnavailable` if a retry may help, and `ServerFailure` if not, for
    example if a reply is malformed. Several threads call at the same time.
    """

    url: str

    def check(self) -> None:
        """Check, once, that the server was started with the settings that the engine needs."""

    def has(self, weights: Weights) -> bool:
        """Return True if the server samples with these weights."""

    def load(self, weights: Weights) -> None:
        """Let the server load weights, and name their version in its replies.

        Cached keys and values of earlier weights are dropped. With `Weights.in_flight` the rows
        that are being sampled continue with the new weights; if not, they are finished first.

        Raises:
            WeightsRejected: the server cannot load them.
        """

    def sample(self, request: SampleRequest, weights: Weights) -> SampleResult:
        """Generate the next turn of a row.

        Args:
            request: request for the turn.
            weights: that are to sample it; `SampleResult.spans` says which did.

        Raises:
            StaleWeights: the server no longer has them.
        """

    def tokenize(self, text: str) -> tuple[list[int], int]:
        """Return the token ids of a text without special tokens before it, and the longest row."""

    def prompt_logprobs(self, ids: list[int], start: int, top_k: int = 0) -> list[dict[int, float]]:
        """Return {token: log-probability} at each position of a row from `start` on.

        They are those of the whole softmax at temperature 1: of the row's own token, and of the
        `top_k` most likely ones.

        Args:
            ids: tokens of the row.
            start: first position to return, at least 1: nothing predicts the first token.
            top_k: number of the most likely tokens.
        """


def check_result(request: SampleRequest, result: SampleResult) -> None:
    """Check everything that a sampler says about a turn, before any of it is used.

    Raises:
        MalformedReply: tokens, log-probabilities, lengths or the finish reason are impossible.
    """

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise MalformedReply(problem)

    ids, logprobs, reason = result.ids, result.logprobs, result.finish_reason
    max_tokens, ends = request.max_tokens, set(request.end_ids)
    check(bool(ids), "no tokens")
    check(len(ids) <= max_tokens, f"{len(ids)} tokens; at most {max_tokens} were requested")
    check(len(ids) == len(logprobs), f"{len(logprobs)} log-probabilities of {len(ids)} tokens")
    for token in ids:
        valid = type(token) is int and 0 <= token < request.vocab_size
        check(valid, f"token {repr_of(token)}; expected 0 to {request.vocab_size - 1}")
    for value in logprobs:
        valid = type(value) in (int, float) and -math.inf < value <= MAX_LOGPROB
        check(valid, f"log-probability {repr_of(value)}; expected a finite number up to 0")
    check(not ends.intersection(ids[:-1]), "tokens after an end token")
    check(reason in ("stop", "length"), f"finish_reason {repr_of(reason)}")
    # Where a stop string ends is decided by litgrpo's tokenizer, see `RowsInProgress.add_turn`.
    check(
        reason != "stop" or ids[-1] in ends or bool(request.stops),
        "finish_reason 'stop' without an end token",
    )
    check(
        reason != "length" or len(ids) == max_tokens,
        f"a row that ends after {len(request.ids) + len(ids)} tokens, but rows of "
        f"{len(request.ids) + max_tokens} must fit",
    )
