"""Multi-turn episodes: settings, the record of an episode, and the rollout of a batch of them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
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
from litgrpo.types import PromptBatch, Rollout, Stats, pad_left

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
        """Check the ranges."""
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


@dataclass(frozen=True)
class Episode:
    """Record of the episode in one row of a rollout.

    Args:
        messages: in order; the policy's have the role `assistant`, observations any other.
        spans: columns [first, end) of each message in the row.
        calls: {tool: (calls, failed calls)}.
        log: {name: (sum, turns)} of what the environment logged.
        seconds: time spent waiting for the environment.
        failed: reason of an environment failure; "": none.
        observation_tokens_cut: tokens removed from observations by the limit.
        done: the environment ended the episode.
        turn_calls: tool calls in each answered turn.

    Example::

        Episode(
            messages=[
                {"role": "assistant", "content": "<call>6*7</call>"},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": "42"},
            ],
            spans=[(0, 9), (9, 14), (14, 17)],
            calls={"calculate": (1, 0)},
            done=True,
            turn_calls=[1, 0],
        )
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: dict[str, tuple[float, int]] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""
    observation_tokens_cut: int = 0
    done: bool = False
    turn_calls: list[int] = field(default_factory=list)

    @property
    def assistant_texts(self) -> list[str]:
        """Texts of the policy's turns."""
        return [each["content"] for each in self.messages if each["role"] == "assistant"]


