"""What stands between two turns, as tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from litgrpo.arguments import require
from litgrpo.data.special_tokens import plain_ids, special_texts
from litgrpo.environments.base import Message

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


class Bridge(ABC):
    """Turns what an environment says into the tokens between two turns of the policy."""

    @abstractmethod
    def ids(self, said: str | list[Message], ended: bool) -> list[int]:
        """The tokens that a row hears, up to where the policy speaks again.

        Args:
            said: by the environment.
            ended: whether the turn's last token is an end token of the policy; where it is not (a
                stop string or a limit ended it), one may be needed.

        Raises:
            ValueError: it cannot be said in this way.
        """


@dataclass(frozen=True)
class Inline(Bridge):
    """A text stands as it is: nothing is put around it.

    Args:
        tokenizer: of the policy.
        split_special_tokens: special tokens that it writes are read as plain text; other tokens
            that were added to the tokenizer stay themselves.
    """

    tokenizer: PreTrainedTokenizerBase
    split_special_tokens: bool = True

    @cached_property
    def _split(self) -> list[str]:
        return special_texts(self.tokenizer) if self.split_special_tokens else []

    def ids(self, said: str | list[Message], ended: bool) -> list[int]:
        """See `Bridge.ids`."""
        require(
            isinstance(said, str),
            f"the environment answered with messages ({said!r:.60}), but episode.turn_format is "
            f"inline,"
            " where answers are texts. Set it to template.",
        )
        if any(special in said for special in self._split):
            return plain_ids(str(said), self.tokenizer)
        return list(self.tokenizer(said, add_special_tokens=False).input_ids)
