"""Base class for engines backed by an external sampler such as vLLM.

litgrpo applies limits, turns and random numbers; the sampler holds weights, caches and batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.http import MalformedReply, repr_of
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.types import Rollout

# Seconds between checks for sampler results while environments are also being waited for.
POLL_S = 0.02
# Rounding may give a certain token a log-probability slightly above 0; vLLM reports -9999 instead
# of minus infinity.
MAX_LOGPROB, MIN_LOGPROB = 1e-3, -1e4


@dataclass(frozen=True)
class SampleRequest:
    """Request for the next turn of a row.

    Args:
        row: number of the row.
        prompt: number of the row's prompt; all rows of a group use the same server.
        ids: tokens of the row so far, including its prompt.
        params: vLLM's `SamplingParams` as plain values.
        vocab_size: V of the policy.

    Example::

        SampleRequest(9, prompt=1, ids=[1, 306], params={"max_tokens": 64}, vocab_size=32000)
    """

    row: int
    prompt: int
    ids: list[int]
    params: dict[str, Any]
    vocab_size: int


@dataclass(frozen=True)
class SampleResult:
    """Tokens generated for a request, and their log-probabilities; see `check_result`.

    Args:
        ids: token ids, at least one.
        logprobs: log-probability of each.
        finish_reason: `stop` after an end token or a stop string, `length` after `max_tokens`.
        versions: number of finished iterations of the weights that sampled each token; empty: those
            of the last `sync_weights` sampled all.

    Example:
        >>> SampleResult(ids=[29896, 2], logprobs=[-0.11, -0.02], finish_reason="stop").ids
        [29896, 2]
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[int] = field(default_factory=list)


def check_result(request: SampleRequest, result: SampleResult) -> None:
    """Check everything that a sampler says about a turn, before any of it is used.

    Raises:
        MalformedReply: tokens, log-probabilities, lengths or the finish reason are impossible.
    """

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise MalformedReply(problem)

    ids, logprobs, reason = result.ids, result.logprobs, result.finish_reason
    most, ends = request.params["max_tokens"], set(request.params["stop_token_ids"])
    check(bool(ids), "no tokens")
    check(len(ids) <= most, f"{len(ids)} tokens; at most {most} were requested")
    check(len(ids) == len(logprobs), f"{len(logprobs)} log-probabilities of {len(ids)} tokens")
    for token in ids:
        valid = type(token) is int and 0 <= token < request.vocab_size
        check(valid, f"token {repr_of(token)}; expected 0 to {request.vocab_size - 1}")
    for value in logprobs:
        valid = type(value) in (int, float) and MIN_LOGPROB <= value <= MAX_LOGPROB
        check(valid, f"log-probability {repr_of(value)}; expected {MIN_LOGPROB:g} to 0")
    check(not ends.intersection(ids[:-1]), "tokens after an end token")
    check(reason in ("stop", "length"), f"finish_reason {repr_of(reason)}")
    # Where a stop string ends is decided by litgrpo's tokenizer, see `ServedRows.add_turn`.
    stopped = ids[-1] in ends or bool(request.params.get("stop"))
    check(reason != "stop" or stopped, "finish_reason 'stop' without an end token")
    check(
        reason != "length" or len(ids) == most,
        f"a row that ends after {len(request.ids) + len(ids)} tokens; start the server with "
        f"--max-model-len {len(request.ids) + most} or more",
    )


class SampleChannel(ABC):
    """Takes requests and returns results in any order."""

    @abstractmethod
    def put(self, requests: Sequence[SampleRequest]) -> None:
        """Submit requests."""

    @abstractmethod
    def take(self, timeout_s: float | None) -> list[tuple[int, SampleResult]]:
        """Return (row, result) of finished requests.

        Args:
            timeout_s: longest time to wait for the first one; None: no limit.
        """


class ServedEngine(RolloutEngine):
    """Generates with an external sampler, one request per turn of a row.

    The request for a later turn contains the whole row so far, so the sampler's prefix cache
    applies.
    """

    # True if a row's random numbers are sent to the sampler, instead of a seed derived from them.
    takes_uniforms = False

    @property
    def exact_logprobs(self) -> bool:
        """True if the sampler draws with litgrpo's random numbers."""
        return self.takes_uniforms

    @property
    def supports_episodes(self) -> bool:
        """True; see `ServedRows`."""
        return True

    @abstractmethod
    def channel(self, request: RolloutRequest) -> AbstractContextManager[SampleChannel]:
        """Open a channel to the sampler for one rollout."""

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        Raises:
            ValueError: the sampler cannot compute this sampling or this kind of model.
        """
        check_request(request, self.takes_uniforms)
        rows = ServedRows(request, self.takes_uniforms)
        in_flight = set(range(request.num_rows))  # rows whose request has no result yet
        with self.channel(request) as channel:
            channel.put([rows.next_request(row) for row in sorted(in_flight)])
            while in_flight or rows.awaiting_observation:
                results: list[tuple[int, SampleResult]] = []
                if in_flight:
                    results = channel.take(POLL_S if rows.awaiting_observation else None)
                for row, result in results:
                    rows.add_turn(row, result)
                    in_flight.remove(row)
                resumed = rows.add_observations(wait=not in_flight)
                in_flight.update(resumed)
                channel.put([rows.next_request(row) for row in resumed])
        return rows.rollout()


def check_request(request: RolloutRequest, takes_uniforms: bool) -> None:
    """Raise for requests whose samples could not be trained on.

    Raises:
        ValueError: filters are set: the sampler does not return the candidate set, over which
            training would have to normalize. Or the temperature is not 1 with litgrpo's random
            numbers. Or the model is an encoder-decoder.
    """
    sampling = request.sampling
    require(
        not sampling.truncated,
        f"model.sampling has top_k {sampling.top_k}, top_p {sampling.top_p} and min_p "
        f"{sampling.min_p}, but vLLM does not return the candidate sets of these filters. Set them "
        "to 0, 1.0 and 0.0, or use `model.engine: LocalEngine`.",
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
class ServedRow:
    """Tokens of a row so far.

    Args:
        prompt: token ids of its prompt.
        ids: token ids of its completion.
        logprobs: log-probability of each; 0 for observation tokens.
        turns: turn number of each; -1 for observation tokens.
        versions: number of finished iterations of the weights that sampled each; -1 for observation
            tokens, and for all if the sampler does not say.
        turn: number of the current turn.
        truncated: a token limit ended its last turn.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: int = 0
    truncated: bool = False

    def add(
        self, ids: Sequence[int], logprobs: Sequence[float], turn: int, versions: Sequence[int] = ()
    ) -> None:
        """Append tokens of a turn, or observation tokens (turn -1)."""
        self.ids += ids
        self.logprobs += logprobs
        self.turns += [turn] * len(ids)
        self.versions += versions or [-1] * len(ids)


