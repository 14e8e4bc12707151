"""Prompts for reinforcement learning: from any source to left-padded batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import Dataset

from litgrpo.data.rendering import (
    Chat,
    LengthLimit,
    Overlong,
    PromptStyle,
    Template,
    as_chat,
    find_tokenizer,
)
from litgrpo.data.rows import Overlap, Table, columns_of, fingerprint, require_positive
from litgrpo.data.sampler import (
    BatchLoader,
    BatchOrder,
    fixed_batches,
    process,
    shuffled_batches,
    skip_validation,
)
from litgrpo.data.sources import Row, SourceLike
from litgrpo.tensors import pad_left
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase

PromptLoader = BatchLoader[PromptBatch]


@dataclass(frozen=True)
class PromptSet(Dataset[PromptBatch]):
    """Tokenized prompts; row numbers give a batch of them.

    Args:
        ids: token ids of each prompt.
        texts: the prompts as texts.
        columns: {name: one value per prompt}.
        index: position of each prompt in its source.
        pad_id: token that fills up.
        pad_to_multiple: batches are as long as a multiple of this.
    """

    ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]]
    index: list[int]
    pad_id: int
    pad_to_multiple: int

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.ids)

    def __getitem__(self, rows: list[int]) -> PromptBatch:
        """The batch of these rows, padded to the longest of them."""
        ids = [self.ids[row] for row in rows]
        blocks = -(-max(map(len, ids)) // self.pad_to_multiple)
        prompt_ids, prompt_mask = pad_left(ids, self.pad_id, blocks * self.pad_to_multiple)
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            prompts=[self.texts[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            index=torch.tensor([self.index[row] for row in rows]),
        )


class PromptData(LightningDataModule):
    r"""Prompts to train on, to validate on, to test, and to answer.

    A source is the path of a .jsonl, .json, .csv, .parquet or .txt file, the name of a data set on
    the Hugging Face Hub (`openai/gsm8k:main:train`), a function
    (`python:package.module.function?size=500`), a list of texts or rows, or `{path: ..., limit:
    ...}`. The prompt is tokenized; every other column reaches the reward functions.

    Args:
        train: source of the training prompts.
        val: source of the validation prompts; or hold out some of `train` by `val_fraction`.
        test: source of the test prompts.
        predict: source of the prompts to answer.
        prompts: the prompts to answer, as a list of texts, instead of `predict`.
        columns: names of columns, ours first: `{prompt: question, answer: answer}`.
        extract: regular expression with one group per column, to keep that group only:
            `{answer: '####\s*(.+)'}`.
        template: Jinja text with the row's columns as variables, such as `Question: {{ prompt }}`.
        chat: `true` puts the prompt into the chat format of the tokenizer as a user's message;
            `{system: text}` adds a system message.
        batch_size: prompts per iteration, over all processes together.
        eval_batch_size: prompts per batch in validation, test and prediction (default: batch_size).
        max_prompt_len: tokens of a prompt at most.
        overlong: what to do with longer prompts: drop, truncate (keeps the end) or error.
        val_fraction: share of `train` to hold out for validation, chosen by a hash of each prompt,
            so that it never moves and is the same in supervised training.
        split_by: another column to take the hash of, such as a dialogue's persona: rows that agree
            in it are all held out or none is.
        overlap: training prompts that are also in `val`: drop, error or keep.
        shuffle: put the training prompts into another random order in every epoch.
        seed: of that order.
        num_workers: processes that build batches ahead; the prompts are tokenized before, so 0 is
            enough.
        pad_to_multiple: length of batches is a multiple of this (fewer shapes to compile).
        tokenizer: Hub id or folder; default: the tokenizer of the model.
    """

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        train: SourceLike | None = None,
        *,
        val: SourceLike | None = None,
        test: SourceLike | None = None,
        predict: SourceLike | None = None,
        prompts: list[str] | None = None,
        columns: dict[str, str] | None = None,
        extract: dict[str, str] | None = None,
        template: str | None = None,
        chat: bool | Chat = False,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        max_prompt_len: int = 512,
        overlong: Overlong = "drop",
        val_fraction: float = 0.0,
        split_by: str = "prompt",
        overlap: Overlap = "drop",
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        pad_to_multiple: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        """Check the settings; `setup` reads the data."""
        super().__init__()
        require_positive(
            batch_size=batch_size, eval_batch_size=eval_batch_size, pad_to_multiple=pad_to_multiple
        )
        if val is not None and val_fraction:
            raise ValueError("val and val_fraction are both set; leave out one of them")
        self.sources = {"train": train, "val": val, "test": test}
        self.sources["predict"] = predict if prompts is None else prompts
        self.table = Table(columns or {}, extract or {}, val_fraction, overlap, split_by)
        self.style = PromptStyle(Template("prompt", template), as_chat(chat))
        self.style.template.check()
        self.limit = LengthLimit("max_prompt_len", max_prompt_len, overlong)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.shuffle, self.seed, self.num_workers = shuffle, seed, num_workers
        self.pad_to_multiple, self.tokenizer = pad_to_multiple, tokenizer
        self.sets: dict[str, PromptSet] = {}
        self.fingerprint = ""

    def setup(self, stage: str) -> None:
        """Read, split and tokenize what the stage needs.

        Args:
            stage: fit, validate, test or predict.
        """
        rows = {name: part for name, part in self._rows(stage).items() if part}
        asked = [text for part in rows.values() for text in self.style.plain(part)]
        tokenizer = find_tokenizer(self.tokenizer, self.trainer, asked)
        self.sets = {name: self._tokenized(name, rows[name], tokenizer) for name in rows}
        self.fingerprint = fingerprint(rows["train"]) if "train" in rows else ""
        if stage == "fit" and "val" not in rows:
            skip_validation(self.trainer)
        sizes = ", ".join(f"{name} {len(prompts)}" for name, prompts in self.sets.items())
        rank_zero_info(f"Prompts: {sizes}")

    def _rows(self, stage: str) -> dict[str, list[Row]]:
        needs = self.style.template.needs
        if stage == "predict":
            # Prompts to answer need no answer.
            return {"predict": self.table.read(self._source("predict"), needs)}
        required = needs | self.table.columns.keys() | self.table.extract.keys()
        if stage == "test":
            return {"test": self.table.read(self._source("test"), required)}
        if stage == "validate" and self.sources["val"] is not None:
            return {"val": self.table.read(self._source("val"), required)}
        train, val = self.table.train_and_val(self._source("train"), self.sources["val"], required)
        if stage == "validate":
            if not val:
                raise ValueError("nothing to validate on: set val or val_fraction of the data")
            return {"val": val}
        return {"train": train, "val": val}

    def _source(self, name: str) -> SourceLike:
        source = self.sources[name]
        if source is None:
            hint = " (or prompts)" if name == "predict" else ""
            raise ValueError(f"the data have no {name} source; set {name}{hint}")
        return source

    def _tokenized(
        self, role: str, rows: list[Row], tokenizer: PreTrainedTokenizerBase
    ) -> PromptSet:
        texts = self.style.texts(rows, tokenizer)
        encoded = self.style.encode(texts, tokenizer)
        for ids, row in zip(encoded, rows, strict=True):
            if not ids:
                raise ValueError(f"{row.place}: the prompt has no tokens")
        keeps = self.limit.keeps([len(ids) for ids in encoded], rows, role)
        kept = [number for number, keep in enumerate(keeps) if keep]
        rows = [rows[number] for number in kept]
        return PromptSet(
            ids=[_end_of(encoded[number], self.limit.tokens, tokenizer) for number in kept],
            texts=[texts[number] for number in kept],
            columns=self._columns(rows),
            index=[row.index for row in rows],
            pad_id=tokenizer.pad_token_id,
            pad_to_multiple=self.pad_to_multiple,
        )

    def _columns(self, rows: list[Row]) -> dict[str, list[Any]]:
        """What rewards are told; with a chat format, also the messages without it."""
        said = {} if self.style.chat is None else {"conversation": self.style.conversations(rows)}
        return columns_of(rows) | said

    def train_dataloader(self) -> PromptLoader:
        """Full batches; their order depends on seed and epoch only, their position is saved."""
        prompts, (rank, world_size) = self.sets["train"], process(self.trainer)
        if len(prompts) < self.batch_size:
            raise ValueError(
                f"{len(prompts)} training prompts do not fill one batch of {self.batch_size}; "
                "lower batch_size or bring more prompts"
            )
        if self.batch_size % world_size:
            raise ValueError(
                f"batch_size {self.batch_size} (prompts of all processes together) does not divide "
                f"among {world_size} processes"
            )
        plan = partial(_batches, len(prompts), self.batch_size, self.shuffle, self.seed)
        order = BatchOrder(plan, rank, world_size)
        identity = {
            "prompts": self.fingerprint,
            "num_prompts": len(prompts),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        return BatchLoader(prompts, order, self.num_workers, identity)

    def val_dataloader(self) -> PromptLoader:
        """The validation prompts in their order, each once."""
        return self._in_order("val")

    def test_dataloader(self) -> PromptLoader:
        """The test prompts in their order, each once."""
        return self._in_order("test")

    def predict_dataloader(self) -> PromptLoader:
        """The prompts to answer in their order, each once."""
        return self._in_order("predict")

    def _in_order(self, name: str) -> PromptLoader:
        prompts = self.sets[name]
        batches = fixed_batches(len(prompts), self.eval_batch_size)
        return BatchLoader(prompts, BatchOrder(lambda _: batches, *process(self.trainer)))


def _batches(count: int, batch_size: int, shuffle: bool, seed: int, epoch: int) -> list[list[int]]:
    if shuffle:
        return shuffled_batches(count, batch_size, seed, epoch)
    return fixed_batches(count - count % batch_size, batch_size)


def _end_of(ids: list[int], limit: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The last `limit` tokens; a begin token stays in front."""
    if len(ids) <= limit:
        return ids
    begin = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return begin + ids[len(ids) - limit + len(begin) :]
