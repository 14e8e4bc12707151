"""Prompts with completions for supervised training: batches of about equal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset

from litgrpo.data.rendering import (
    Chat,
    LengthLimit,
    Overlong,
    PromptStyle,
    Template,
    as_chat,
    find_tokenizer,
    tokenize,
)
from litgrpo.data.rows import Overlap, Table, fingerprint, require_positive
from litgrpo.data.sampler import BatchLoader, BatchOrder, bucketed_batches, process, skip_validation
from litgrpo.data.sources import Row, SourceLike

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PairBatch:
    """Prompts, each followed by its completion and the end token, padded on the right.

    Args:
        input_ids: [M, T] token ids.
        attention_mask: [M, T] bool, True marks a real token.
        loss_mask: [M, T] bool, True marks a token to predict: the completion and its end token.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        """Check ranks and sizes."""
        rows, length = self.input_ids.shape
        for mask in (self.attention_mask, self.loss_mask):
            assert mask.shape == (rows, length), f"a mask has shape {tuple(mask.shape)}"
            assert mask.dtype == torch.bool, f"a mask is {mask.dtype}"

    def __len__(self) -> int:
        """Number of pairs, M."""
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str, **kwargs: Any) -> PairBatch:
        """The same batch on `device`."""
        return PairBatch(
            self.input_ids.to(device, **kwargs),
            self.attention_mask.to(device, **kwargs),
            self.loss_mask.to(device, **kwargs),
        )


PairLoader = BatchLoader[PairBatch]


