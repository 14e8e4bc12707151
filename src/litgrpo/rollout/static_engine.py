"""Fixed shapes, compiled once: for devices that compile a program for each shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from litgrpo.policies.policy import Policy
from litgrpo.rollout.engine import RolloutEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch, Rollout


@dataclass(frozen=True)
class StaticEngine(RolloutEngine):
    """Decodes all rows at once in tensors whose shapes never change.

    One program reads the prompts and another feeds one token to every row; each is compiled at
    the first rollout of its shapes (prompts, group size, bucket, completion length, sampling).

    Args:
        prompt_buckets: widths that prompts are padded to. One number: its multiples; several:
            these, and longer prompts are refused. Each width costs a compilation.
        look_every: tokens between looks whether every row has ended; each look waits for the
            device.
    """

    prompt_buckets: int | tuple[int, ...] = 64
    look_every: int = 16

    def __post_init__(self) -> None:
        """Check the ranges."""
        widths = self.prompt_buckets
        for width in (widths,) if isinstance(widths, int) else widths or (0,):
            if width < 1:
                raise ValueError(
                    f"engine.prompt_buckets is {widths}; it must be a number of tokens, or several."
                )
        if self.look_every < 1:
            raise ValueError(f"engine.look_every is {self.look_every}; it must be at least 1.")

    @property
    def fixed_shapes(self) -> bool:
        """See `RolloutEngine.fixed_shapes`."""
        return True

    def padded(self, prompts: PromptBatch) -> PromptBatch:
        """The prompts, padded on the left to the smallest bucket; see `RolloutEngine.padded`."""
        missing = self.bucket(prompts.prompt_ids.shape[1]) - prompts.prompt_ids.shape[1]
        if missing == 0:
            return prompts
        return replace(
            prompts,
            prompt_ids=pad(prompts.prompt_ids, (missing, 0)),  # what the mask hides is not read
            prompt_mask=pad(prompts.prompt_mask, (missing, 0)),
        )

    def bucket(self, length: int) -> int:
        """The smallest bucket for prompts of this length.

        Raises:
            ValueError: there is none.
        """
        if isinstance(self.prompt_buckets, int):
            return -(-length // self.prompt_buckets) * self.prompt_buckets
        fitting = [width for width in self.prompt_buckets if width >= length]
        if not fitting:
            raise ValueError(
                f"A prompt has {length} tokens, but the largest of engine.prompt_buckets is "
                f"{max(self.prompt_buckets)}. Give a larger one, or a lower data.max_prompt_len."
            )
        return min(fitting)

    def generate(
        self,
        policy: Policy,
        prompts: PromptBatch,
        group_size: int,
        uniforms: Tensor,
        sampling: Sampling,
    ) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`."""
        raise AssertionError("the next commit decodes")
