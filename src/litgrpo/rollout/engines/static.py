"""Decode in tensors of fixed shapes, for devices that compile a program for each shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, require
from litgrpo.distributed.device import Backend, backend
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.rollout.engines.fixed import DecodeBuffer, FixedShapeLoop
from litgrpo.rollout.groups import join_rollouts
from litgrpo.types import PromptBatch, Rollout


@check_field_types
@dataclass(frozen=True)
class StaticEngine(RolloutEngine):
    """Decodes all rows at once in tensors whose shapes never change.

    One program reads the prompts and another feeds one token to every row; each is compiled at
    the first rollout of its shapes (prompts, group size, bucket, completion length, sampling).

    Args:
        prompt_buckets: widths that prompts are padded to. One number: its multiples; several:
            these, and longer prompts are rejected. Each width costs a compilation.
        sync_every_tokens: tokens between checks for finished rollouts; each check synchronizes with
            the device.

    Example:
        >>> StaticEngine(prompt_buckets=(128, 512)).sync_every_tokens
        16
    """

    allows = frozenset({"static shapes"})

    prompt_buckets: int | tuple[int, ...] = 64
    sync_every_tokens: int = 16

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            min(self._widths, default=0) >= 1,
            f"model.engine.prompt_buckets is {self.prompt_buckets}; it must be one number "
            "of tokens or several, each at least 1.",
        )
        at_least("model.engine.sync_every_tokens", self.sync_every_tokens, 1)

    @property
    def _widths(self) -> tuple[int, ...]:
        several = self.prompt_buckets
        return (several,) if isinstance(several, int) else several

    def pad_prompts(self, prompts: PromptBatch) -> PromptBatch:
        """Pad prompts on the left to the smallest bucket that fits, [B, bucket]."""
        missing = self.bucket(prompts.prompt_ids.shape[1]) - prompts.prompt_ids.shape[1]
        return replace(
            prompts,
            prompt_ids=pad(prompts.prompt_ids, (missing, 0)),  # what the mask hides is not read
            prompt_mask=pad(prompts.prompt_mask, (missing, 0)),
        )

    def bucket(self, length: int) -> int:
        """Return the smallest bucket for prompts of this length.

        Raises:
            ValueError: no bucket is large enough.
        """
        if isinstance(self.prompt_buckets, int):
            return -(-length // self.prompt_buckets) * self.prompt_buckets
        fitting = [width for width in self.prompt_buckets if width >= length]
        require(
            bool(fitting),
            f"A prompt has {length} tokens, but the largest of model.engine.prompt_buckets is "
            f"{max(self._widths)}. Add a larger one, or lower data.max_prompt_length.",
        )
        return min(fitting)

    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        On devices with static shapes the rollout is on the host, unused columns and padded prompts
        included; the prompts may also be on the host. On other devices it is on the device of the
        prompts, without unused columns. After an out-of-memory error groups decode in several
        parts, each with separate shapes.
        """
        parts = _split(requests)
        if len(parts) > 1:
            return join_rollouts([self.generate(part) for part in parts])
        policy, prompts, uniforms = requests.policy, requests.prompts, requests.uniforms
        device = backend(policy.model.device)
        padded = self.pad_prompts(prompts)
        # Graphs are traced for plain tensors; validation runs in inference mode.
        with torch.inference_mode(False), torch.no_grad(), policy.fixed_decoder.attention():
            loop = FixedShapeLoop(requests, device, self.sync_every_tokens)
            ids, mask = _plain(padded.prompt_ids, device), _plain(padded.prompt_mask, device)
            output = loop.decode(ids, mask, _plain(uniforms, device)).output
            if device.static_shapes:
                # Shapes of the learning step follow from the rollout's, so unused columns are kept.
                output, prompts = DecodeBuffer(*device.to_host(list(output))), padded.to("cpu")
                return output.rollout(prompts, requests.group_size, columns=uniforms.shape[1])
            used = max(1, int(output.lengths.max()))
            return output.rollout(prompts, requests.group_size, columns=used)


def _plain(tensor: Tensor, device: Backend) -> Tensor:
    """Move a tensor of rows to the device; clone it if it was created in inference mode."""
    there = device.rows_to(tensor)
    return there.clone() if there.is_inference() else there


def _split(requests: RolloutRequest) -> list[RolloutRequest]:
    """Split a request into parts of whole groups, with at most `max_rows` rows each."""
    prompts, group_size = requests.prompts, requests.group_size
    groups = max(1, (requests.max_rows or requests.num_rows) // group_size)

    def part(rows: range) -> RolloutRequest:
        uniforms = requests.uniforms[rows.start * group_size : rows.stop * group_size]
        return replace(
            requests, prompts=prompts.select(rows, trim=False), uniforms=uniforms, max_rows=None
        )

    numbers = range(len(prompts))
    return [part(numbers[start : start + groups]) for start in numbers[::groups]]
