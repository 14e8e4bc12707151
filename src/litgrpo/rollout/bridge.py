"""What stands between two turns, as tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from litgrpo.arguments import require
from litgrpo.environments.interface import Message

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
    """A text stands as it is: nothing is put around it, and special tokens in it are kept.

    Args:
        tokenizer: of the policy.
    """

    tokenizer: PreTrainedTokenizerBase

    def ids(self, said: str | list[Message], ended: bool) -> list[int]:
        """See `Bridge.ids`."""
        require(
            isinstance(said, str),
            f"the environment answered with messages ({said!r:.60}), but episode.between is inline,"
            " where answers are texts. Set it to template.",
        )
        return list(self.tokenizer(said, add_special_tokens=False).input_ids)
