"""Multi-turn episodes: settings, the record of an episode, and the rollout of a batch of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, one_of, require
from litgrpo.data.rendering import PromptDropped
from litgrpo.environments.base import (
    EpisodeFailures,
    EpisodePool,
    EpisodeStart,
    FailedEpisode,
    Message,
    StepResult,
)
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.sampling import PURPOSES, Purpose
from litgrpo.rollout.turn_format import TurnFormat
from litgrpo.types import Episode, PromptBatch, Rollout, Stats, pad_left

TurnFormatName = Literal["template", "inline"]
OnTimeout = Literal["fail", "reply"]


@check_field_types
@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of an episode, and the format between turns.

    Args:
        max_turns: maximal number of turns of the policy per episode.
        max_turn_tokens: maximal tokens per turn. A turn that reaches the limit has no end token:
            the environment still rewards it, and the episode ends.
        max_observation_tokens: maximal tokens of an observation; longer ones are cut in the middle.
        turn_format: `template` renders observations with the tokenizer's chat template; `inline`
            inserts them as plain text, for models without a chat format.
        tool_role: role of tool results in chat templates; `user` for templates without `tool`.
        split_special_tokens: encode special tokens in observations, such as `<eos>`, as plain text,
            so that tool output can neither end a turn nor begin a message.
        close_truncated_turns: append an end token, masked out of the loss, to a turn that reaches
            its token limit, and continue the episode.
        timeout_s: seconds that an environment may take per turn.
        on_timeout: `fail` leaves the episode out of the loss; `reply` sends the policy a message,
            and the episode continues.
        num_workers: maximal number of processes, each of which plays one episode at a time; further
            episodes wait. 0: the training process, which a slow environment blocks. None: one per
            episode, at most 64.
        max_observation_chars: maximal characters of an observation; longer ones are cut in the
            middle.

    Example:
        >>> EpisodeSettings(max_turns=4, turn_format="inline").max_turn_tokens
        128
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
    num_workers: int | None = None
    max_observation_chars: int = 20_000

    def __post_init__(self) -> None:
        at_least("model.episode.max_turns", self.max_turns, 1)
        at_least("model.episode.max_turn_tokens", self.max_turn_tokens, 1)
        at_least("model.episode.max_observation_chars", self.max_observation_chars, 1)
        at_least("model.episode.max_observation_tokens", self.max_observation_tokens, 8)
        at_least("model.episode.num_workers", self.num_workers, 0)
        one_of("model.episode.turn_format", self.turn_format, get_args(TurnFormatName))
        one_of("model.episode.on_timeout", self.on_timeout, get_args(OnTimeout))
        require(
            self.timeout_s > 0,
            f"model.episode.timeout_s is {self.timeout_s}; it must be above 0.",
        )


@dataclass
class PlayedRow:
    """State of a row while its episode is played."""

    episode: Episode = field(default_factory=Episode)
    used: int = 0  # tokens in the row
    cut: bool = False  # a token limit ended its last turn
    closed: bool = False  # its last token is an end token of the policy
    full: bool = False  # its next observation did not fit into the row
    last_ids: list[int] = field(default_factory=list)  # of its last turn
    asked: float = 0.0  # when the environment got that turn

    def add(self, messages: list[Message], length: int) -> None:
        """Append messages that occupy the next columns."""
        self.episode.messages += messages
        self.episode.spans += [(self.used, self.used + length)] * len(messages)
        self.used += length

    def add_result(self, result: StepResult) -> None:
        """Add reward, state, calls and logs of a turn."""
        episode = self.episode
        episode.turn_rewards.append(None if result.reward is None else float(result.reward))
        episode.turn_states.append(result.state)
        episode.turn_calls.append(sum(calls for calls, _ in result.calls.values()))
        for name, (calls, failed) in result.calls.items():
            before = episode.calls.get(name, (0, 0))
            episode.calls[name] = before[0] + calls, before[1] + failed
        for name, value in result.log.items():
            total, turns = episode.log.get(name, (0.0, 0))
            episode.log[name] = total + float(value), turns + 1
        episode.done = result.done


# Token ids of a prompt (batch, row) with what an environment adds to it.
Opener = Callable[[PromptBatch, int, str | list[Message]], list[int]]


class RolloutKey(NamedTuple):
    """Key of a rollout's random numbers and episodes.

    Args:
        seed: of the run.
        purpose: train, val, test or predict.
        iteration: number of finished iterations.
        attempt: number of the attempt of dynamic sampling.
    """

    seed: int
    purpose: Purpose
    iteration: int
    attempt: int


CUT = " ... "  # replaces the removed middle of a long observation


def episode_seed(rollout_key: RolloutKey, prompt: int) -> int:
    """Return the seed of a prompt's episodes, below 2**31, from a counter-based stream (Philox).

    `prompt` is the prompt's position in its data set.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    # `draw_uniforms` uses keys below len(PURPOSES), so the two never share a stream.
    kind = len(PURPOSES) + PURPOSES.index(rollout_key.purpose)
    key = np.array([rollout_key.seed, kind], dtype=np.uint64)
    number = rollout_key.iteration if rollout_key.purpose == "train" else 0  # as in `draw_uniforms`
    counter = np.array([0, prompt, number, rollout_key.attempt], dtype=np.uint64)
    return int(np.random.Generator(np.random.Philox(key=key, counter=counter)).integers(2**31))


