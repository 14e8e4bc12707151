"""Interface of rollout engines, their request, and the callback between turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.stop_sequences import StopStrings
from litgrpo.types import PromptBatch, Rollout


class Listener(ABC):
    """Hears the turns of an engine's rows while it decodes, and says what each row hears.

    `max_turn_tokens`: a turn ends at so many tokens, too.
    """

    max_turn_tokens: int

    @abstractmethod
    def ended(self, row: int, ids: list[int], *, cut: bool) -> None:
        """A turn of a row has ended; what it hears comes by `heard`.

        Args:
            row: its number, 0 to N - 1.
            ids: the tokens of the turn, its end token included.
            cut: the limit of tokens ended it.
        """

    @abstractmethod
    def heard(self, *, wait: bool) -> dict[int, list[int] | None]:
        """What came since the last call.

        Args:
            wait: until there is something, where a row has not been answered.

        Returns:
            {row: tokens that it hears, one or more, before its next turn; None: the row is over}.
            There is room for at least one token after them.
        """


@dataclass(frozen=True)
class RolloutRequest:
    """What an engine is asked: G completions of each of B prompts.

    Args:
        policy: whose weights sample, in eval mode; an engine elsewhere takes token ids alone.
        prompts: B prompts.
        group_size: completions of each prompt, G.
        uniforms: [N, C] one number in [0, 1) for a token; C: tokens of the longest completion.
        sampling: temperature and filters.
        max_rows: rows that decode at once at most, where memory was short; None: no such limit.
        stops: texts at which an engine may end completions; the rest is cut off in any case.
        listener: rows have turns: what ends a completion ends one of them, and the listener says
            what the row hears before the next. None: every completion is one turn.
    """

    policy: Policy
    prompts: PromptBatch
    group_size: int
    uniforms: Tensor
    sampling: Sampling
    max_rows: int | None = None
    stops: StopStrings | None = None
    listener: Listener | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion: the model's and those of the sampling."""
        return tuple(sorted({*self.policy.eos_ids, *self.sampling.stop_token_ids}))

    @property
    def num_rows(self) -> int:
        """Completions, N."""
        return len(self.uniforms)


class RolloutEngine(ABC):
    """Turns prompts into completions.

    The result is a pure function of weights, prompts, uniforms and sampling: up to ties at
    rounding, every exact engine returns the same tokens.
    """

    @property
    def exact_logprobs(self) -> bool:
        """Whether its log-probabilities are the policy's own, up to rounding, and uniforms count.

        If not, the learner computes those before the update itself and corrects for the sampler.
        """
        return True

    @property
    def samples_elsewhere(self) -> bool:
        """Whether `generate` reads no weight of the policy, so that they may change meanwhile."""
        return False

    @property
    def static_shapes(self) -> bool:
        """Whether its shapes depend on the shapes of the requests alone, as compilers need."""
        return False

    @property
    def row_limit(self) -> int | None:
        """Rows that decode at the same time at most, by its own settings; None: all."""
        return None

    @property
    def supports_episodes(self) -> bool:
        """Whether it takes requests with a listener."""
        return False

    def sync_weights(self, policy: Policy, version: int) -> None:  # noqa: B027 (optional)
        """Take over the policy's weights; engines that sample with the policy itself need not.

        Args:
            policy: has the new weights.
            version: number of finished iterations; the rollouts that follow are of this version.
        """

    @abstractmethod
    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; no gradient is kept.

        Returns:
            The rollout, completion texts not yet decoded. Where rows have turns, what they heard
            is in `completion_mask` and not in `loss_mask`, its log-probabilities are 0, and `turns`
            numbers the tokens that were spoken.
        """
