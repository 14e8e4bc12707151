"""What a recipe says of episodes: their limits, and how turns follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from litgrpo.arguments import at_least, one_of, require

TurnFormatName = Literal["template", "inline"]
OnTimeout = Literal["fail", "reply"]


@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of an episode, and how turns follow each other.

    Args:
        max_turns: turns of the policy in an episode at most.
        max_turn_tokens: tokens of a turn at most. A turn that ends so has no end token: the
            environment still rewards it, and the episode ends.
        max_observation_tokens: tokens that are heard between two turns at most; more are cut in the
            middle.
        turn_format: what stands between two turns. `template`: the tokenizer's chat template says
            it;
            `inline`: the environment's text as it is, for models without a chat format.
        tool_role: role of what tools say, in chat templates; `user` where a template knows no
            `tool`.
        split_special_tokens: special tokens that an environment writes, such as `<eos>`, are read
            as plain text, so that nothing that a tool says ends a turn or begins a message.
        close_truncated_turns: a turn that ends by its limit of tokens gets an end token, which is
            not learned
            from, and the episode goes on.
        timeout_s: seconds in which an environment has to answer a turn.
        on_timeout: `fail` leaves the episode out of learning; `reply` tells the policy, and the
            episode goes on.
        workers: processes in which environments run; 0: this process, which a slow one holds up.
            None: one for each episode, at most 64.
        max_observation_chars: characters of an answer at most; more are cut in the middle.
        record_responses: keep the answers in the run's folder, and give them again when an
            iteration is
            repeated: for tools that are no functions, such as a search.
    """

    max_turns: int = 8
    max_turn_tokens: int = 128
    max_observation_tokens: int = 256
    turn_format: TurnFormatName = "template"
    tool_role: str = "tool"
    split_special_tokens: bool = True
    close_truncated_turns: bool = False
    timeout_s: float = 10.0
    on_timeout: OnTimeout = "fail"
    workers: int | None = None
    max_observation_chars: int = 20_000
    record_responses: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("max_turns", "max_turn_tokens", "max_observation_chars"):
            at_least(f"episode.{name}", vars(self)[name], 1)
        at_least("episode.max_observation_tokens", self.max_observation_tokens, 8)
        at_least("episode.workers", self.workers, 0)
        one_of("episode.turn_format", self.turn_format, get_args(TurnFormatName))
        one_of("episode.on_timeout", self.on_timeout, get_args(OnTimeout))
        require(
            self.timeout_s > 0,
            f"episode.timeout_s is {self.timeout_s}; it must be above 0.",
        )
