"""The frozen reference that the policy is kept near to: a copy, another model, or the LoRA base."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from litgrpo.models.adapters import START, TRAINED, as_at_start, read_adapter
from litgrpo.models.policy import Policy
from litgrpo.types import TokenLogprobs, TokenRows


class Reference(nn.Module, ABC):
    """Log-probabilities under a model that does not learn."""

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt is read once for all of its completions; see `Policy`."""
        return False

    @abstractmethod
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        """Log-probabilities of completions, without gradient; see `Policy.logprobs`."""

    def check_follows(self, policy: Policy) -> None:
        """Make sure that the reference can take over the policy's weights.

        Raises:
            ValueError: it has others, or none of its own.
        """
        raise ValueError(
            "controllers.reference cannot move the weights under LoRA adapters, which are the "
            "reference. Leave out lora or controllers.reference."
        )


class FrozenModel(Reference):
    """Another policy, frozen: a copy of the start or any model with the same vocabulary.

    Args:
        policy: the policy to freeze.
    """

    def __init__(self, policy: Policy) -> None:
        """Freeze the policy."""
        super().__init__()
        self.policy = policy.requires_grad_(False).eval()

    @property
    def shares_prompts(self) -> bool:
        """As the frozen model."""
        return self.policy.shares_prompts

    def train(self, mode: bool = True) -> FrozenModel:
        """Stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        """Log-probabilities under the frozen model."""
        return self.policy.logprobs(rows, temperature=temperature)

    def check_follows(self, policy: Policy) -> None:
        """The weights must be the policy's, name for name and shape for shape."""
        mine, its = ({n: p.shape for n, p in m.named_parameters()} for m in (self.policy, policy))
        if mine != its:
            raise ValueError(
                "controllers.reference mixes the policy's weights into the reference, but theirs "
                "are not the same names and shapes. Leave out `reference` and `lora`, so that it "
                "is a copy of the start, or leave out controllers.reference."
            )

    @torch.no_grad()
    def follow(self, policy: Policy, share: float) -> None:
        """Go this share of the way to where the policy is now."""
        for mine, its in zip(self.policy.parameters(), policy.parameters(), strict=True):
            mine.lerp_(its.to(mine.dtype), share)


class AdapterOff(Reference):
    """The weights under the policy's LoRA adapters: a reference that costs no memory.

    Args:
        policy: the policy with adapters.
    """

    def __init__(self, policy: Policy) -> None:
        """Remember the policy without owning it."""
        super().__init__()
        # In a tuple, so that the policy's weights are not registered a second time.
        self._policy = (policy,)

    @property
    def shares_prompts(self) -> bool:
        """As the policy."""
        return self._policy[0].shares_prompts

    @torch.no_grad()
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        """Log-probabilities of the model as it is without what was learned."""
        (policy,) = self._policy
        with self._without_learned(policy.model):
            return policy.logprobs(rows, temperature=temperature)

    def _without_learned(self, model: Any) -> AbstractContextManager[None]:
        """Switches the adapters off."""
        return model.disable_adapter()


class AdapterAtStart(AdapterOff):
    """The policy's model with the adapter that training went on from, which is kept beside its own.

    Args:
        policy: the policy with adapters.
        folder: of the adapter.
    """

    def __init__(self, policy: Policy, folder: str) -> None:
        """Read the adapter a second time."""
        super().__init__(policy)
        read_adapter(policy.model, folder, START)
        policy.model.set_adapter(TRAINED)

    def _without_learned(self, model: Any) -> AbstractContextManager[None]:
        """Switches to the adapter as it was."""
        return as_at_start(model)