class EpisodeRunner(ABC):
    """Turns the prompts of a rollout into episodes.

    Attributes: `turn_format` encodes observations, `settings` are the limits, `tools` the names of
    the tools in statistics, `waited` the seconds spent waiting since the last statistics.
    """

    turn_format: TurnFormat
    settings: EpisodeSettings
    tools: Sequence[str]
    waited: float

    @abstractmethod
    def play(
        self, engine: RolloutEngine, requests: RolloutRequest, rollout_key: RolloutKey
    ) -> Rollout:
        """Sample N rows as episodes, whose turns `engine` samples.

        Raises:
            ValueError: the environment begins episodes of one row and seed in different ways, or
                nothing can be added to a prompt.
            EnvironmentFailure: too many episodes failed.
        """

    @abstractmethod
    def close(self) -> None:
        """End all episodes and their processes."""

    def starts(self, requests: RolloutRequest, rollout_key: RolloutKey) -> list[EpisodeStart]:
        """Return the start of each of the N episodes, equal within a group."""
        prompts, starts = requests.prompts, []
        for number, index in enumerate(prompts.index.tolist()):
            row = {name: values[number] for name, values in prompts.columns.items()}
            row["prompt"] = prompts.prompts[number]
            begins = (row, episode_seed(rollout_key, index))
            keys = [
                (rollout_key.iteration, rollout_key.attempt, index, g)
                for g in range(requests.group_size)
            ]
            starts += [EpisodeStart(*begins, key) for key in keys]
        return starts

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time within to the time spent waiting for environments."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    def stats(self, rollout: Rollout) -> Stats:
        """Return metrics of episodes, and the seconds in environments since the last call.

        A metric of two numbers is a sum and the count to divide it by.
        """
        episodes, rewards = rollout.episodes, rollout.turn_rewards
        assert rollout.turns is not None
        failed = torch.tensor([bool(episode.failed) for episode in episodes])
        late = torch.tensor([episode.failed.startswith("timed out") for episode in episodes])
        # An environment that gives no turn rewards has no mean of them.
        total, valid = rewards.nansum(1), ~failed & ~rewards.isnan().all(1)
        observed = rollout.completion_mask & ~rollout.loss_mask
        stats = {
            "env/turns": (rollout.turns.amax(1) + 1).float().mean(),
            "env/reward": torch.stack([total[valid].sum(), valid.sum()]),
            "env/failed_frac": failed.float().mean(),
            "env/timeout_frac": late.float().mean(),
            "completion/observation_frac": torch.stack(
                [observed.sum(), rollout.completion_mask.sum()]
            ),
            "time/env_s": torch.tensor(self.waited),
        }
        self.waited = 0.0
        for tool in self.tools:
            calls = torch.tensor([episode.calls.get(tool, (0, 0)) for episode in episodes]).float()
            stats[f"tools/{tool}_calls"], stats[f"tools/{tool}_failed"] = calls.mean(0)
        return {name: value.float() for name, value in stats.items()}


