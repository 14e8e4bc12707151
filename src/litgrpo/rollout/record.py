"""What was said in an episode, recorded while it is played."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import Any

from litgrpo.environments.base import Message, StepResult


@dataclass(frozen=True)
class Episode:
    """What was said in one row of a rollout, spoken and heard apart.

    Args:
        messages: in order; the policy's have the role `assistant`, those that it heard any other.
        spans: of each message, its columns [first, end) in the row.
        calls: {tool: (calls, calls that failed)}.
        log: {name: (sum, turns)} of what the environment logged.
        seconds: that its turns waited for answers.
        failed: why its environment could not go on; "": it could.
        heard_cut: tokens that were left out of what it heard, by the limit.
        done: the environment said that it is over.
        turn_calls: calls of tools in each turn that was answered.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: dict[str, tuple[float, int]] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""
    heard_cut: int = 0
    done: bool = False
    turn_calls: list[int] = field(default_factory=list)

    @property
    def spoken(self) -> list[str]:
        """The texts of the policy's turns."""
        return [each["content"] for each in self.messages if each["role"] == "assistant"]


@dataclass
class Record:
    """What has happened in a row so far.

    Args:
        failed: why its environment could not begin; "": it could.
        messages, spans, calls, log, heard_cut, turn_calls: as of `Episode`.
        rewards: of each turn, NaN where it abstained.
        states: after each turn.
        used: tokens in the row.
        cut: its last turn was ended by a limit of tokens.
        closed: its last token is an end token of the policy.
        full: there was no room for what it would have heard.
    """

    failed: str = ""
    messages: list[Message] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: dict[str, tuple[float, int]] = field(default_factory=dict)
    heard_cut: int = 0
    turn_calls: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    states: list[Hashable] = field(default_factory=list)
    used: int = 0
    cut: bool = False
    closed: bool = False
    full: bool = False
    done: bool = False
    last_ids: list[int] = field(default_factory=list)
    asked: float = 0.0
    seconds: float = 0.0

    def add(self, messages: list[Message], length: int) -> None:
        """Messages that take the next columns."""
        self.messages += messages
        self.spans += [(self.used, self.used + length)] * len(messages)
        self.used += length

    def answered(self, heard: StepResult) -> None:
        """Count a turn."""
        self.rewards.append(math.nan if heard.reward is None else float(heard.reward))
        self.states.append(heard.state)
        self.turn_calls.append(sum(calls for calls, _ in heard.calls.values()))
        for name, (calls, failed) in heard.calls.items():
            before = self.calls.get(name, (0, 0))
            self.calls[name] = before[0] + calls, before[1] + failed
        for name, value in heard.log.items():
            total, turns = self.log.get(name, (0.0, 0))
            self.log[name] = total + float(value), turns + 1

    @property
    def episode(self) -> Episode:
        """What the rollout carries of it."""
        return Episode(**{each.name: getattr(self, each.name) for each in fields(Episode)})
