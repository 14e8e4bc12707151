"""What an engine is promised of rows that leave a batch and come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class RowsAway(ABC):
    """The rows of a decoding state that are away, numbered in the order in which they left."""

    @abstractmethod
    def leave(self, row: int) -> None:
        """Keep a live row, which the next `select` of the state leaves out."""

    @abstractmethod
    def forget(self, numbers: Sequence[int]) -> None:
        """Let rows go for good; the others are numbered anew."""

    @abstractmethod
    def come_back(self, numbers: Sequence[int], ids: Sequence[list[int]]) -> Tensor:
        """Take rows in again after the live ones; each reads tokens in one pass on the way.

        Args:
            numbers: of m rows; the others are numbered anew.
            ids: what each reads, one token or more.

        Returns:
            [m, V] logits of their next tokens.
        """