@dataclass
class Episodes(EpisodeRunner):
    """Plays a rollout's rows as episodes of an environment."""

    pool: EpisodePool  # of the environments
    turn_format: TurnFormat
    settings: EpisodeSettings
    opener: Opener  # renders a prompt with what an environment adds to it
    tools: Sequence[str] = ()
    waited: float = field(default=0.0, init=False)
    failures: EpisodeFailures = field(default_factory=EpisodeFailures, init=False)

    def play(
        self, engine: RolloutEngine, requests: RolloutRequest, rollout_key: RolloutKey
    ) -> Rollout:
        starts = self.starts(requests, rollout_key)
        self.failures.reset(starts)
        with self.waiting():
            opened = self.pool.reset(starts)
        self.failures.count(dict(enumerate(opened)))
        rows = [PlayedRow() for _ in opened]
        for row, opening in zip(rows, opened, strict=True):
            if isinstance(opening, FailedEpisode):
                row.episode.failed = opening.reason
        prompts = self._extend_prompts(requests, opened, rows)
        listener = EpisodeListener(self, requests, rows)
        # Rows beyond the episodes that play at once would only wait.
        limits = [n for n in (requests.max_rows, self.pool.max_parallel) if n is not None]
        max_rows = min(limits, default=None)
        rollout = engine.generate(
            replace(requests, prompts=prompts, listener=listener, max_rows=max_rows)
        )
        return listener.complete_rollout(replace(rollout, prompts=prompts))

    def close(self) -> None:
        self.pool.close()

    def _extend_prompts(
        self,
        requests: RolloutRequest,
        opened: Sequence[str | list[Message] | FailedEpisode],
        rows: Sequence[PlayedRow],
    ) -> PromptBatch:
        """Append the environment's openings to the prompts.

        The episodes of prompts that become too long are marked as failed.
        """
        prompts, size = requests.prompts, requests.group_size
        groups = [slice(first, first + size) for first in range(0, len(opened), size)]
        added = [_common_opening(opened[group]) for group in groups]
        if not any(added):
            return prompts
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        texts, prompt_ids = list(prompts.prompts), [ids[mask].tolist() for ids, mask in pairs]
        for number in [number for number, more in enumerate(added) if more]:
            try:
                prompt_ids[number] = self.opener(prompts, number, added[number])
            except PromptDropped as error:
                for row in rows[groups[number]]:
                    row.episode.failed = str(error)
            texts[number] = str(requests.policy.tokenizer.decode(prompt_ids[number]))
        padded = pad_left(prompt_ids, requests.policy.pad_id)
        device = prompts.prompt_ids.device
        longer: dict[str, Any] = {"prompts": texts}
        longer |= {"prompt_ids": padded[0].to(device), "prompt_mask": padded[1].to(device)}
        return replace(prompts, **longer)


def _keep_text(text: str, include: bool) -> str:
    """Return a text unchanged, for runs without stop strings."""
    return text


def _common_opening(opened: Sequence[str | list[Message] | FailedEpisode]) -> str | list[Message]:
    """Return what the environment adds to the prompt of a group."""
    openings = [opening for opening in opened if not isinstance(opening, FailedEpisode)] or [""]
    require(
        all(opening == openings[0] for opening in openings),
        "The environment begins two episodes of one row and seed differently: "
        f"{openings[0]!r:.80} and others. `reset` must be a function of row and seed.",
    )
    return openings[0]


