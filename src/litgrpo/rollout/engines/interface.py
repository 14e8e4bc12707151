"""What every rollout engine promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from litgrpo.models.policy import Policy
from litgrpo.rollout.sampling import Drawn, Sampling
from litgrpo.types import PromptBatch, Rollout


class RolloutEngine(ABC):
    """Turns prompts into completions.

    The result is a pure function of weights, prompts, uniforms and sampling: up to ties at
    rounding, every engine returns the same tokens.
    """

    @property
    def lower_precision(self) -> torch.dtype | None:
        """What it computes in instead of the policy's own arithmetic.

        None: its log-probabilities are the policy's, up to rounding.
        """
        return None

    @property
    def fixed_shapes(self) -> bool:
        """Whether it is for devices that compile a program for each shape.

        Then `padded` gives prompts of few widths; rollouts are always [N, C], unused columns
        included, and lie on the host if the policy lies on such a device.
        """
        return False

    def padded(self, prompts: PromptBatch) -> PromptBatch:
        """The prompts as wide as this engine wants them, padded further on the left.

        Call it on the host, before the batch moves to the device; `generate` of a padded batch
        gives the same completions.

        Args:
            prompts: B prompts [B, P].

        Returns:
            The same prompts [B, bucket], with bucket >= P.

        Raises:
            ValueError: the longest prompt is longer than the engine allows.
        """
        return prompts

    @abstractmethod
    def generate(
        self,
        policy: Policy,
        prompts: PromptBatch,
        group_size: int,
        uniforms: Tensor,
        sampling: Sampling,
    ) -> Rollout:
        """Sample completions. The policy must be in eval mode; no gradient is kept.

        Args:
            policy: what speaks.
            prompts: B prompts.
            group_size: G completions of each.
            uniforms: [N, C] one number in [0, 1) for each token that may be sampled; C is the
                longest completion.
            sampling: temperature and filters.

        Returns:
            The rollout, completion texts not yet decoded.
        """


@dataclass
class Transcript:
    """The tokens said so far, filled in column by column.

    Args:
        ids: [N, C] token ids.
        logprobs: [N, C] float32 log-probabilities at sampling.
        mask: [N, C] True marks a real token.
        ended: [N] True where the end token was said.
        support: for each step, its column, the live rows [n] and what could be drawn there [n, S].
    """

    ids: Tensor
    logprobs: Tensor
    mask: Tensor
    ended: Tensor
    support: list[tuple[int | Tensor, Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def empty(shape: torch.Size, pad_id: int, device: torch.device) -> Transcript:
        """Nothing said yet in `shape`, which is (N, C)."""
        return Transcript(
            ids=torch.full(shape, pad_id, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, dtype=torch.float32, device=device),
            mask=torch.zeros(shape, dtype=torch.bool, device=device),
            ended=torch.zeros(shape[0], dtype=torch.bool, device=device),
        )

    def add(self, column: int, rows: Tensor, drawn: Drawn, eos_ids: Tensor) -> None:
        """Write one token of each live row; rows that have ended stay as they are."""
        speaking, tokens = ~self.ended[rows], drawn.tokens
        self.ids[rows, column] = torch.where(speaking, tokens, self.ids[rows, column])
        self.logprobs[rows, column] = torch.where(speaking, drawn.logprobs.float(), 0.0)
        self.mask[rows, column] = speaking
        if drawn.support is not None:
            self.support.append((column, rows[speaking], drawn.support[speaking]))
        self.ended[rows] |= torch.isin(tokens, eos_ids)

    def add_all(self, spoken: Iterable[tuple[Tensor, Tensor, Drawn]], is_end: Tensor) -> None:
        """Write all steps of a rollout, at its end and at once.

        Args:
            spoken: for each step, the place in [N * C] of each live row, which of the rows have
                not ended before, and what was drawn for them.
            is_end: [V] True for tokens that end a completion.
        """
        cursors, speakers, draws = zip(*spoken, strict=True)
        speaking, length = torch.cat(speakers), self.ids.shape[1]
        place = torch.cat(cursors)[speaking]
        tokens = torch.cat([drawn.tokens for drawn in draws])[speaking]
        self.ids.view(-1)[place] = tokens
        logprobs = torch.cat([drawn.logprobs for drawn in draws])[speaking]
        self.logprobs.view(-1)[place] = logprobs.float()
        self.mask.view(-1)[place] = True
        self.ended[place[is_end[tokens]] // length] = True
        for cursor, speaker, drawn in zip(cursors, speakers, draws, strict=True):
            if drawn.support is not None:
                rows, columns = cursor[speaker] // length, cursor[speaker] % length
                self.support.append((columns, rows, drawn.support[speaker]))

    def rollout(self, prompts: PromptBatch, group_size: int) -> Rollout:
        """The finished rollout; columns that nobody used are cut off."""
        used = max(1, int(self.mask.sum(1).max()))
        return Rollout(
            prompts=prompts,
            group_size=group_size,
            completion_ids=self.ids[:, :used],
            completion_mask=self.mask[:, :used],
            sampler_logprobs=self.logprobs[:, :used],
            truncated=~self.ended,
            support=self._support(used) if self.support else None,
        )

    def _support(self, used: int) -> Tensor:
        """[N, used, S] what could be drawn, filled up with -1."""
        widest = max(ids.shape[1] for _, _, ids in self.support)
        whole = self.ids.new_full((len(self.ids), used, widest), -1, dtype=torch.int32)
        for column, rows, ids in self.support:
            whole[rows, column, : ids.shape[1]] = ids
        return whole
