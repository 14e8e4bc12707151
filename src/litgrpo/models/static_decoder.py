"""A policy in shapes that never change, for devices that compile, and for CUDA graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from litgrpo.distributed.device import backend
from litgrpo.models.static_cache import StaticState
from litgrpo.tensors import Head, token_logprobs
from litgrpo.types import TokenLogprobs, TokenRows


class RecomputeContext:
    """A head for chunks that are computed twice to save memory, also where a compiler interferes.

    A compiler that finds the same computation twice keeps the first result, and with it the memory
    that recomputing was to save. So the second one reads a copy that it cannot see through.

    Args:
        head: hidden states -> logits.
    """

    def __init__(self, head: Head) -> None:
        self._head, self._again = head, False

    def head(self, hidden: Tensor) -> Tensor:
        """The same logits both times."""
        return self._head(
            backend(hidden.device).optimization_barrier(hidden) if self._again else hidden
        )

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of the first computation and of the second; see torch's checkpoint."""
        return nullcontext(), self._recomputing()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        self._again = True
        try:
            yield
        finally:
            self._again = False


class StaticDecoder(ABC):
    """A policy in shapes that never change: no shape depends on a value, and no value is read.

    For devices that compile a program for each set of shapes, and for CUDA graphs.

    Args:
        policy: whose model computes.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @abstractmethod
    def attending(self) -> AbstractContextManager[None]:
        """What to call `prefill` and `step` within.

        Raises:
            ValueError: the model cannot decode in static shapes.
        """

    @abstractmethod
    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, StaticState]:
        """Read the prompts, each once.

        Args:
            prompt_ids: [B, P] token ids, padded on the left.
            prompt_mask: [B, P] True marks a real token.
            group_size: G.
            capacity: most tokens that a completion will be fed, C.

        Returns:
            [N, V] logits of the first completion token of each row, and the state of the rows.
        """

    @abstractmethod
    def step(self, tokens: Tensor, state: StaticState) -> tuple[Tensor, StaticState]:
        """Feed one token to every row: the same graph for every step.

        Args:
            tokens: [N] the tokens just sampled.
            state: the state of these rows, which is used up.

        Returns:
            [N, V] logits of the next token, and the state one position further.
        """

    @abstractmethod
    def hidden(self, rows: TokenRows) -> Tensor:
        """[M, C, E] hidden states that predict every completion token, padding too."""

    def logprobs(self, rows: TokenRows, **settings: Any) -> TokenLogprobs:
        """`Policy.logprobs`, computed for padding, too, and masked afterwards."""
        mask, candidates = rows.completion_mask, rows.candidate_ids
        again = RecomputeContext(self.policy.head)
        found = token_logprobs(
            self.hidden(rows).flatten(0, 1),
            rows.completion_ids.flatten(),
            again.head,
            candidate_ids=None if candidates is None else candidates.flatten(0, 1),
            chunk_size=self.policy.chunk_size(mask.numel()),
            context_fn=again.contexts,
            **settings,
        )
        return TokenLogprobs(*(torch.where(mask, each.view_as(mask), 0.0) for each in found))