class EpisodeListener:
    """Passes the turns of N rows to the environments, and encodes their observations."""

    def __init__(self, episodes: Episodes, requests: RolloutRequest, rows: list[PlayedRow]) -> None:
        self.episodes, self.rows = episodes, rows
        self.policy, self.tokenizer = requests.policy, requests.policy.tokenizer
        self.stop_token_ids, stops = requests.sampling.stop_token_ids, requests.stops
        self.cut = _keep_text if stops is None else stops.cut
        self.include_stop = requests.sampling.include_stop_str_in_output
        self.end_ids, self.eos_ids = requests.end_ids, requests.policy.eos_ids
        self.length = requests.uniforms.shape[1]
        self.max_turn_tokens = episodes.settings.max_turn_tokens
        self.over: dict[int, list[int] | None] = {}  # rows that need no answer
        self.asked: set[int] = set()

    def on_turn_end(self, row: int, ids: list[int], *, truncated: bool) -> None:
        state = self.rows[row]
        state.cut, state.closed, state.last_ids = truncated, ids[-1] in self.eos_ids, ids
        text = str(self.tokenizer.decode(ids[: len(ids) - (ids[-1] in self.end_ids)]))
        text = self.cut(text, True)
        state.add([{"role": "assistant", "content": text}], len(ids))
        if state.episode.failed:
            self.over[row] = None
            return
        self.asked.add(row)
        state.asked = time.perf_counter()
        with self.episodes.waiting():
            self.episodes.pool.send(row, text)

    def take_observations(self, *, wait: bool) -> dict[int, list[int] | None]:
        observations, self.over = self.over, {}
        with self.episodes.waiting():
            wait = wait and not observations and bool(self.asked)
            answers = self.episodes.pool.receive(wait=wait)
        self.asked -= answers.keys()
        self.episodes.failures.count(answers)
        for row, answer in answers.items():
            observations[row] = self._encode_answer(self.rows[row], answer)
        for row, ids in observations.items():
            if ids is None:
                self.episodes.pool.end(row)
        return observations

    def _encode_answer(
        self, row: PlayedRow, answer: StepResult | FailedEpisode
    ) -> list[int] | None:
        """Return the tokens of a row's observation; None: the episode is over."""
        settings, episode = self.episodes.settings, row.episode
        episode.seconds += time.perf_counter() - row.asked
        if isinstance(answer, FailedEpisode):
            episode.failed = answer.reason
            return None
        row.add_result(answer)
        is_cut = row.cut and not settings.close_truncated_turns
        if answer.done or is_cut or len(episode.turn_rewards) == settings.max_turns:
            return None
        # The chat template itself adds the missing end token of a truncated turn.
        add_end = row.cut and settings.turn_format == "inline"
        ids = [self.eos_ids[0]] if add_end else []
        ids += self._shorten(
            episode, self.episodes.turn_format.encode(answer.observation, row.closed)
        )
        row.full = row.used + len(ids) >= self.length
        if row.full:
            return None
        messages = answer.observation
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        row.add(messages, len(ids))
        return ids

    def _shorten(self, episode: Episode, ids: list[int]) -> list[int]:
        """Cut the middle of an observation that exceeds the token limit."""
        limit = self.episodes.settings.max_observation_tokens
        if len(ids) <= limit:
            return ids
        mark = list(self.tokenizer(CUT, add_special_tokens=False).input_ids)[: limit // 2]
        episode.observation_tokens_cut += len(ids) - limit + len(mark)
        head = (limit - len(mark) + 1) // 2
        tail = limit - len(mark) - head
        return ids[:head] + mark + ids[len(ids) - tail :]

    def complete_rollout(self, rollout: Rollout) -> Rollout:
        """Add episodes and texts to a rollout."""
        for row in self.rows:  # the last turn of a failed episode has no answer
            unanswered = len(row.episode.assistant_texts) - len(row.episode.turn_rewards)
            row.episode.turn_rewards += [None] * unanswered
        full = torch.tensor([row.full for row in self.rows]).to(rollout.truncated.device)
        texts = self.policy.completion_texts(
            [row.last_ids for row in self.rows], self.stop_token_ids
        )
        return replace(
            rollout,
            truncated=rollout.truncated | full,
            episodes=[row.episode for row in self.rows],
            completions=[self.cut(text, self.include_stop) for text in texts],
        )
