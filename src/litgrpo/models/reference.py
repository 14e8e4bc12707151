"""The frozen reference of the KL term: a copy, another model, or the policy without its adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from litgrpo.distributed.fsdp.units import gathered_root
from litgrpo.models.adapters import INITIAL, TRAINED, read_adapter, use_initial_adapter
from litgrpo.models.architectures import is_listed
from litgrpo.models.kernels.linear import list_linear_layers
from litgrpo.models.policy import Policy
from litgrpo.types import TokenLogprobs, TokenRows


class Reference(nn.Module, ABC):
    """Log-probabilities under a model that is not trained."""

    @property
    def computes_prompts_once(self) -> bool:
        """True if a prompt is computed once for all of its completions; see `Policy`."""
        return False

    @property
    def computes_elsewhere(self) -> bool:
        """True if its weights are on servers: all rows are requested at once, rounding may vary."""
        return False

    @abstractmethod
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        """Compute log-probabilities of completions, without gradient; see `Policy.logprobs`."""

    @abstractmethod
    def hidden_states(self, rows: TokenRows) -> Tensor:
        """Compute [M, C, E] hidden states for `head`, without gradient; no log-probabilities."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits [k, V] of its hidden states [k, E]; within `head_in_memory`."""

    def head_in_memory(self) -> AbstractContextManager[None]:
        """Return the context in which `head` may be called: sharded weights are gathered once."""
        return nullcontext()

    def check_can_mix(self, policy: Policy) -> None:
        """Check that the policy's weights can be mixed into the reference (`mix_in`)."""
        raise ValueError(
            "ReferenceSync cannot move the weights under LoRA adapters, which are the reference. "
            "Leave out lora, or the callback."
        )


class FrozenReference(Reference):
    """A separate frozen model: a copy of the initial policy, or any of the same vocabulary."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy.requires_grad_(False).eval()

    @property
    def computes_prompts_once(self) -> bool:
        return self.policy.computes_prompts_once

    def train(self, mode: bool = True) -> FrozenReference:
        return super().train(False)  # it stays in eval mode

    @torch.no_grad()
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        with self.policy.autocast():
            return self.policy.logprobs(rows, temperature=temperature)

    @torch.no_grad()
    def hidden_states(self, rows: TokenRows) -> Tensor:
        with self.policy.autocast():
            return self.policy.hidden_states(rows)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        with self.policy.autocast():
            return self.policy.head(hidden)

    def round_weights(self, dtype: torch.dtype) -> None:
        """Keep weights of linear layers in the precision of their products; see `round_linears`.

        From now on the reference computes in this precision, the policy's autocast, also if the
        trainer does not.
        """
        if round_linears(self.policy.bare_model, dtype):
            self.policy.autocast_dtype = dtype

    def head_in_memory(self) -> AbstractContextManager[None]:
        return gathered_root(self.policy)

    def check_can_mix(self, policy: Policy) -> None:
        shapes, policy_shapes = (
            {name: weight.shape for name, weight in model.named_parameters()}
            for model in (self.policy, policy)
        )
        if shapes != policy_shapes:
            raise ValueError(
                "ReferenceSync mixes the policy's weights into the reference, but the names or "
                "shapes of their weights differ. Leave out `reference` and `lora`, so that it is a "
                "copy of the initial policy, or leave out the callback."
            )

    @torch.no_grad()
    def mix_in(self, policy: Policy, alpha: float) -> None:
        """Set reference = (1 - alpha) * reference + alpha * policy (TR-DPO, arXiv:2404.09656)."""
        pairs = zip(self.policy.parameters(), policy.parameters(), strict=True)
        for reference_weight, policy_weight in pairs:
            reference_weight.lerp_(policy_weight.to(reference_weight.dtype), alpha)


@torch.no_grad()
def round_linears(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Round the weights of a frozen model's linear layers to the precision that autocast uses.

    Autocast rounds them in every product, so outputs are the same, bit for bit. Norms and
    embeddings, also one that is the head, are used with all their digits and stay as they are.
    Returns False if nothing changed: an unlisted model type may compute a layer without autocast.
    """
    if not is_listed(model):
        return False
    embedding: Any = model.get_input_embeddings()
    for layer in list_linear_layers(model):
        if layer.weight is not embedding.weight:
            for parameter in layer.parameters():
                parameter.data = parameter.data.to(dtype)
    return True


class BaseModelReference(Reference):
    """The policy with its LoRA adapter disabled: a reference that costs no memory."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        # In a tuple, so that the policy's weights are not registered a second time.
        self._policy = (policy,)

    @property
    def computes_prompts_once(self) -> bool:
        return self._policy[0].computes_prompts_once

    @torch.no_grad()
    def logprobs(self, rows: TokenRows, *, temperature: float = 1.0) -> TokenLogprobs:
        (policy,) = self._policy
        with self._without_training(policy.model):
            return policy.logprobs(rows, temperature=temperature)

    @torch.no_grad()
    def hidden_states(self, rows: TokenRows) -> Tensor:
        (policy,) = self._policy
        with self._without_training(policy.model):
            return policy.hidden_states(rows)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        (policy,) = self._policy
        if not hasattr(policy.bare_model.get_output_embeddings(), "base_layer"):
            return policy.head(hidden)  # no adapter on the head: nothing to switch
        with self._without_training(policy.model):
            return policy.head(hidden)

    def _without_training(self, model: Any) -> AbstractContextManager[None]:
        return model.disable_adapter()


class AdapterReference(BaseModelReference):
    """The policy's base model with another adapter, which is kept beside the trained one.

    It is the one that training started from (`lora.adapter_path`), or one that was trained
    elsewhere on the same base model.
    """

    def __init__(self, policy: Policy, folder: str) -> None:
        super().__init__(policy)
        read_adapter(policy.model, folder, INITIAL)
        policy.model.set_adapter(TRAINED)

    def _without_training(self, model: Any) -> AbstractContextManager[None]:
        return use_initial_adapter(model)
