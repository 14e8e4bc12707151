"""Engines whose tokens somebody else samples: what rows ask, and what becomes of the answers.

Ours are the limits, the turns and the random numbers; weights, caches and batches are the other's.
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
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.types import Rollout

LOOK_S = 0.02  # between looks for answers while an environment is waited for, too


@dataclass(frozen=True)
class Ask:
    """What a row asks for.

    Args:
        row: its number.
        prompt: of the row, which the rows of a group share a server by.
        ids: everything that it has read and said so far.
        params: `SamplingParams` of vLLM as plain values.
    """

    row: int
    prompt: int
    ids: list[int]
    params: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What was sampled for a row: token ids and their log-probabilities, one or more."""

    ids: list[int]
    logprobs: list[float]


class Channel(ABC):
    """Asks go in, answers come out in any order."""

    @abstractmethod
    def put(self, asks: Sequence[Ask]) -> None:
        """Ask for these rows."""

    @abstractmethod
    def take(self, timeout_s: float | None) -> list[tuple[int, Answer]]:
        """Answers that are there, each with its row; waits for the first, None: however long."""


class ServedEngine(RolloutEngine):
    """Asks another sampler, row by row; turns keep what was said as the next prompt's beginning."""

    # A row's random numbers go to the sampler instead of a seed made of them.
    takes_uniforms = False

    @property
    def exact_logprobs(self) -> bool:
        """Where it draws with our numbers; its log-probabilities then count as the policy's."""
        return self.takes_uniforms

    @property
    def supports_episodes(self) -> bool:
        """The prefix of a row stays in the sampler's cache between its turns."""
        return True

    @abstractmethod
    def channel(self, requests: RolloutRequest) -> AbstractContextManager[Channel]:
        """Where the rows of a rollout ask."""

    @torch.no_grad()
    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        Raises:
            ValueError: the sampling, or the kind of model, is not one that others can compute.
        """
        check(requests, self.takes_uniforms)
        rows = SpokenRows(requests, self.takes_uniforms)
        with self.channel(requests) as channel:
            channel.put([rows.ask(row) for row in range(requests.num_rows)])
            asked = set(range(requests.num_rows))
            while asked or rows.waiting:
                answers = channel.take(LOOK_S if rows.waiting else None) if asked else []
                for row, answer in answers:
                    rows.spoke(row, answer)
                again = rows.heard(wait=not asked)
                asked = asked.difference([row for row, _ in answers]).union(again)
                channel.put([rows.ask(row) for row in again])
        return rows.rollout()


def check(requests: RolloutRequest, takes_uniforms: bool) -> None:
    """Refuse what an engine of others cannot sample so that it can be learned from.

    Raises:
        ValueError: filters, whose remaining tokens are not told; a temperature beside 1 with our
            numbers; an encoder-decoder.
    """
    sampling = requests.sampling
    require(
        not sampling.truncated,
        f"sampling has top_k {sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}, but "
        "the server does not tell which tokens they left. Take them out (0, 1.0, 0.0), or sample "
        "with LocalEngine.",
    )
    require(
        not takes_uniforms or sampling.temperature in (0, 1),
        f"sampling.temperature is {sampling.temperature}, but engine.send_uniforms needs 1: the "
        "server's log-probabilities are those before temperature then. Set it to false.",
    )
    require(
        not requests.policy.bare_model.config.is_encoder_decoder,
        "An encoder-decoder is not sampled by a server. Give engine: {class_path: LocalEngine}.",
    )


@dataclass
class SpokenRow:
    """A row so far.

    Args:
        prompt: its token ids.
        ids: of the completion.
        logprobs: of the same; 0 where it heard.
        turns: of the same; -1 where it heard.
        turn: number of the turn that it is in.
        cut: a limit ended its last turn.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    turn: int = 0
    cut: bool = False

    def add(self, ids: Sequence[int], logprobs: Sequence[float], turn: int) -> None:
        """Tokens of a turn, or heard ones: -1."""
        self.ids += ids
        self.logprobs += logprobs
        self.turns += [turn] * len(ids)


