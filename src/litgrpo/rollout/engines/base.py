"""Interface of rollout engines, their request, and the callback between turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.types import PromptBatch, Rollout

Place = Literal["trainer", "servers", "colocated"]
Feature = Literal["episodes", "in-flight updates", "static shapes"]
TRAINER: Place = "trainer"
NOTHING: frozenset[Feature] = frozenset()


class TurnListener(Protocol):
    """Receives the turns of an engine's rows while it decodes, and supplies observations.

    `max_turn_tokens`: a turn ends after at most this many tokens.
    """

    max_turn_tokens: int

    def on_turn_end(self, row: int, ids: list[int], *, truncated: bool) -> None:
        """Start to compute the observation that follows a turn.

        Args:
            row: number of the row, 0 to N - 1.
            ids: tokens of the turn, including its end token.
            truncated: the token limit ended the turn.
        """

    def take_observations(self, *, wait: bool) -> dict[int, list[int] | None]:
        """Take the observations that have arrived since the last call.

        Args:
            wait: if a row is waiting for its observation, block until one arrives.

        Returns:
            {row: tokens of the observation, at least one; None: the episode is over}. At
            least one column of the row is free after these tokens.
        """


@dataclass(frozen=True)
class RolloutRequest:
    """Everything that an engine needs to sample G completions for each of B prompts.

    Args:
        policy: model to sample from, in eval mode; a remote engine reads its token ids only.
        prompts: B prompts.
        group_size: completions per prompt, G.
        uniforms: [N, C] one random number in [0, 1) per token, from which
            `sampling.draw_tokens` draws the token by inverting the cumulative distribution; C is
            the maximal completion length.
        sampling: temperature and filters.
        max_rows: decode at most this many rows at once, after an out-of-memory error; None: no
            limit.
        stops: texts at which an engine may end completions; the rest is cut off in any case.
        listener: makes completions multi-turn: what would end a completion ends a turn, and the
            listener supplies the observation. None: every completion is a single turn.
        row_limits: N limits on the tokens of single-turn rows, each at most C. An engine may
            generate more, which the caller cuts off. None: every row has the limit C.

    Example::

        uniforms = draw_uniforms(seed, "train", iteration, prompts.index, 8, 256)
        request = RolloutRequest(policy, prompts, 8, uniforms, Sampling(temperature=0.9))
        rollout = LocalEngine().generate(request)  # 8 completions of at most 256 tokens per prompt
    """

    policy: Policy
    prompts: PromptBatch
    group_size: int
    uniforms: Tensor
    sampling: Sampling
    max_rows: int | None = None
    stops: StopStrings | None = None
    listener: TurnListener | None = None
    row_limits: list[int] | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """End tokens of a completion: the model's `eos_ids`, and `stop_token_ids` of `sampling`."""
        return tuple(sorted({*self.policy.eos_ids, *self.sampling.stop_token_ids}))

    @cached_property
    def is_end(self) -> Tensor:
        """[V] True for tokens that end a completion or a turn."""
        is_end = torch.isin(torch.arange(self.policy.vocab_size), torch.tensor(self.end_ids))
        return is_end.to(self.uniforms.device)

    @property
    def num_rows(self) -> int:
        """Number of completions, N."""
        return len(self.uniforms)


class RolloutEngine(ABC):
    """Samples completions for prompts.

    Engines with `exact_logprobs` return the same tokens for the same weights, prompts, uniforms and
    sampling, up to ties at rounding. A subclass sets `samples_in` and `allows` on the class, where
    `plan` reads them without building an engine.

    Example: an engine in 20 lines is in docs/project/contributing.md.
    """

    # Without annotations, whose names jsonargparse would look up in the modules of subclasses.
    # Where it samples: with the policy itself; on servers, so training may update the policy
    # meanwhile; or with a copy of the weights on the device of the trainer.
    samples_in = TRAINER
    # `episodes`: requests with a listener. `in-flight updates`: new weights while it generates.
    # `static shapes`: all tensor shapes follow from the request's shapes, as XLA needs.
    allows = NOTHING

    @property
    def exact_logprobs(self) -> bool:
        """True if sampler log-probs equal the policy's up to rounding and uniforms are used.

        If not, an importance correction is added to the objective, and the learner computes
        log-probs before the update if there are several optimizer steps per rollout.
        """
        return True

    @property
    def max_rows(self) -> int | None:
        """Return the configured number of rows decoded at once; None: all."""
        return None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the servers that sample."""
        return ()

    def sync_weights(self, policy: Policy, version: int) -> None:  # noqa: B027 (optional)
        """Receive updated weights; a no-op for engines that sample with the policy itself.

        Args:
            policy: has the new weights.
            version: number of finished iterations; the next rollouts have this version.
        """

    def update_in_flight(self, policy: Policy, version: int) -> None:  # noqa: B027 (optional)
        """Receive updated weights while rollouts are generated (`InFlight`).

        Their rows continue with the new weights, and `Rollout.token_versions` has the version of
        each token.

        Args:
            policy: has the new weights.
            version: number of finished iterations.
        """

    @abstractmethod
    def generate(self, request: RolloutRequest) -> Rollout:
        """Sample completions, without gradients.

        Returns:
            The rollout, completion texts not yet decoded. In multi-turn rows, observation tokens
            are in `completion_mask` but not in `loss_mask`, their log-probs are 0, and `turns`
            numbers the generated tokens by turn.
        """
