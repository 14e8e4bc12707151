"""Whether the model can read its data, before anything is computed."""

from __future__ import annotations

from lightning import LightningModule

from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet
from litgrpo.data.source_data import SourceData
from litgrpo.data.streaming import StreamedPrompts
from litgrpo.models.limits import check_lengths, check_tokens
from litgrpo.models.policy import Policy


def check_data(module: LightningModule, policy: Policy, completion: int, key: str) -> None:
    """Refuse data with tokens or positions that the model does not have; see `check_lengths`.

    Loaders that were given to the trainer without a data module are not looked at.

    Args:
        module: attached to its trainer.
        policy: reads the data.
        completion: tokens of a completion at most; 0 where the data hold the completions.
        key: of the recipe that limits the length of a row.

    Raises:
        ValueError: the model has no embedding of a token or of a position.
    """
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, SourceData):
        return
    kinds = (PromptSet, PairSet, StreamedPrompts)
    known = {name: rows for name, rows in data.sets.items() if isinstance(rows, kinds)}
    check_tokens(policy, {name: rows.ids for name, rows in known.items()})
    longest = {name: rows.longest for name, rows in known.items()}
    check_lengths(policy, longest, completion, key)
