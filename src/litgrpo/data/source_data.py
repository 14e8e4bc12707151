"""What data modules share: sources and settings, the model's tokenizer, loaders with a position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, runtime_checkable

from lightning import LightningDataModule, Trainer

from litgrpo.arguments import at_least, require
from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import (
    LengthLimit,
    Messages,
    PromptStyle,
    checked,
    load_tokenizer,
    opened,
)
from litgrpo.data.rows import Table
from litgrpo.data.sampler import Batch, BatchLoader, BatchOrder, Plan
from litgrpo.data.sources import Row, SetsLike, weights_of
from litgrpo.data.streaming import StreamedPrompts
from litgrpo.instantiate import given_sets
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


@runtime_checkable
class HasEnvironment(Protocol):
    """A module whose environment may show tools to the model: `shown_tools`, JSON schemas."""

    shown_tools: Messages


class SourceData(LightningDataModule, Generic[Batch]):
    """Rows of sources, tokenized for a model.

    Args:
        sources: {set: where its rows come from, or None}; all but `train` may be several sets with
            names, `{name: source}`.
        table: how rows get their names, and how they are split.
        style: makes prompts of rows.
        limit: of a row's tokens.
        tokenizer: Hub id or folder, or None for that of the model.
        num_workers: processes that build training batches ahead.
        pad_to_multiple_of: length of batches is a multiple of this.
    """

    def __init__(
        self,
        sources: Mapping[str, SetsLike | None],
        table: Table,
        style: PromptStyle,
        limit: LengthLimit,
        *,
        tokenizer: str | None,
        num_workers: int,
        pad_to_multiple_of: int,
    ) -> None:
        super().__init__()
        at_least("pad_to_multiple_of", pad_to_multiple_of, 1)
        twice = sources["val"] is not None and table.val_fraction
        require(not twice, "val and val_fraction are both set; leave out one of them")
        self.weights = weights_of(sources["train"])
        self.sources = {name: given_sets(source) for name, source in sources.items()}
        self.table, self.style, self.limit = table, style, limit
        self.tokenizer, self.num_workers = tokenizer, num_workers
        self.pad_to_multiple_of = pad_to_multiple_of
        self.sets: dict[str, Any] = {}
        self.fingerprint = ""
        self.shown: tuple[PromptStyle, PreTrainedTokenizerBase] | None = None

    @property
    def process(self) -> tuple[int, int]:
        """Rank of this process and number of processes; without a trainer there is one."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    def find_tokenizer(self, texts: list[str]) -> PreTrainedTokenizerBase:
        """The tokenizer of the data, if one is named, else that of the model.

        Args:
            texts: what the model's `fit_tokenizer` may train it on.
        """
        if self.tokenizer is not None:
            return checked(load_tokenizer(self.tokenizer))
        if self.trainer is None:
            raise ValueError("without a Trainer the data need their own tokenizer; set tokenizer")
        model: Any = self.trainer.lightning_module
        return checked(model.fit_tokenizer(texts))

    def find_style(self, tokenizer: PreTrainedTokenizerBase) -> PromptStyle:
        """The style of the prompts, with the tools of the model's environment.

        Args:
            tokenizer: of the data.
        """
        model: Any = None if self.trainer is None else self.trainer.lightning_module
        tools = model.shown_tools if isinstance(model, HasEnvironment) else []
        style = self.style.showing(tools, tokenizer)
        self.shown = style, tokenizer
        return style

    def opened(
        self, prompts: PromptBatch, row: int, added: str | Messages, split_added: bool = True
    ) -> list[int]:
        """Token ids of a prompt with what an environment adds to it; see `rendering.opened`.

        Args:
            prompts: B prompts of this module, after `setup`.
            row: which of them.
            added: a text, or messages.
            split_added: special tokens that are written in it are plain text.
        """
        assert self.shown is not None
        style, tokenizer = self.shown
        return opened(
            prompts,
            row,
            added,
            style=style,
            limit=self.limit,
            tokenizer=tokenizer,
            split_added=split_added,
        )

    def require_validation(self, rows: list[Row]) -> None:
        """Refuse to validate on nothing."""
        require(bool(rows), "nothing to validate on: set val or val_fraction of the data")

    def skip_validation_without(self, name: str, stage: str) -> None:
        """Tell Lightning that a fit has no such set; an empty list of loaders makes it warn."""
        if stage == "fit" and name not in self.sets and self.trainer is not None:
            self.trainer.limit_val_batches = 0

    @property
    def mixture(self) -> list[tuple[float, int]]:
        """The weight of each training source and how many rows it has; none without weights."""
        counts = Counter(self.sets["train"].sources if self.weights else [])
        return [(weight, counts[n]) for n, weight in enumerate(self.weights or [])]

    def train_loader(self, plan: Plan, identity: dict[str, Any]) -> BatchLoader[Batch]:
        """Training batches, whose position is part of a checkpoint.

        Args:
            plan: epoch -> batches of row numbers.
            identity: what the order of batches depends on.
        """
        identity = identity | {"mixture": self.mixture or None}
        order = BatchOrder(plan, *self.process)
        return BatchLoader(self.sets["train"], order, self.num_workers, identity)

    def loader(self, name: str, batches: list[list[int]]) -> BatchLoader[Batch]:
        """The same batches of a set in every epoch."""
        return BatchLoader(self.sets[name], BatchOrder(lambda _: batches, *self.process))


def set_names(trainer: Trainer) -> list[str]:
    """The names of the sets that a trainer validates or tests on; [""] where there is one."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    sets = data.sets if isinstance(data, SourceData) else {}
    held_out = [each for role, each in sets.items() if role in ("val", "test")]
    return list(dict.fromkeys(name for each in held_out for name in each.set_names)) or [""]


def reward_columns(trainer: Trainer) -> list[list[str]]:
    """The columns of each set whose completions are rewarded."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    sets = data.sets if isinstance(data, SourceData) else {}
    kinds = (PromptSet, StreamedPrompts)
    rewarded = {name: each for name, each in sets.items() if name != "predict"}
    return [list(each.columns) for each in rewarded.values() if isinstance(each, kinds)]
