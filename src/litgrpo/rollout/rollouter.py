"""Sample groups of completions for a batch of prompts."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

from litgrpo.distributed.device import Clock, time_phase
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.memory import RowLimit
from litgrpo.models.limits import check_rope_length, find_rope_switch
from litgrpo.models.policy import Policy
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.episodes import EpisodeRunner, RolloutKey
from litgrpo.rollout.sampling import Purpose, Sampling, draw_uniforms
from litgrpo.rollout.stop_sequences import StopStrings, check_stop_tokens
from litgrpo.types import PromptBatch, Rollout, Stats


def rollout_row_limit() -> RowLimit:
    """Return the limit on rows decoded at once, lowered after out-of-memory errors."""
    remedy = "lower model.max_completion_length, data.max_prompt_length or model.group_size"
    return RowLimit("model.engine.max_rows", remedy)


@dataclass
class PendingRollout:
    """A rollout that is being sampled."""

    iteration: int  # that trains on it
    future: Future[Rollout]  # without texts; from a checkpoint, of the prompts of all ranks


@dataclass
class PendingRollouts:
    """Rollouts that are sampled in the background, which others must not disturb."""

    queue: deque[PendingRollout] = field(default_factory=deque)  # in the order of iterations
    # The rollout that the current iteration trains on. A checkpoint holds it as well: if a signal
    # interrupts the iteration, the resumed run repeats it with the same rollout.
    current: PendingRollout | None = None
    in_flight: bool = False  # the engine gets new weights while it samples

    @property
    def with_current(self) -> list[PendingRollout]:
        """The current rollout, if there is one, and those in the queue."""
        return ([] if self.current is None else [self.current]) + list(self.queue)

    def wait(self) -> None:
        """Wait until nothing is being sampled.

        Raises:
            ServerFailure: the engine's servers failed.
        """
        for rollout in self.queue:
            rollout.future.result()

    def finish(self) -> None:
        """Wait until nothing is being sampled; failures do not matter any more."""
        wait([rollout.future for rollout in self.queue])


@dataclass
class Rollouter:
    """Samples groups of completions with an engine, and decodes them to text.

    Args:
        policy: generates.
        group_size: completions per prompt in training, G.
        max_completion_length: limit on the tokens of a completion, C.
        engine: computes rollouts.
        episodes: generates completions as multi-turn episodes; None: each is a single turn.
        sampling: temperature and filters in training.
        seed: of the random numbers of all rollouts.
        clock: measures the phases.
        row_limit: rows decoded at once after out-of-memory errors.
        pending: rollouts of a source that samples in the background.
    """

    policy: Policy
    group_size: int
    max_completion_length: int
    engine: RolloutEngine = field(default_factory=LocalEngine)
    episodes: EpisodeRunner | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    clock: Clock = field(default_factory=Clock)
    row_limit: RowLimit = field(default_factory=rollout_row_limit)
    pending: PendingRollouts = field(default_factory=PendingRollouts)
    generated_tokens: int = field(default=0, init=False)  # in this iteration, by this rank
    _synced_iteration: int | None = field(default=None, init=False)  # the engine's weights

    @time_phase("time/rollout_s")
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
            purpose: seeds the random numbers; only `train` draws new ones in each iteration.
            iteration: number of finished iterations.
            attempt: attempt of dynamic sampling; 0 is the first rollout.
            group_size: completions per prompt; None: as in training.
            sampling: temperature and filters; None: as in training. Stop sequences are always those
                of training.

        Returns:
            Rollout of N = B * G completions with their texts.
        """
        key = RolloutKey(self.seed, purpose, iteration, attempt)
        request = self.build_request(prompts, key, group_size, sampling)
        if self.episodes is not None:  # the environments of a rollout are reset for the next one
            self.pending.wait()
        self.prepare(iteration)
        return self.finish(
            replace(self.run_engine(request, key), policy_version=iteration), purpose
        )

    def finish(self, rollout: Rollout, purpose: Purpose = "train") -> Rollout:
        """Return a rollout with its texts; count the tokens of training."""
        if purpose == "train":
            self.count_tokens(rollout)
        return replace(rollout, completions=self._decode(rollout))

    def count_tokens(self, rollout: Rollout) -> None:
        """Count the tokens of a rollout as generated in training."""
        self.generated_tokens += int(rollout.lengths.sum())

    def build_request(
        self,
        prompts: PromptBatch,
        key: RolloutKey,
        group_size: int | None = None,
        sampling: Sampling | None = None,
    ) -> RolloutRequest:
        """Build the engine's request for a rollout, with one random number per token.

        Raises:
            ValueError: the batch does not consist of prompts.
        """
        if not isinstance(prompts, PromptBatch):
            raise ValueError(
                f"The data module yields {type(prompts).__name__}, but GRPO needs prompts without "
                "completions. Use litgrpo.PromptData."
            )
        group_size = self.group_size if group_size is None else group_size
        size = (group_size, self.max_completion_length)
        if find_rope_switch(self.policy.bare_model.config) is not None:
            longest = int(prompts.prompt_mask.sum(1).max()) + self.max_completion_length
            check_rope_length(self.policy, longest)
        uniforms = draw_uniforms(
            key.seed, key.purpose, key.iteration, prompts.index, *size, attempt=key.attempt
        )
        sampling = (sampling or self.sampling).ending_as(self.sampling)
        return RolloutRequest(
            self.policy, prompts, group_size, uniforms, sampling, stops=self.stop_strings
        )

    def prepare(self, iteration: int) -> None:
        """Hand the policy's weights to an engine that has its own copy, once per iteration.

        Wait for pending rollouts before, unless the engine may get weights while it samples.
        """
        self.policy.eval()
        if iteration != self._synced_iteration:
            if self.pending.in_flight:
                self.engine.update_in_flight(self.policy, iteration)
            else:
                self.pending.wait()
                self.engine.sync_weights(self.policy, iteration)
            self._synced_iteration = iteration

    def forget_weights(self) -> None:
        """Hand the weights to the engine again before the next rollout, as after a checkpoint."""
        self._synced_iteration = None

    def run_engine(self, request: RolloutRequest, key: RolloutKey) -> Rollout:
        """Generate the tokens of a rollout, with fewer rows at once after out-of-memory errors.

        The completions do not change: no row depends on the rows beside it. Episodes start again.
        """
        engine = self.engine
        # Sharded weights (FSDP) are gathered for the whole rollout: rows end at different tokens,
        # so ranks cannot meet for collectives within it. Engines with own weights need none.
        weights = gathered(self.policy) if engine.samples_in == "trainer" else nullcontext()
        rows_in_use = request.num_rows

        def generate_rows(max_rows: int | None) -> Rollout:
            nonlocal rows_in_use
            limits = (request.num_rows, engine.max_rows, max_rows)
            rows_in_use = min(rows for rows in limits if rows is not None)
            limited = replace(request, max_rows=max_rows)
            if self.episodes is not None:  # stop sequences end turns, not episodes
                return self.episodes.play(engine, limited, key)
            rollout = engine.generate(limited)
            if request.stops is not None:
                shapes = "static shapes" in engine.allows
                rollout = request.stops.cut_tokens(
                    rollout, self.policy.pad_id, static_shapes=shapes
                )
            return rollout

        with weights, self.policy.autocast():
            return self.row_limit.run(generate_rows, lambda: rows_in_use, least=request.group_size)

    def _decode(self, rollout: Rollout) -> list[str]:
        if rollout.completions:  # episodes have texts already
            return list(rollout.completions)
        stops = self.sampling.stop_token_ids
        texts = self.policy.completion_texts(rollout.token_lists(), stops)
        if self.stop_strings is not None:
            keep = self.sampling.include_stop_str_in_output
            texts = self.stop_strings.cut_all(texts, rollout, keep)
        return texts

    def stats(self, rollout: Rollout) -> Stats:
        """Return what to log about the episodes of a rollout."""
        return {} if self.episodes is None else self.episodes.stats(rollout)

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """Stop sequences of completions; None if only the end token ends them."""
        stops, policy = self.sampling.stops, self.policy
        check_stop_tokens(self.sampling.stop_token_ids, policy.vocab_size)
        return StopStrings(stops, policy.tokenizer, policy.vocab_size) if stops else None
