"""Who says what rows hear between their turns."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Listener(ABC):
    """Hears the turns of an engine's rows while it decodes, and says what each row hears.

    `max_turn_tokens`: a turn ends at so many tokens, too.
    """

    max_turn_tokens: int

    @abstractmethod
    def ended(self, row: int, ids: list[int], *, cut: bool) -> None:
        """A turn of a row has ended; what it hears comes by `heard`.

        Args:
            row: its number, 0 to N - 1.
            ids: the tokens of the turn, its end token included.
            cut: the limit of tokens ended it.
        """

    @abstractmethod
    def heard(self, *, wait: bool) -> dict[int, list[int] | None]:
        """What came since the last call.

        Args:
            wait: until there is something, where a row has not been answered.

        Returns:
            {row: tokens that it hears, one or more, before its next turn; None: the row is over}.
            There is room for at least one token after them.
        """