class NoStops:
    """No text ends a row; see `StopStrings`."""

    def length(self, ids: list[int]) -> int:
        """All of them."""
        return len(ids)

    def completed(self, ids: list[int]) -> bool:
        """Nothing is."""
        return False


class SpokenRows:
    """The rows of a rollout while they are sampled.

    Args:
        requests: of the rollout.
        takes_uniforms: the sampler draws with our numbers.
    """

    def __init__(self, requests: RolloutRequest, takes_uniforms: bool) -> None:
        self.requests, self.takes_uniforms = requests, takes_uniforms
        prompts, group = requests.prompts, requests.group_size
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        read = [ids[mask].tolist() for ids, mask in pairs]
        self.rows = [SpokenRow(ids) for ids in read for _ in range(group)]
        self.uniforms: list[list[float]] = requests.uniforms.tolist()
        self.waiting: set[int] = set()  # for what they hear

    @property
    def turn_tokens(self) -> int:
        """Of a turn at most."""
        listener = self.requests.listener
        return len(self.uniforms[0]) if listener is None else listener.max_turn_tokens

    def ask(self, row: int) -> Ask:
        """What a row asks for next; its seed is a function of its random numbers."""
        here, requests, numbers = self.rows[row], self.requests, self.uniforms[row]
        done = len(here.ids)
        params: dict[str, Any] = {
            "max_tokens": min(self.turn_tokens, len(numbers) - done),
            "temperature": requests.sampling.temperature,
            "stop_token_ids": list(requests.end_ids),
            "ignore_eos": True,  # the model's own ends are among these
            "seed": int(numbers[done] * 2**31),
            "logprobs": 0,
            # A server would take what is not given from the model's generation_config.json.
            **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        }
        if self.takes_uniforms and not requests.sampling.greedy:
            params["extra_args"] = {"uniforms": numbers[done : done + params["max_tokens"]]}
        if requests.stops is not None:
            more = {"stop": list(requests.stops.stops), "include_stop_str_in_output": True}
            params |= {**more, "skip_special_tokens": False}
        return Ask(row, row // requests.group_size, here.prompt + here.ids, params)

    def spoke(self, row: int, answer: Answer) -> None:
        """A turn of a row has come; who listens hears it."""
        here, stops = self.rows[row], self.requests.stops or NoStops()
        said = stops.length(answer.ids)
        ids = answer.ids[:said]
        here.add(ids, answer.logprobs[:said], here.turn)
        here.cut = ids[-1] not in self.requests.end_ids and not stops.completed(ids)
        if self.requests.listener is not None:
            self.requests.listener.ended(row, ids, cut=here.cut)
            self.waiting.add(row)

    def heard(self, *, wait: bool) -> list[int]:
        """Rows that have heard and go on."""
        listener = self.requests.listener
        if listener is None or not self.waiting:
            return []
        answers = listener.heard(wait=wait)
        self.waiting -= answers.keys()
        told = {row: ids for row, ids in answers.items() if ids is not None}
        for row, ids in told.items():
            self.rows[row].add(ids, [0.0] * len(ids), -1)
            self.rows[row].turn += 1
        return list(told)

    def rollout(self) -> Rollout:
        """The finished rollout, where the prompts are."""
        requests, longest = self.requests, max(len(each.ids) for each in self.rows)
        device = requests.prompts.prompt_ids.device

        def filled(name: str, empty: float, dtype: torch.dtype) -> Tensor:
            """[N, C] with padding on the right."""
            lists = [vars(each)[name] for each in self.rows]
            whole = [values + [empty] * (longest - len(values)) for values in lists]
            return torch.tensor(whole, dtype=dtype, device=device)

        turns = filled("turns", -1, torch.int16)
        lengths = torch.tensor([len(each.ids) for each in self.rows], device=device)
        mask = torch.arange(longest, device=device) < lengths[:, None]
        return Rollout(
            prompts=requests.prompts,
            group_size=requests.group_size,
            completion_ids=filled("ids", requests.policy.pad_id, torch.long),
            completion_mask=mask,
            sampler_logprobs=filled("logprobs", 0.0, torch.float32),
            truncated=torch.tensor([each.cut for each in self.rows], device=device),
            loss_mask=turns >= 0,
            turns=None if requests.listener is None else turns,
        )
