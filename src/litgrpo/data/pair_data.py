"""Prompts with completions for supervised training as a LightningDataModule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch

from litgrpo.arguments import at_least, one_of, require
from litgrpo.data.conversations import Turns
from litgrpo.data.mixing import mixed
from litgrpo.data.pairs import PairBatch, PairSet, PairStyle, padding_frac, tokenized_pairs
from litgrpo.data.rendering import Chat, LengthLimit, LongRows, Template, prompt_style
from litgrpo.data.rows import Table, TrainValOverlap, fingerprint
from litgrpo.data.sampler import BatchLoader, bucketed_batches
from litgrpo.data.source_data import SourceData
from litgrpo.data.sources import SetsLike, SourceLike
from litgrpo.distributed.messages import rank_zero_info


class PairData(SourceData[PairBatch]):
    """Prompts with completions to imitate, or conversations.

    Sources, columns, template and chat are those of PromptData. The loss counts the completion and
    its end token, never the prompt. Batches hold pairs of about equal length. With `chat` a row may
    hold `messages` instead, a list of `{role: ..., content: ...}`, or a completion that is such a
    list: then the loss counts what the assistant says, and the mark that ends each turn. Without
    `chat` a completion may be such a list, too: its texts follow each other as they are, and what
    is not of the role `assistant` is read and not learned.

    Args:
        train: source of the training pairs.
        val: source of the validation pairs; or several with names, `{easy: a.jsonl, hard:
            b.jsonl}`, whose metrics are `val/easy/...`; or hold out some of `train` by
            `val_fraction`.
        columns: names of columns, ours first: `{prompt: question, completion: answer}`.
        extract: regular expression with one group per column, to keep that group only.
        template: Jinja text of the prompt with the row's columns as variables.
        completion_template: Jinja text of the completion, likewise.
        chat: `true` puts the prompt into the chat format of the tokenizer as a user's message;
            `{system: text}` adds a system message.
        train_on_turns: of a conversation, train on `all` of the assistant's turns, or on the `last`
            one, for chat templates that write earlier turns otherwise (without reasoning).
        group_by_length: batches of pairs of about equal length, so that little is padding;
            `false` mixes
            all lengths, for data whose lengths differ little but go with what there is to learn.
        batch_size: pairs per optimizer step at most, over all processes together; null for no
            limit but max_tokens_per_batch.
        max_tokens_per_batch: tokens per optimizer step at most, padding included, likewise.
        max_length: tokens of prompt and completion at most.
        long_examples: what to do with longer pairs: drop, truncate (keeps the start) or error.
        val_fraction: share of `train` to hold out for validation, chosen by a hash of each prompt,
            so that it never moves and is the same in reinforcement learning.
        split_by: another column to take the hash of, such as a dialogue's persona: rows that agree
            in it are all held out or none is.
        train_val_overlap: training prompts that are also in `val`: drop, error or keep.
        seed: of the order of batches and of pairs among those of about equal length.
        num_workers: processes that build batches ahead; the pairs are tokenized before, so 0 is
            enough.
        pad_to_multiple_of: length of batches is a multiple of this (fewer shapes to compile).
        tokenizer: Hub id or folder; default: the tokenizer of the model.
    """

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        train: SourceLike,
        *,
        val: SetsLike | None = None,
        columns: dict[str, str] | None = None,
        extract: dict[str, str] | None = None,
        template: str | None = None,
        completion_template: str | None = None,
        chat: bool | Chat = False,
        train_on_turns: Turns = "all",
        group_by_length: bool = True,
        batch_size: int | None = 32,
        max_tokens_per_batch: int | None = None,
        max_length: int = 1024,
        long_examples: LongRows = "drop",
        val_fraction: float = 0.0,
        split_by: str = "prompt",
        train_val_overlap: TrainValOverlap = "drop",
        seed: int = 0,
        num_workers: int = 0,
        pad_to_multiple_of: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        instead = {"messages": {"prompt", "completion"}} if chat else {}
        super().__init__(
            {"train": train, "val": val},
            Table(columns or {}, extract or {}, val_fraction, train_val_overlap, split_by, instead),
            prompt_style(template, chat),
            LengthLimit("max_length", max_length, long_examples, "long_examples"),
            tokenizer=tokenizer,
            num_workers=num_workers,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        at_least("batch_size", batch_size, 1)
        at_least("max_tokens_per_batch", max_tokens_per_batch, 1)
        unlimited = batch_size is None and max_tokens_per_batch is None
        require(not unlimited, "batch_size and max_tokens_per_batch are both null; set one of them")
        self.train = train
        self.completion = Template("completion", completion_template)
        self.completion.check()
        one_of("train_on_turns", train_on_turns, get_args(Turns))
        self.pair_style = PairStyle(self.style, self.completion, train_on_turns)
        self.batch_size, self.max_tokens_per_batch, self.seed = (
            batch_size,
            max_tokens_per_batch,
            seed,
        )
        self.group_by_length = group_by_length

    def setup(self, stage: str) -> None:
        """Read, split and tokenize.

        The training rows are read for validation too: a tokenizer may be fitted to them.

        Args:
            stage: fit or validate.
        """
        known = stage in ("fit", "validate")
        require(known, f"PairData is for fit and validate, not {stage}; use PromptData")
        required = self.style.template.needs | self.completion.needs | self.table.fields
        train, val = self.table.train_and_val(self.train, self.sources["val"], required)
        if stage == "validate":
            self.require_validation(val)
        tokenizer = self.find_tokenizer([*self.pair_style.plain(train)])
        rows = {"train": train, "val": val}
        self.sets = {
            name: tokenized_pairs(
                part,
                name,
                style=self.pair_style,
                limit=self.limit,
                tokenizer=tokenizer,
                pad_to_multiple_of=self.pad_to_multiple_of,
            )
            for name, part in rows.items()
            if part
        }
        self.fingerprint = fingerprint(train)
        self.skip_validation_without("val", stage)
        for name, pairs in self.sets.items():
            batches = self._plan(pairs, range(len(pairs)), 0)
            rank_zero_info(
                f"{name}: {len(pairs)} pairs, {len(batches)} batches, "
                f"{100 * padding_frac(pairs.lengths, batches):.1f} % padding"
            )

    def _plan(self, pairs: PairSet, rows: Sequence[int], epoch: int) -> list[list[int]]:
        """Batches of these rows, which may be numbered beyond the last: those come again."""
        lengths = pairs.lengths[torch.tensor(rows) % len(pairs)]
        if not self.group_by_length:
            lengths = torch.full_like(lengths, int(lengths.max()))
        places = bucketed_batches(
            lengths, self.batch_size, self.max_tokens_per_batch, self.seed, epoch
        )
        return [[rows[place] for place in batch] for batch in places]

    def _mixed_plan(self, weights: list[float], epoch: int) -> list[list[int]]:
        pairs = self.sets["train"]
        return self._plan(pairs, mixed(pairs.sources, weights, self.seed, epoch), epoch)

    def train_dataloader(self) -> BatchLoader[PairBatch]:
        """All pairs; their order depends on seed and epoch only, their position is saved."""
        pairs, plan = self.sets["train"], partial(self._plan, self.sets["train"])
        identity = {
            "pairs": self.fingerprint,
            "num_pairs": len(pairs),
            "batch_size": self.batch_size,
            "max_tokens_per_batch": self.max_tokens_per_batch,
            "group_by_length": self.group_by_length,
            "seed": self.seed,
        }
        if self.weights is None:
            return self.train_loader(partial(plan, range(len(pairs))), identity)
        require(
            self.max_tokens_per_batch is None,
            "sources with weights give other rows in every epoch, and max_tokens_per_batch "
            "another number of batches: leave max_tokens_per_batch out and set batch_size",
        )
        return self.train_loader(partial(self._mixed_plan, self.weights), identity)

    def val_dataloader(self) -> BatchLoader[PairBatch]:
        """The validation pairs, each once, in batches of one set."""
        pairs, rows_of = self.sets["val"], dict[str, list[int]]()
        for row, name in enumerate(pairs.set_names):
            rows_of.setdefault(name, []).append(row)
        plans = [self._plan(pairs, rows, 0) for rows in rows_of.values()]
        return self.loader("val", [batch for plan in plans for batch in plan])