@dataclass(frozen=True)
class PairSet(Dataset[PairBatch]):
    """Tokenized pairs; row numbers give a batch of them.

    Args:
        ids: token ids of each prompt with its completion.
        prompt_lens: number of leading tokens that are the prompt.
        pad_id: token that fills up.
        pad_to_multiple: batches are as long as a multiple of this.
    """

    ids: list[list[int]]
    prompt_lens: list[int]
    pad_id: int
    pad_to_multiple: int

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.ids)

    @cached_property
    def lengths(self) -> Tensor:
        """[M] tokens of each pair."""
        return torch.tensor([len(ids) for ids in self.ids])

    def __getitem__(self, rows: list[int]) -> PairBatch:
        """The batch of these rows, padded to the longest of them."""
        ids = [torch.tensor(self.ids[row]) for row in rows]
        blocks = -(-max(map(len, ids)) // self.pad_to_multiple)
        slots = torch.arange(blocks * self.pad_to_multiple)
        input_ids = torch.full((len(rows), len(slots)), self.pad_id)
        for number, tokens in enumerate(ids):
            input_ids[number, : len(tokens)] = tokens
        real = slots < self.lengths[rows][:, None]
        targets = real & (slots >= torch.tensor([self.prompt_lens[row] for row in rows])[:, None])
        return PairBatch(input_ids, real, targets)


class PairData(LightningDataModule):
    """Prompts with completions to imitate.

    Sources, columns, template and chat are those of PromptData. The loss counts the completion and
    its end token, never the prompt. Batches hold pairs of about equal length.

    Args:
        train: source of the training pairs.
        val: source of the validation pairs; or hold out some of `train` by `val_fraction`.
        columns: names of columns, ours first: `{prompt: question, completion: answer}`.
        extract: regular expression with one group per column, to keep that group only.
        template: Jinja text of the prompt with the row's columns as variables.
        completion_template: Jinja text of the completion, likewise.
        chat: `true` puts the prompt into the chat format of the tokenizer as a user's message;
            `{system: text}` adds a system message.
        by_length: batches of pairs of about equal length, so that little is padding; `false` mixes
            all lengths, for data whose lengths differ little but go with what there is to learn.
        batch_size: pairs per optimizer step at most, over all processes together; null for no
            limit but max_tokens.
        max_tokens: tokens per optimizer step at most, padding included, likewise.
        max_len: tokens of prompt and completion at most.
        overlong: what to do with longer pairs: drop, truncate (keeps the start) or error.
        val_fraction: share of `train` to hold out for validation, chosen by a hash of each prompt,
            so that it never moves and is the same in reinforcement learning.
        split_by: another column to take the hash of, such as a dialogue's persona: rows that agree
            in it are all held out or none is.
        overlap: training prompts that are also in `val`: drop, error or keep.
        seed: of the order of batches and of pairs among those of about equal length.
        num_workers: processes that build batches ahead; the pairs are tokenized before, so 0 is
            enough.
        pad_to_multiple: length of batches is a multiple of this (fewer shapes to compile).
        tokenizer: Hub id or folder; default: the tokenizer of the model.
    """

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        train: SourceLike,
        *,
        val: SourceLike | None = None,
        columns: dict[str, str] | None = None,
        extract: dict[str, str] | None = None,
        template: str | None = None,
        completion_template: str | None = None,
        chat: bool | Chat = False,
        by_length: bool = True,
        batch_size: int | None = 32,
        max_tokens: int | None = None,
        max_len: int = 1024,
        overlong: Overlong = "drop",
        val_fraction: float = 0.0,
        split_by: str = "prompt",
        overlap: Overlap = "drop",
        seed: int = 0,
        num_workers: int = 0,
        pad_to_multiple: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        """Check the settings; `setup` reads the data."""
        super().__init__()
        require_positive(
            batch_size=batch_size, max_tokens=max_tokens, pad_to_multiple=pad_to_multiple
        )
        if val is not None and val_fraction:
            raise ValueError("val and val_fraction are both set; leave out one of them")
        if batch_size is None and max_tokens is None:
            raise ValueError("batch_size and max_tokens are both null; set one of them")
        self.train, self.val = train, val
        self.table = Table(columns or {}, extract or {}, val_fraction, overlap, split_by)
        self.style = PromptStyle(Template("prompt", template), as_chat(chat))
        self.completion = Template("completion", completion_template)
        self.style.template.check()
        self.completion.check()
        self.limit = LengthLimit("max_len", max_len, overlong)
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, seed
        self.num_workers, self.pad_to_multiple = num_workers, pad_to_multiple
        self.by_length = by_length
        self.tokenizer = tokenizer
        self.sets: dict[str, PairSet] = {}
        self.fingerprint = ""

    def setup(self, stage: str) -> None:
        """Read, split and tokenize.

        The training rows are read for validation too: a tokenizer may be fitted to them.

        Args:
            stage: fit or validate.
        """
        if stage not in ("fit", "validate"):
            raise ValueError(f"PairData is for fit and validate, not {stage}; use PromptData")
        required = self.style.template.needs | self.completion.needs
        required |= self.table.columns.keys() | self.table.extract.keys()
        train, val = self.table.train_and_val(self.train, self.val, required)
        if stage == "validate" and not val:
            raise ValueError("nothing to validate on: set val or val_fraction of the data")
        completions = [self.completion.text(row) for row in train]
        texts = [*self.style.plain(train), *completions]
        tokenizer = find_tokenizer(self.tokenizer, self.trainer, texts)
        rows = {"train": train, "val": val}
        self.sets = {
            name: self._tokenized(name, rows[name], tokenizer) for name in rows if rows[name]
        }
        self.fingerprint = fingerprint(train)
        if stage == "fit" and not val:
            skip_validation(self.trainer)
        for name, pairs in self.sets.items():
            batches = self._plan(pairs, 0)
            rank_zero_info(
                f"{name}: {len(pairs)} pairs, {len(batches)} batches, "
                f"{100 * padding_frac(pairs.lengths, batches):.1f} % padding"
            )

    def _tokenized(self, role: str, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> PairSet:
        prompts = self.style.encode(self.style.texts(rows, tokenizer), tokenizer)
        # Apart from the prompt, because a generated completion begins behind a finished prompt too.
        texts = [self.completion.text(row) for row in rows]
        completions = tokenize(tokenizer, texts, add_special_tokens=False)
        end = [tokenizer.eos_token_id]
        pairs = [
            prompt + completion + (end if completion[-1:] != end else [])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        keeps = self.limit.keeps([len(pair) for pair in pairs], rows, role)
        kept = [number for number, keep in enumerate(keeps) if keep]
        for number in kept:
            if len(prompts[number]) >= self.limit.tokens:
                raise ValueError(
                    f"{rows[number].place}: the prompt alone has {len(prompts[number])} tokens, "
                    f"max_len={self.limit.tokens} leaves none to learn; say `overlong: drop`"
                )
        return PairSet(
            ids=[pairs[number][: self.limit.tokens] for number in kept],
            prompt_lens=[len(prompts[number]) for number in kept],
            pad_id=tokenizer.pad_token_id,
            pad_to_multiple=self.pad_to_multiple,
        )

    def _plan(self, pairs: PairSet, epoch: int) -> list[list[int]]:
        lengths = pairs.lengths
        if not self.by_length:
            lengths = torch.full_like(lengths, int(lengths.max()))
        return bucketed_batches(lengths, self.batch_size, self.max_tokens, self.seed, epoch)

    def train_dataloader(self) -> PairLoader:
        """All pairs; their order depends on seed and epoch only, their position is saved."""
        pairs = self.sets["train"]
        identity = {
            "pairs": self.fingerprint,
            "num_pairs": len(pairs),
            "batch_size": self.batch_size,
            "max_tokens": self.max_tokens,
            "by_length": self.by_length,
            "seed": self.seed,
        }
        return self._loader(pairs, partial(self._plan, pairs), self.num_workers, identity)

    def val_dataloader(self) -> PairLoader:
        """The validation pairs, each once."""
        batches = self._plan(self.sets["val"], 0)
        return self._loader(self.sets["val"], lambda _: batches)

    def _loader(
        self,
        pairs: PairSet,
        plan: Callable[[int], list[list[int]]],
        num_workers: int = 0,
        identity: dict[str, Any] | None = None,
    ) -> PairLoader:
        return BatchLoader(pairs, BatchOrder(plan, *process(self.trainer)), num_workers, identity)


def padding_frac(lengths: Tensor, batches: list[list[int]]) -> float:
    """Share of the token slots of all batches that hold no token.

    Args:
        lengths: [M] tokens of each row.
        batches: lists of row numbers.
    """
    slots = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return 1 - sum(int(lengths[rows].sum()) for rows in batches) / slots
