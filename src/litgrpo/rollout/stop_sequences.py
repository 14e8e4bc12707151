"""Stop strings and stop tokens, which end completions like the end token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.types import Rollout

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


def check_stop_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raise for stop tokens that the model cannot sample.

    Raises:
        ValueError: an id is V or more.
    """
    highest = max(ids, default=0)
    require(
        highest < vocab_size,
        f"model.sampling.stop_token_ids has {highest}, but the model has {vocab_size} tokens.",
    )


@dataclass(frozen=True)
class StopStrings:
    """Finds the token that completes a stop string.

    Texts are read with their special tokens, so that a stop string may be one.

    Args:
        stops: the strings; at least one.
        tokenizer: of the policy.
        vocab_size: V, size of the policy's embedding.
    """

    stops: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    @cached_property
    def window(self) -> int:
        """Tokens that are enough to show any of the stop strings: each adds a byte or more."""
        return max(len(stop.encode()) for stop in self.stops) + 8

    @cached_property
    def may_complete(self) -> Tensor:
        """[V] bool, True for tokens whose text has the last character of a stop string.

        Also for those whose text is no whole character: the rest of it may be in the next token.
        """
        lasts = {stop[-1] for stop in self.stops} | {"\ufffd"}
        num_texts = min(self.vocab_size, len(self.tokenizer))
        texts = self.tokenizer.batch_decode([[token] for token in range(num_texts)])
        # Behind others a token may read otherwise: with a space in front, which may be the last.
        may_complete = [bool(lasts & {*text, " "}) for text in texts]
        return torch.tensor(may_complete + [False] * (self.vocab_size - num_texts))

    def found(self, ids: list[int]) -> bool:
        """Return True if these tokens contain a stop string."""
        return self.length(ids) <= len(ids)

    def completes(self, ids: list[int]) -> bool:
        """Return True if one of the last few tokens completes a stop string."""
        text = self.tokenizer.decode(ids[-self.window :])
        return any(stop in text for stop in self.stops)

    def length(self, ids: list[int]) -> int:
        """Count tokens up to the one that completes a stop string; len(ids) + 1 if none does."""
        text = self.tokenizer.decode(ids)
        if not any(stop in text for stop in self.stops):
            return len(ids) + 1
        suspects = self.may_complete[torch.tensor(ids, dtype=torch.long)].nonzero().flatten()
        ends = (position + 1 for position in suspects.tolist())
        return next((end for end in ends if self.completes(ids[:end])), len(ids) + 1)

    def watch(self, uniforms: Tensor) -> Watch:
        """Return a watch for a rollout with the random numbers [N, C]."""
        return Watch(self, uniforms.shape, uniforms.device)

    def cut(self, text: str, include: bool) -> str:
        """Cut a text at its first stop string, or behind it with `include`."""
        positions = [(text.find(stop), stop) for stop in self.stops if stop in text]
        start, stop = min(positions, default=(len(text), ""))
        return text[: start + len(stop) * include]

    def cut_tokens(self, rollout: Rollout, pad_id: int, *, static_shapes: bool) -> Rollout:
        """End completions behind the token that completes a stop string.

        No token depends on later ones, so this equals not having sampled them, even with an engine
        that knows nothing of stop strings. With `static_shapes`, columns that are all padding stay.
        """
        ids, device = rollout.token_lists(), rollout.completion_ids.device
        ends = torch.tensor([self.length(row) for row in ids], device=device)
        columns = torch.arange(rollout.completion_ids.shape[1], device=device)
        mask = rollout.completion_mask & (columns < ends[:, None])
        width = len(columns) if static_shapes else max(1, int(mask.sum(1).max()))
        is_stopped = ends <= torch.tensor([len(row) for row in ids], device=device)
        mask, candidates, versions = mask[:, :width], rollout.candidate_ids, rollout.token_versions
        if candidates is not None:
            candidates = candidates[:, :width].masked_fill(~mask[..., None], -1)
        return replace(
            rollout,
            completion_ids=rollout.completion_ids[:, :width].masked_fill(~mask, pad_id),
            completion_mask=mask,
            sampler_logprobs=rollout.sampler_logprobs[:, :width].masked_fill(~mask, 0.0),
            truncated=rollout.truncated & ~is_stopped,
            candidate_ids=candidates,
            token_versions=None if versions is None else versions[:, :width],
        )

    def cut_all(self, texts: list[str], rollout: Rollout, include: bool) -> list[str]:
        """Cut the N texts of a rollout at stop strings, except those with observations."""
        alone = (rollout.loss_mask == rollout.completion_mask).all(1).tolist()
        pairs = zip(texts, alone, strict=True)
        return [self.cut(text, include) if is_alone else text for text, is_alone in pairs]


@dataclass
class Watch:
    """Looks for stop strings during decoding, so that rows which contain one leave the batch.

    Args:
        stops: what to look for.
        shape: (N, C) of the rollout.
        device: where it is sampled.
    """

    stops: StopStrings
    shape: torch.Size
    device: torch.device
    ids: Tensor = field(init=False)
    suspects: Tensor = field(init=False)
    may_complete: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Allocate the buffers."""
        rows, columns = self.shape
        self.ids = torch.zeros(rows * columns, dtype=torch.long, device=self.device)
        self.suspects = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.may_complete = self.stops.may_complete.to(self.device)

    def note(self, cursor: Tensor, active: Tensor, tokens: Tensor) -> None:
        """Remember the tokens [n] of a step at their places [n] in [N * C], of active rows."""
        places, seen = cursor[active], tokens[active]
        self.ids[places] = seen
        self.suspects[places // self.shape[1]] |= self.may_complete[seen]

    def still_active(self, cursor: Tensor, active: Tensor) -> Tensor:
        """Return [n] active rows without a stop string; `cursor` [n] is their next position."""
        length = self.shape[1]
        rows = (cursor - 1) // length
        asked = (active & self.suspects[rows]).nonzero().flatten().tolist()
        self.suspects.zero_()
        active, ends = active.clone(), cursor.tolist()
        for index in asked:
            start = (ends[index] - 1) // length * length
            active[index] = not self.stops.found(self.ids[start : ends[index]].tolist())
        return active
