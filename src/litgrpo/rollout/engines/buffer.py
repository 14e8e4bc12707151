"""Where an engine writes the tokens that it samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from litgrpo.rollout.sampling import Drawn
from litgrpo.types import PromptBatch, Rollout


@dataclass
class CompletionBuffer:
    """The tokens sampled so far.

    Args:
        ids: [N, C] token ids.
        logprobs: [N, C] float32 log-probabilities at sampling.
        mask: [N, C] True marks a real token.
        ended: [N] True where the end token was sampled.
        candidate_ids: for each step, its columns, its rows [n], and the tokens that could be
            sampled there [n, S].
    """

    ids: Tensor
    logprobs: Tensor
    mask: Tensor
    ended: Tensor
    candidate_ids: list[tuple[int | Tensor, Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def empty(shape: torch.Size, pad_id: int, device: torch.device) -> CompletionBuffer:
        """Room for tokens of `shape`, which is (N, C)."""
        return CompletionBuffer(
            ids=torch.full(shape, pad_id, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, dtype=torch.float32, device=device),
            mask=torch.zeros(shape, dtype=torch.bool, device=device),
            ended=torch.zeros(shape[0], dtype=torch.bool, device=device),
        )

    def write_column(self, column: int, rows: Tensor, drawn: Drawn, eos_ids: Tensor) -> None:
        """Write one token of each of the rows [n]; rows that have ended stay as they are."""
        active, tokens = ~self.ended[rows], drawn.tokens
        self.ids[rows, column] = torch.where(active, tokens, self.ids[rows, column])
        self.logprobs[rows, column] = torch.where(active, drawn.logprobs.float(), 0.0)
        self.mask[rows, column] = active
        if drawn.candidate_ids is not None:
            self.candidate_ids.append((column, rows[active], drawn.candidate_ids[active]))
        self.ended[rows] |= torch.isin(tokens, eos_ids)

    def write_steps(self, steps: Iterable[tuple[Tensor, Tensor, Drawn]], is_end: Tensor) -> None:
        """Write all decoding steps of a rollout at once, after the last one.

        One indexed write for the whole rollout costs less than one in every step.

        Args:
            steps: for each step, the place in [N * C] of each row's token, which of the rows had
                not ended before, and what was drawn for them.
            is_end: [V] True for tokens that end a completion.
        """
        cursors, actives, draws = zip(*steps, strict=True)
        active, length = torch.cat(actives), self.ids.shape[1]
        place = torch.cat(cursors)[active]
        tokens = torch.cat([drawn.tokens for drawn in draws])[active]
        self.ids.view(-1)[place] = tokens
        logprobs = torch.cat([drawn.logprobs for drawn in draws])[active]
        self.logprobs.view(-1)[place] = logprobs.float()
        self.mask.view(-1)[place] = True
        self.ended[place[is_end[tokens]] // length] = True
        for cursor, row_active, drawn in zip(cursors, actives, draws, strict=True):
            if drawn.candidate_ids is not None:
                rows, columns = cursor[row_active] // length, cursor[row_active] % length
                self.candidate_ids.append((columns, rows, drawn.candidate_ids[row_active]))

    def rollout(self, prompts: PromptBatch, group_size: int) -> Rollout:
        """The finished rollout, without columns that no row uses."""
        used = max(1, int(self.mask.sum(1).max()))
        return Rollout(
            prompts=prompts,
            group_size=group_size,
            completion_ids=self.ids[:, :used],
            completion_mask=self.mask[:, :used],
            sampler_logprobs=self.logprobs[:, :used],
            truncated=~self.ended,
            candidate_ids=self._candidate_ids(used) if self.candidate_ids else None,
        )

    def _candidate_ids(self, used: int) -> Tensor:
        """[N, used, S] what could be sampled, filled up with -1."""
        widest = max(ids.shape[1] for _, _, ids in self.candidate_ids)
        whole = self.ids.new_full((len(self.ids), used, widest), -1, dtype=torch.int32)
        for columns, rows, ids in self.candidate_ids:
            whole[rows, columns, : ids.shape[1]] = ids
        return whole
