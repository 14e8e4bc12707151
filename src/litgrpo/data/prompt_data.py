"""Prompts for reinforcement learning as a LightningDataModule."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from litgrpo.arguments import at_least, require
from litgrpo.data.mixing import mixed
from litgrpo.data.prompts import tokenized_prompts
from litgrpo.data.rendering import Chat, LengthLimit, LongRows, PromptStyle, prompt_style
from litgrpo.data.rows import Table, TrainValOverlap, fingerprint, identity
from litgrpo.data.sampler import BatchLoader, FullBatches, Plan, batches_by_set, shuffled_batches
from litgrpo.data.source_data import SourceData
from litgrpo.data.sources import Row, SetsLike, SourceLike
from litgrpo.data.streaming import StreamedPrompts, rows_of, streams
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase


class PromptData(SourceData[PromptBatch]):
    r"""Prompts to train on, to validate on, to test, and to answer.

    A source is the path of a .jsonl, .json, .csv, .parquet or .txt file or a pattern of such paths
    (`data/*.jsonl`), a folder that `datasets` saved, the name of a data set on the Hugging Face Hub
    (`openai/gsm8k:main:train`), a function (`python:package.module.function?size=500`), a list of
    texts or rows, `{path: ..., limit: ...}`, or a list of such sources, with weights if you like
    (`[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]`). In Python also a
    `datasets.Dataset`. With `{path: ..., streaming: true}` training rows stay on disk until their
    batch comes. The prompt is tokenized; every other column reaches the reward functions.

    Args:
        train: source of the training prompts.
        val: source of the validation prompts; or several with names, `{easy: a.jsonl, hard:
            b.jsonl}`, whose metrics are `val/easy/...`; or hold out some of `train` by
            `val_fraction`.
        test: source of the test prompts, or several with names.
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
        max_prompt_length: tokens of a prompt at most.
        long_prompts: what to do with longer prompts: drop, truncate (keeps the end) or error.
        val_fraction: share of `train` to hold out for validation, chosen by a hash of each prompt,
            so that it never moves and is the same in supervised training.
        split_by: another column to take the hash of, such as a dialogue's persona: rows that agree
            in it are all held out or none is.
        train_val_overlap: training prompts that are also in `val`: drop, error or keep.
        shuffle: put the training prompts into another random order in every epoch.
        seed: of that order.
        split_special_tokens: read special tokens that the data write as text, such as `<eos>`, as
            plain text; by default they become those tokens.
        num_workers: processes that build batches ahead; the prompts are tokenized before, so 0 is
            enough.
        pad_to_multiple_of: length of batches is a multiple of this (fewer shapes to compile).
        tokenizer: Hub id or folder; default: the tokenizer of the model.
    """

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        train: SourceLike | None = None,
        *,
        val: SetsLike | None = None,
        test: SetsLike | None = None,
        predict: SourceLike | None = None,
        prompts: list[str] | None = None,
        columns: dict[str, str] | None = None,
        extract: dict[str, str] | None = None,
        template: str | None = None,
        chat: bool | Chat = False,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        max_prompt_length: int = 512,
        long_prompts: LongRows = "drop",
        val_fraction: float = 0.0,
        split_by: str = "prompt",
        train_val_overlap: TrainValOverlap = "drop",
        shuffle: bool = True,
        seed: int = 0,
        split_special_tokens: bool = False,
        num_workers: int = 0,
        pad_to_multiple_of: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        given = {"train": train, "val": val, "test": test}
        sources: dict[str, SetsLike | None] = {**given, "predict": predict}
        if prompts is not None:  # always texts, whatever they look like
            sources["predict"] = [{"prompt": text} for text in prompts]
        super().__init__(
            sources,
            Table(columns or {}, extract or {}, val_fraction, train_val_overlap, split_by),
            prompt_style(template, chat, split_special_tokens),
            LengthLimit("max_prompt_length", max_prompt_length, long_prompts),
            tokenizer=tokenizer,
            num_workers=num_workers,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        at_least("batch_size", batch_size, 1)
        at_least("eval_batch_size", eval_batch_size, 1)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.shuffle, self.seed = shuffle, seed

    def setup(self, stage: str) -> None:
        """Read, split and tokenize what the stage needs.

        Args:
            stage: fit, validate, test or predict.
        """
        rows = {name: part for name, part in self._rows(stage).items() if part}
        asked = [text for part in rows.values() for text in self.style.plain(part)]
        tokenizer = self.find_tokenizer(asked)
        style = self.find_style(tokenizer)
        self.sets = {
            name: tokenized_prompts(
                part,
                name,
                style=style,
                limit=self.limit,
                tokenizer=tokenizer,
                pad_to_multiple_of=self.pad_to_multiple_of,
            )
            for name, part in rows.items()
        }
        self.fingerprint = fingerprint(rows.get("train", []))
        if stage == "fit" and streams(self.sources["train"]):
            self._stream(rows.get("val", []), style, tokenizer)
        self.skip_validation_without("val", stage)
        sizes = ", ".join(f"{name} {prompts.size}" for name, prompts in self.sets.items())
        rank_zero_info(f"Prompts: {sizes}")

    def _stream(
        self, val: list[Row], style: PromptStyle, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Add the training set, whose rows stay on disk."""
        prompts = StreamedPrompts(
            rows_of(self.sources["train"]),
            {identity(row) for row in val},
            self.style.template.needs | self.table.fields,
            table=self.table,
            style=style,
            limit=self.limit,
            tokenizer=tokenizer,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        self.sets = {"train": prompts} | self.sets
        self.fingerprint = fingerprint(prompts.seen)

    def _rows(self, stage: str) -> dict[str, list[Row]]:
        needs = self.style.template.needs
        required = needs | self.table.fields
        # {stage: what its rows need}; prompts to answer need no answer.
        alone = {"predict": ("predict", needs), "test": ("test", required)}
        if self.sources["val"] is not None:
            alone["validate"] = ("val", required)
        if stage in alone:
            name, fields = alone[stage]
            return {name: self.table.read(self._source(name), fields)}
        train, val = self._train_and_val(required)
        rows = {"train": train, "val": val}
        if stage == "validate":
            del rows["train"]
            self.require_validation(val)
        return rows

    def _train_and_val(self, required: set[str]) -> tuple[list[Row], list[Row]]:
        train, val = self._source("train"), self.sources["val"]
        if not streams(train):
            return self.table.train_and_val(train, val, required)
        require(
            not self.table.val_fraction,
            "val_fraction would read all rows of `train`, which has `streaming: true`: give `val` "
            "a source of its own",
        )
        return [], [] if val is None else self.table.read(val, required)

    def _source(self, name: str) -> Any:
        source = self.sources[name]
        hint = {"predict": " (or prompts)"}.get(name, "")
        require(source is not None, f"the data have no {name} source; set {name}{hint}")
        return source

    def train_dataloader(self) -> BatchLoader[PromptBatch]:
        """Full batches; their order depends on seed and epoch only, their position is saved."""
        count, (_, processes) = len(self.sets["train"]), self.process
        require(
            count >= self.batch_size,
            f"{count} training prompts do not fill one batch of {self.batch_size}; "
            "lower batch_size or bring more prompts",
        )
        require(
            self.batch_size % processes == 0,
            f"batch_size {self.batch_size} (prompts of all processes together) does not divide "
            f"among {processes} processes",
        )
        plan: Plan = partial(_batches, count, self.batch_size, self.shuffle, self.seed)
        if self.weights is not None:
            numbers = (self.sets["train"].sources, self.weights)
            plan = partial(_mixed_batches, *numbers, self.batch_size, self.shuffle, self.seed)
        identity = {
            "prompts": self.fingerprint,
            "num_prompts": count,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
        return self.train_loader(plan, identity)

    def val_dataloader(self) -> BatchLoader[PromptBatch]:
        """The validation prompts in their order, each once."""
        return self._in_order("val")

    def test_dataloader(self) -> BatchLoader[PromptBatch]:
        """The test prompts in their order, each once."""
        return self._in_order("test")

    def predict_dataloader(self) -> BatchLoader[PromptBatch]:
        """The prompts to answer in their order, each once."""
        return self._in_order("predict")

    def _in_order(self, name: str) -> BatchLoader[PromptBatch]:
        names = self.sets[name].set_names
        return self.loader(name, batches_by_set(names, self.eval_batch_size))


def _batches(count: int, batch_size: int, shuffle: bool, seed: int, epoch: int) -> FullBatches:
    if shuffle:
        return shuffled_batches(count, batch_size, seed, epoch)
    return FullBatches(torch.arange(count), batch_size)


def _mixed_batches(
    sources: list[int], weights: list[float], size: int, shuffle: bool, seed: int, epoch: int
) -> list[list[int]]:
    rows = mixed(sources, weights, seed, epoch, shuffle)
    return [rows[start : start + size] for start in range(0, len(rows) - len(rows) % size, size)]
