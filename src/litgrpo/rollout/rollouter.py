"""Prompts in, sampled completions with their texts out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

from litgrpo.distributed.device import Clock, timed, with_halving
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import Episodes, RolloutKey
from litgrpo.rollout.sampling import Purpose, Sampling, draw_uniforms
from litgrpo.rollout.stop_sequences import StopStrings, check_stop_tokens
from litgrpo.types import PromptBatch, RewardTable, Rollout, Stats


class PendingTable(Protocol):
    """Rewards that are being computed."""

    def wait(self) -> RewardTable:
        """Return the rewards, when they are known."""


class AllGroups:
    """Learns from every group, informative or not; see `DynamicSampling`, which does not."""

    def connect(self, loader: Any) -> None:
        """No further prompts are needed."""

    def replace_uninformative(
        self, rollout: Rollout, pending: PendingTable, iteration: int
    ) -> tuple[Rollout, PendingTable, Stats]:
        """The rollout and its rewards, which are not waited for, and nothing to log."""
        return rollout, pending, {}


@dataclass
class Rollouter:
    """Samples groups of completions.

    Args:
        policy: samples.
        group_size: completions of each prompt in training, G.
        max_completion_length: tokens of a completion at most, C.
        engine: computes rollouts.
        episodes: plays completions as episodes of an environment; None: each is one turn.
        sampling: temperature and filters in training.
        seed: names the random numbers of all rollouts.
        clock: counts the seconds.
        max_rows: rows that decode at once at most, where memory was short; None: as the engine.
    """

    policy: Policy
    group_size: int
    max_completion_length: int
    engine: RolloutEngine = field(default_factory=LocalEngine)
    episodes: Episodes | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    max_rows: int | None = None
    _sampled_tokens: int = field(default=0, init=False)
    _synced: int = field(default=-1, init=False)

    @timed("time/rollout_s")
    def generate(
        self,
        prompts: PromptBatch,
        purpose: Purpose,
        iteration: int = 0,
        *,
        attempt: int = 0,
        group_size: int | None = None,
        sampling: Sampling | None = None,
    ) -> Rollout:
        """Sample completions and decode them.

        Args:
            prompts: B prompts.
            purpose: names the stream of random numbers; all but training use the same numbers in
                every iteration.
            iteration: number of finished iterations.
            attempt: number of the resampling of dynamic sampling.
            group_size: completions of each prompt; None: as in training.
            sampling: temperature and filters; None: as in training. Completions end as in training.

        Returns:
            Rollout of N = B * G completions with their texts.

        Raises:
            ValueError: the batch is not one of prompts.
        """
        if not isinstance(prompts, PromptBatch):
            raise ValueError(
                f"The data module gave a {type(prompts).__name__}, but completions are sampled for "
                "prompts alone. Use litgrpo.PromptData."
            )
        policy, stops = self.policy, self.stop_strings
        named = RolloutKey(self.seed, purpose, iteration, attempt)
        requests = self.requests(prompts, named, group_size, sampling)
        policy.eval()
        if iteration != self._synced:
            self.engine.sync_weights(self.policy, iteration)
            self._synced = iteration
        with self.policy.autocast():
            rollout = self._within_memory(requests, named)
        if purpose == "train":
            self._sampled_tokens += int(rollout.lengths.sum())
        decode = partial(policy.tokenizer.batch_decode, skip_special_tokens=True)
        texts = rollout.completions or decode(rollout.token_lists())
        if stops is not None:
            texts = stops.cut_all(texts, rollout, self.sampling.include_stop_str_in_output)
        return replace(rollout, completions=texts, policy_version=iteration)

    def requests(
        self,
        prompts: PromptBatch,
        named: RolloutKey,
        group_size: int | None,
        sampling: Sampling | None,
    ) -> RolloutRequest:
        """What the engine is asked for the rollout of a name; see `generate`."""
        group_size = self.group_size if group_size is None else group_size
        size, stops = (group_size, self.max_completion_length), self.stop_strings
        uniforms = draw_uniforms(*named[:3], prompts.index, *size, attempt=named.attempt)
        sampling = (sampling or self.sampling).ending_as(self.sampling)
        return RolloutRequest(self.policy, prompts, group_size, uniforms, sampling, stops=stops)

    def episode_stats(self, rollout: Rollout) -> Stats:
        """What to log of a rollout's episodes."""
        return {} if self.episodes is None else self.episodes.stats(rollout)

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """Where completions end besides the end token; None where there is no such text."""
        stops, policy = self.sampling.stops, self.policy
        check_stop_tokens(self.sampling.stop_token_ids, policy.vocab_size)
        return StopStrings(stops, policy.tokenizer, policy.vocab_size) if stops else None

    def forget_weights(self) -> None:
        """Hand the weights to the engine again before the next rollout."""
        self._synced = -1

    def take_sampled_tokens(self) -> int:
        """Tokens that this process sampled for training since the last call."""
        tokens, self._sampled_tokens = self._sampled_tokens, 0
        return tokens

    def _within_memory(self, requests: RolloutRequest, named: RolloutKey) -> Rollout:
        """The rollout, repeated with half the rows at once while memory is short.

        The completions stay the same: no row depends on those beside it. Episodes begin anew.
        """
        at_once, stops = requests.num_rows, requests.stops

        def attempt(max_rows: int | None) -> Rollout:
            nonlocal at_once
            limits = (requests.num_rows, self.engine.row_limit, max_rows)
            at_once = min(rows for rows in limits if rows is not None)
            asked = replace(requests, max_rows=max_rows)
            if self.episodes is not None:  # turns end at stop strings, not rows
                return self.episodes.play(self.engine, asked, named)
            rollout = self.engine.generate(asked)
            if stops is None:
                return rollout
            shapes = self.engine.static_shapes
            return stops.cut_tokens(rollout, self.policy.pad_id, static_shapes=shapes)

        return with_halving(
            attempt,
            rows=lambda: at_once,
            limit=self.max_rows,
            on_halved=partial(setattr, self, "max_rows"),
            what="the rollout",
            setting="engine.max_rows",
            unchanged="the completions",
            remedy="lower model.max_completion_length, data.max_prompt_length or model.group_size",
            least=requests.group_size,
        )
