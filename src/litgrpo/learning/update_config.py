"""Options of the update: epochs, mini-batches, micro-batches, gradient clipping."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least
from litgrpo.learning.optim import check_max_grad_norm
from litgrpo.tensors import FEW_LOGITS

# More tokens at once are not faster, unless the model is so small that calling it costs more than
# its arithmetic. Then they go up to the memory that the backward pass may want kept: what it keeps
# of a token was measured as 8.5 bytes for each output of the linear layers (float32).
LEAST_TOKENS, KEPT_BYTES, BYTES_PER_OUTPUT = 2048, 512 * 2**20, 8.5
# On a device with its own memory each call has a fixed cost, so tokens and logits follow what is
# free: at most this fraction of it for activations, and this one for the tensors of the logits, of
# which a chunk of many tokens has half (`head_chunk`). Each chunk also casts the head's weight and
# adds its gradient, 22 GB of traffic with 2B parameters.
ACTIVATIONS_FRAC, LOGITS_FRAC, MOST_TOKENS, MOST_LOGITS = 3 / 4, 1 / 4, 2**16, 2**29
BYTES_PER_LOGIT = 12  # three float32 tensors in the backward pass


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes of a pass that follow the free memory of a device.

    Powers of two, so that a little more or less free memory gives the same sizes.

    Args:
        tokens: tokens of a micro-batch (`micro_batch_tokens: auto`).
        logits: logits that exist at once.

    Example:
        >>> DeviceSizes.of(free_bytes=60 * 2**30, bytes_per_token=2**20)
        DeviceSizes(tokens=32768, logits=536870912)
    """

    tokens: int
    logits: int

    @staticmethod
    def of(free_bytes: int, bytes_per_token: float) -> DeviceSizes:
        """Return the largest sizes that fit.

        Args:
            free_bytes: free memory while the weights, gradients and optimizer states exist.
            bytes_per_token: memory that the backward pass wants kept of a token.
        """
        tokens = round_down(ACTIVATIONS_FRAC * free_bytes / bytes_per_token)
        logits = round_down(LOGITS_FRAC * free_bytes / BYTES_PER_LOGIT)
        return DeviceSizes(
            min(max(tokens, LEAST_TOKENS), MOST_TOKENS), min(max(logits, FEW_LOGITS), MOST_LOGITS)
        )


def round_down(number: float) -> int:
    """Return the largest power of two that is at most a number, at least 1."""
    return 2 ** max(0, int(number).bit_length() - 1)


@check_field_types
@dataclass(frozen=True)
class UpdateConfig:
    """Options of the update: epochs, mini-batches, micro-batches, gradient clipping.

    Args:
        epochs_per_rollout: passes over the rollout.
        num_mini_batches: optimizer steps of each pass; whole groups are distributed evenly over
            the steps.
        micro_batch_size: completions that go through the model at once; only memory and speed
            depend on it, the gradient does not. None sets no limit.
        micro_batch_tokens: tokens that go through the model at once; a prompt that its completions
            share counts once, otherwise padding counts as well. "auto": on a CPU 2,048, or with
            a small model as many as need at most 512 MiB of activations; on a GPU 2,048 to 65,536,
            as many as fit into its free memory by estimate, decided once per run. None sets no
            limit.
        max_grad_norm: gradients are scaled down to this norm; None leaves them.

    Example:
        >>> UpdateConfig(epochs_per_rollout=2, num_mini_batches=4).num_steps
        8
    """

    epochs_per_rollout: int = 1
    num_mini_batches: int = 1
    micro_batch_size: int | None = None
    micro_batch_tokens: int | Literal["auto"] | None = "auto"
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("epochs_per_rollout", "num_mini_batches", "micro_batch_size"):
            at_least(f"model.update.{name}", getattr(self, name), 1)
        at_least("model.update.micro_batch_tokens", self.max_tokens, 1)
        check_max_grad_norm("model.update.max_grad_norm", self.max_grad_norm)

    @cached_property
    def max_tokens(self) -> int | None:
        """`micro_batch_tokens` as a number; "auto" is its smallest value."""
        return LEAST_TOKENS if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    def resolve_auto(
        self, linear_outputs: int, *, sizes: DeviceSizes | None = None
    ) -> UpdateConfig:
        """Return these options with "auto" replaced by a number that fits the model.

        Args:
            linear_outputs: numbers that the model's linear layers compute for each token.
            sizes: sizes that follow the device's memory; None: a CPU.
        """
        if self.micro_batch_tokens != "auto":
            return self
        if sizes is not None:
            return replace(self, micro_batch_tokens=sizes.tokens)
        bytes_per_token = BYTES_PER_OUTPUT * linear_outputs
        tokens = max(LEAST_TOKENS, int(KEPT_BYTES / bytes_per_token))
        return replace(self, micro_batch_tokens=tokens)

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of one iteration."""
        return self.epochs_per_rollout * self.num_mini_batches

    def count_steps(self, num_prompts: int | None) -> int:
        """Return the optimizer steps of one iteration; a mini-batch has at least one prompt.

        Args:
            num_prompts: prompts of a rank and iteration; None if unknown.

        Example:
            >>> UpdateConfig(epochs_per_rollout=2, num_mini_batches=4).count_steps(num_prompts=3)
            6
        """
        if num_prompts is None:
            return self.num_steps
        return self.epochs_per_rollout * min(self.num_mini_batches, num_prompts)