class ServedRows:
    """The rows of a rollout while they are sampled.

    Args:
        request: request for the rollout.
        takes_uniforms: the sampler draws with litgrpo's random numbers.
    """

    def __init__(self, request: RolloutRequest, takes_uniforms: bool) -> None:
        self.request, self.takes_uniforms = request, takes_uniforms
        self.vocab_size = request.policy.vocab_size
        prompts = request.prompts
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        prompt_ids = [ids[mask].tolist() for ids, mask in pairs]
        self.rows = [ServedRow(ids) for ids in prompt_ids for _ in range(request.group_size)]
        limits = request.row_limits or [request.uniforms.shape[1]] * request.num_rows
        rows = zip(request.uniforms.tolist(), limits, strict=True)
        self.uniforms: list[list[float]] = [numbers[:limit] for numbers, limit in rows]
        self.awaiting_observation: set[int] = set()

    def next_request(self, row: int) -> SampleRequest:
        """Return the request for a row's next turn.

        Its seed is a function of the row's random numbers, and thus of prompt and iteration: it
        depends neither on batch size nor on the server.
        """
        here, request, uniforms = self.rows[row], self.request, self.uniforms[row]
        done, listener = len(here.ids), request.listener
        left = len(uniforms) - done
        params: dict[str, Any] = {
            "max_tokens": left if listener is None else min(listener.max_turn_tokens, left),
            "temperature": request.sampling.temperature,
            "stop_token_ids": list(request.end_ids),
            "ignore_eos": True,  # `end_ids` contains the model's end tokens
            "seed": int(uniforms[done] * 2**31),
            "logprobs": 0,
            # vLLM takes missing values from the model's generation_config.json, so set all of them.
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if self.takes_uniforms and not request.sampling.greedy:
            params["extra_args"] = {"uniforms": uniforms[done : done + params["max_tokens"]]}
        if request.stops is not None:
            params["stop"] = list(request.stops.stops)
            params["include_stop_str_in_output"] = True
            params["skip_special_tokens"] = False  # stop strings may be special tokens
        return SampleRequest(
            row, row // request.group_size, here.prompt + here.ids, params, self.vocab_size
        )

    def add_turn(self, row: int, result: SampleResult) -> None:
        """Append a generated turn, and pass it to the listener."""
        here, stops, ids = self.rows[row], self.request.stops, result.ids
        if stops is not None:
            ids = ids[: stops.length(ids)]  # a server may return tokens after the stop string
        here.add(ids, result.logprobs[: len(ids)], here.turn, result.versions[: len(ids)])
        has_end = ids[-1] in self.request.end_ids
        if stops is not None:
            has_end = has_end or stops.completes(ids)
        here.truncated = not has_end
        if self.request.listener is not None:
            self.request.listener.on_turn_end(row, ids, truncated=here.truncated)
            self.awaiting_observation.add(row)

    def add_observations(self, *, wait: bool) -> list[int]:
        """Append the observations that have arrived.

        Args:
            wait: if a row is waiting for its observation, block until one arrives.

        Returns:
            Rows that continue with another turn.
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
        request, width = self.request, max(len(row.ids) for row in self.rows)
        device = request.prompts.prompt_ids.device

        def pad_right(lists: Sequence[list], fill: float, dtype: torch.dtype) -> Tensor:
            padded = [values + [fill] * (width - len(values)) for values in lists]
            return torch.tensor(padded, dtype=dtype, device=device)

        turns = pad_right([row.turns for row in self.rows], -1, torch.int16)
        versions = pad_right([row.versions for row in self.rows], -1, torch.int32)
        lengths = torch.tensor([len(row.ids) for row in self.rows], device=device)
        mask = torch.arange(width, device=device) < lengths[:, None]
        return Rollout(
            prompts=request.prompts,
            group_size=request.group_size,
            completion_ids=pad_right(
                [row.ids for row in self.rows], request.policy.pad_id, torch.long
            ),
            completion_mask=mask,
            sampler_logprobs=pad_right([row.logprobs for row in self.rows], 0.0, torch.float32),
            truncated=torch.tensor([row.truncated for row in self.rows], device=device),
            loss_mask=turns >= 0,
            token_versions=versions if bool((versions >= 0).any()) else None,
            turns=None if request.listener is None else turns,
        )