@dataclass
class EpisodeRecord:
    """State of the episode in a row while it is played.

    Args:
        failed: reason of an environment failure; "": none.
        messages, spans, calls, log, observation_tokens_cut, turn_calls: as of `Episode`.
        rewards: of each turn; NaN if the environment abstained.
        states: environment state after each turn.
        used: tokens in the row.
        cut: a token limit ended its last turn.
        closed: its last token is an end token of the policy.
        full: its next observation did not fit into the row.
    """

    failed: str = ""
    messages: list[Message] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: dict[str, tuple[float, int]] = field(default_factory=dict)
    observation_tokens_cut: int = 0
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
        """Append messages that occupy the next columns."""
        self.messages += messages
        self.spans += [(self.used, self.used + length)] * len(messages)
        self.used += length

    def add_result(self, result: StepResult) -> None:
        """Add rewards, states, calls and logs of a turn."""
        self.rewards.append(math.nan if result.reward is None else float(result.reward))
        self.states.append(result.state)
        self.turn_calls.append(sum(calls for calls, _ in result.calls.values()))
        for name, (calls, failed) in result.calls.items():
            before = self.calls.get(name, (0, 0))
            self.calls[name] = before[0] + calls, before[1] + failed
        for name, value in result.log.items():
            total, turns = self.log.get(name, (0.0, 0))
            self.log[name] = total + float(value), turns + 1

    @property
    def episode(self) -> Episode:
        """Record for the rollout."""
        return Episode(**{each.name: getattr(self, each.name) for each in fields(Episode)})


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

    Args:
        rollout_key: key of the rollout.
        prompt: the prompt's position in its data set.

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
        """Sample episodes.

        Args:
            engine: samples the turns.
            requests: N rows.
            rollout_key: seeds the environments.

        Returns:
            The rollout with its episodes, and the rewards and states of their turns.

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
        assert rewards is not None
        failed = torch.tensor([bool(each.failed) for each in episodes])
        late = torch.tensor([each.failed.startswith("timed out") for each in episodes])
        # An environment that gives no turn rewards has no mean of them.
        total, valid = rewards.nansum(1).cpu(), ~failed & ~rewards.isnan().all(1).cpu()
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
            calls = torch.tensor([each.calls.get(tool, (0, 0)) for each in episodes]).float()
            stats[f"tools/{tool}_calls"], stats[f"tools/{tool}_failed"] = calls.mean(0)
        return {name: value.float() for name, value in stats.items()}


@dataclass
class Episodes(EpisodeRunner):
    """Plays a rollout's rows as episodes of an environment.

    Args:
        pool: plays the environments.
        turn_format: encodes observations.
        settings: limits.
        opener: renders a prompt with what an environment adds to it.
        tools: names of the tools that the policy has, for statistics.
    """

    pool: EpisodePool
    turn_format: TurnFormat
    settings: EpisodeSettings
    opener: Opener
    tools: Sequence[str] = ()
    waited: float = field(default=0.0, init=False)
    failures: EpisodeFailures = field(default_factory=EpisodeFailures, init=False)

    def play(
        self, engine: RolloutEngine, requests: RolloutRequest, rollout_key: RolloutKey
    ) -> Rollout:
        """See `EpisodeRunner.play`."""
        starts = self.starts(requests, rollout_key)
        self.failures.reset(starts)
        with self.waiting():
            opened = self.pool.reset(starts)
        self.failures.count(dict(enumerate(opened)))
        failures = [""] * len(opened)
        for row, failed in [
            (n, each) for n, each in enumerate(opened) if isinstance(each, FailedEpisode)
        ]:
            failures[row] = failed.reason
        prompts = self._extend_prompts(requests, opened, failures)
        listener = EpisodeListener(
            self, requests, [EpisodeRecord(failed=each) for each in failures]
        )
        # Rows beyond the episodes that play at once would only wait.
        limits = [rows for rows in (requests.max_rows, self.pool.max_parallel) if rows is not None]
        rows = min(limits, default=None)
        rollout = engine.generate(
            replace(requests, prompts=prompts, listener=listener, max_rows=rows)
        )
        return listener.complete_rollout(replace(rollout, prompts=prompts))

    def close(self) -> None:
        """See `EpisodeRunner.close`."""
        self.pool.close()

    def _extend_prompts(
        self,
        requests: RolloutRequest,
        opened: Sequence[str | list[Message] | FailedEpisode],
        failures: list[str],
    ) -> PromptBatch:
        """Append the environment's openings to the prompts.

        Prompts that become too long are recorded in `failures`.
        """
        prompts, size = requests.prompts, requests.group_size
        groups = [slice(first, first + size) for first in range(0, len(opened), size)]
        added = [_common_opening(opened[group]) for group in groups]
        if not any(added):
            return prompts
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        texts, rows = list(prompts.prompts), [ids[mask].tolist() for ids, mask in pairs]
        for number in [number for number, more in enumerate(added) if more]:
            try:
                rows[number] = self.opener(prompts, number, added[number])
            except PromptDropped as error:
                failures[groups[number]] = [str(error)] * size
            texts[number] = str(requests.policy.tokenizer.decode(rows[number]))
        padded = pad_left(rows, requests.policy.pad_id)
        device = prompts.prompt_ids.device
        longer: dict[str, Any] = {"prompts": texts}
        longer |= {"prompt_ids": padded[0].to(device), "prompt_mask": padded[1].to(device)}
        return replace(prompts, **longer)


def _keep_text(text: str, include: bool) -> str:
    """Return a text unchanged, for runs without stop strings."""
    return text


def _common_opening(opened: Sequence[str | list[Message] | FailedEpisode]) -> str | list[Message]:
    """Return what the environment adds to the prompt of a group."""
    said = [each for each in opened if not isinstance(each, FailedEpisode)] or [""]
    require(
        all(each == said[0] for each in said),
        "The environment begins two episodes of one row and seed differently: "
        f"{said[0]!r:.80} and others. `reset` must be a function of row and seed.",
    )
    return said[0]


class EpisodeListener:
    """Passes turns to the environments, and encodes their observations.

    Args:
        episodes: pool, turn_format and limits.
        requests: of the rollout.
        rows: N records.
    """

    def __init__(
        self, episodes: Episodes, requests: RolloutRequest, rows: list[EpisodeRecord]
    ) -> None:
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
        """See `TurnListener.on_turn_end`."""
        record = self.rows[row]
        record.cut, record.closed, record.last_ids = truncated, ids[-1] in self.eos_ids, ids
        said = str(self.tokenizer.decode(ids[: len(ids) - (ids[-1] in self.end_ids)]))
        said = self.cut(said, True)
        record.add([{"role": "assistant", "content": said}], len(ids))
        if record.failed:
            self.over[row] = None
            return
        self.asked.add(row)
        record.asked = time.perf_counter()
        with self.episodes.waiting():
            self.episodes.pool.send(row, said)

    def take_observations(self, *, wait: bool) -> dict[int, list[int] | None]:
        """See `TurnListener.take_observations`."""
        found, self.over = self.over, {}
        with self.episodes.waiting():
            answers = self.episodes.pool.receive(wait=wait and not found and bool(self.asked))
        self.asked -= answers.keys()
        self.episodes.failures.count(answers)
        found |= {row: self._encode_answer(row, answer) for row, answer in answers.items()}
        for row in [row for row, ids in found.items() if ids is None]:
            self.episodes.pool.end(row)
        return found

    def _encode_answer(self, row: int, answer: StepResult | FailedEpisode) -> list[int] | None:
        """Return the tokens of a row's observation; None: the episode is over."""
        record, settings = self.rows[row], self.episodes.settings
        record.seconds += time.perf_counter() - record.asked
        if isinstance(answer, FailedEpisode):
            record.failed = answer.reason
            return None
        record.add_result(answer)
        record.done = answer.done
        cut = record.cut and not settings.close_truncated_turns
        if answer.done or cut or len(record.rewards) == settings.max_turns:
            return None
        # The chat template itself adds the missing end token of a truncated turn.
        add_end = record.cut and settings.turn_format == "inline"
        closing = [self.eos_ids[0]] if add_end else []
        said = self.episodes.turn_format.encode(answer.observation, record.closed)
        ids = closing + self._shorten(record, said)
        record.full = record.used + len(ids) >= self.length
        if record.full:
            return None
        texts = isinstance(answer.observation, str)
        messages = (
            [{"role": "user", "content": answer.observation}] if texts else answer.observation
        )
        record.add(messages, len(ids))  # type: ignore[arg-type]
        return ids

    def _shorten(self, record: EpisodeRecord, ids: list[int]) -> list[int]:
        """Cut the middle of an observation that exceeds the token limit."""
        most = self.episodes.settings.max_observation_tokens
        if len(ids) <= most:
            return ids
        mark = list(self.tokenizer(CUT, add_special_tokens=False).input_ids)[: most // 2]
        record.observation_tokens_cut += len(ids) - most + len(mark)
        first = (most - len(mark) + 1) // 2
        last = most - len(mark) - first
        return ids[:first] + mark + ids[len(ids) - last :]

    def complete_rollout(self, rollout: Rollout) -> Rollout:
        """Add episodes, rewards, states and texts to a rollout."""
        turns = max(len(record.assistant_texts) for record in (each.episode for each in self.rows))
        rewards = torch.full((len(self.rows), max(1, turns)), torch.nan, dtype=torch.float64)
        for row, record in enumerate(self.rows):
            rewards[row, : len(record.rewards)] = torch.tensor(record.rewards, dtype=torch.float64)
        full = torch.tensor([record.full for record in self.rows]).to(rollout.truncated.device)
        lasts = [record.last_ids for record in self.rows]
        texts = self.policy.completion_texts(lasts, self.stop_token_ids)
        texts = [self.cut(text, self.include_stop) for text in texts]
        return replace(
            rollout,
            truncated=rollout.truncated | full,
            turn_rewards=rewards,
            turn_states=[record.states for record in self.rows],
            episodes=[record.episode for record in self.rows],
            completions=texts,
        )
