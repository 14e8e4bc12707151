"""Data modules: prompts for GRPO (`PromptData`), prompts with completions for SFT (`PairData`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, get_args
from weakref import WeakKeyDictionary

import torch
from lightning import LightningDataModule, Trainer

from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import at_least, one_of, require
from litgrpo.data.curriculum import Curriculum, CurriculumOrder
from litgrpo.data.loader import (
    Batch,
    BatchLoader,
    BatchOrder,
    batch_by_length,
    batch_by_set,
    batches_in_turn,
    mix_sources,
    shuffle_batches,
)
from litgrpo.data.messages import Messages
from litgrpo.data.pairs import (
    PairBatch,
    PairFormat,
    PairSet,
    TrainOnTurns,
    padding_frac,
    tokenize_pairs,
)
from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import (
    Chat,
    ChatPromptFormat,
    LengthLimit,
    LongExamples,
    LongPrompts,
    PromptDropped,
    PromptFormat,
    RunTime,
    TextTemplate,
    build_prompt_format,
)
from litgrpo.data.rows import RowReader, TrainValOverlap
from litgrpo.data.sources import (
    Rows,
    SetsLike,
    Source,
    SourceLike,
    resolve_source,
    task_weights_of,
)
from litgrpo.data.tokenization import load_tokenizer, require_pad_and_eos
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; used in annotations only
    from transformers import PreTrainedTokenizerBase


# {trainer: its `limit_val_batches`, while a fit without validation sets it to 0}
_validation_limits: WeakKeyDictionary[Trainer, Any] = WeakKeyDictionary()


def restore_validation(trainer: Trainer) -> None:
    """Restore what `SourceData.disable_validation_without` disabled."""
    if trainer in _validation_limits:
        trainer.limit_val_batches = _validation_limits.pop(trainer)


class SourceData(LightningDataModule, Generic[Batch]):
    """Base class of data modules: rows of sources, tokenized for a model."""

    # A set of `sources` may be several with names, `{name: source}`; those of `train` are tasks,
    # whose shares `task_weights` sets. The tokenizer is that of the model if it is None.

    def __init__(
        self,
        sources: Mapping[str, SetsLike | None],
        reader: RowReader,
        prompt_format: PromptFormat,
        limit: LengthLimit,
        *,
        tokenizer: str | None,
        pad_to_multiple_of: int,
        task_weights: dict[str, float] | None,
    ) -> None:
        super().__init__()
        at_least("pad_to_multiple_of", pad_to_multiple_of, 1)
        twice = sources["val"] is not None and reader.val_fraction
        require(not twice, "val and val_fraction are both set; leave out one of them")
        template = prompt_format.template
        top_columns = {name.partition(".")[0] for name in reader.columns.values()}
        names = {"prompt", "messages", *reader.columns.values(), *top_columns, *template.variables}
        self.sources = {
            role: resolve_source(source, names, role) for role, source in sources.items()
        }
        train = self.sources["train"]
        self.weights = task_weights_of(train, task_weights)
        tasks = train.items() if isinstance(train, dict) else ()
        self.reader = replace(
            reader, tasks={name: task for name, task in tasks if isinstance(task, Source)}
        )
        self.prompt_format, self.limit = prompt_format, limit
        self.tokenizer, self.pad_to_multiple_of = tokenizer, pad_to_multiple_of
        self.sets: dict[str, Any] = {}
        self.run_time = RunTime()
        self._stage = ""  # of the last `setup`
        self._saved_order: dict[str, Any] | None = None  # of the checkpoint of a resumed run
        # The format with the tools of the environment, and its tokenizer; set by `setup`.
        self.final_format: tuple[PromptFormat, PreTrainedTokenizerBase] | None = None

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """Rank and number of ranks; (0, 1) without a trainer."""
        trainer = self.trainer
        return (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)

    def find_tokenizer(self, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the data, if one is set, else that of the model."""
        # The model's `fit_tokenizer` may train it on the texts.
        if self.tokenizer is not None:
            return require_pad_and_eos(load_tokenizer(self.tokenizer))
        if self.trainer is None:
            raise ValueError("without a Trainer the data need a tokenizer; set tokenizer")
        return require_pad_and_eos(self._model.fit_tokenizer(texts))

    @property
    def _model(self) -> Any:
        """The module that trains on the data; None without a trainer."""
        return None if self.trainer is None else self.trainer.lightning_module

    def format_for_model(self) -> PromptFormat:
        """Return the prompt format for the kind of model that reads the prompts."""
        uses_encoder = getattr(self._model, "uses_encoder", lambda: False)  # as T5 does
        prompt_format = replace(self.prompt_format, encoder_decoder=uses_encoder())
        return prompt_format.at_time(self.run_time)

    def add_tools(self, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
        """Return the prompt format with the tools of the model's environment."""
        # JSON schemas, or {task: JSON schemas}.
        tools = getattr(self._model, "shown_tools", [])
        prompt_format = self.format_for_model().with_tools(tools, tokenizer)
        self.final_format = prompt_format, tokenizer
        return prompt_format

    def encode_opening(
        self, prompts: PromptBatch, row: int, added: str | Messages, split_added: bool = True
    ) -> list[int]:
        """Return token ids of prompt number `row` with an environment's first observation."""
        # A text goes to the end of the last user message (without chat format: of the prompt). A
        # prompt that is too long with it is dropped or an error, as when the data were loaded.
        if not added:
            return prompts.prompt_ids[row][prompts.prompt_mask[row]].tolist()
        assert self.final_format is not None
        prompt_format, tokenizer = self.final_format
        columns = {name: values[row] for name, values in prompts.columns.items()}
        text = prompts.prompts[row]
        ids = prompt_format.encode_opening(text, columns, added, tokenizer, split_added)
        if len(ids) > self.limit.tokens:
            problem = (
                f"the prompt has {len(ids)} tokens with the environment's first observation "
                f"({self.limit.name}={self.limit.tokens})"
            )
            require(self.limit.action != "error", f"{problem}; {self.limit.remedy}")
            raise PromptDropped(problem)
        return ids

    def require_validation(self, rows: Rows | None) -> Rows:
        """Return the rows to validate on."""
        if rows is None:
            raise ValueError("nothing to validate on: set val or val_fraction of the data")
        return rows

    def disable_validation_without(self, name: str, stage: str) -> None:
        """Disable validation of a fit without this set; Lightning warns of an empty loader.

        Other data, or another call of the trainer, may have the set: the limit is restored.
        """
        if self.trainer is None:
            return
        restore_validation(self.trainer)
        if stage == "fit" and name not in self.sets:
            _validation_limits[self.trainer] = self.trainer.limit_val_batches
            self.trainer.limit_val_batches = 0

    def teardown(self, stage: str) -> None:
        """Forget the checkpoint, and restore the trainer's limit on validation batches."""
        self._saved_order = None
        if self.trainer is not None:
            restore_validation(self.trainer)

    @property
    def mixture(self) -> list[tuple[float, int]]:
        """Weight and number of rows of each training source; [] without weights."""
        if not self.weights:
            return []
        counts = Counter(self.weight_numbers)
        return [(weight, counts[n]) for n, weight in enumerate(self.weights)]

    @property
    def weight_numbers(self) -> list[int]:
        """Which of the weights each training row has: that of its task."""
        numbers = {name: number for number, name in enumerate(self.sources["train"])}
        return [numbers[name] for name in self.sets["train"].set_names]

    def train_loader(self, order: BatchOrder, identity: dict[str, Any]) -> BatchLoader[Batch]:
        """Return a loader of training batches, whose position is part of checkpoints."""
        identity = identity | {"mixture": self.mixture or None}
        loader = BatchLoader(self.sets["train"], order, identity)
        if self._saved_order is not None:
            loader.load_order_state(self._saved_order)
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Return what further batches depend on.

        Lightning saves the position in the epoch with its loops, and drops it if the epoch is over.
        """
        loader = None if self.trainer is None else self.trainer.train_dataloader
        order = {"order": loader.order_state()} if isinstance(loader, BatchLoader) else {}
        return order | ({"run_time": self.run_time.time.isoformat()} if self._writes_time else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the batches that follow those of a checkpoint."""
        self._saved_order = state_dict.get("order")
        self.load_run_time(state_dict)

    def load_run_time(self, state_dict: dict[str, Any]) -> None:
        """Write the time of a checkpoint's run, if the chat template writes one."""
        time = datetime.fromisoformat(state_dict.get("run_time", self.run_time.time.isoformat()))
        changed, self.run_time.time = time != self.run_time.time, time
        if changed and self._writes_time:
            self.setup(self._stage)

    @property
    def _writes_time(self) -> bool:
        """True if the chat template reads the clock."""
        if self.final_format is None:
            return False
        prompt_format, tokenizer = self.final_format
        is_chat = isinstance(prompt_format, ChatPromptFormat)
        return is_chat and "strftime_now" in str(tokenizer.chat_template)

    def loader(self, name: str, batches: list[list[int]]) -> BatchLoader[Batch]:
        """Return a loader of the same batches of a set in every epoch."""
        return BatchLoader(
            self.sets[name], BatchOrder(lambda _: batches, *self.rank_and_world_size)
        )


class PromptData(SourceData[PromptBatch]):
    r"""Prompts to train on, to validate on, to test, and to answer.

    A source is the path of a .jsonl, .json, .csv, .parquet or .txt file or a pattern of such paths
    (`data/*.jsonl`), a folder that `datasets` saved, the name of a data set on the Hugging Face Hub
    (`openai/gsm8k:main:train`), a function (`python:package.module.function?size=500`), a list of
    texts or rows, `{path: ..., limit: ...}`, or several of these with names (`{sums: a.jsonl,
    letters: b.jsonl}`). In Python also a `pathlib.Path`, a DataFrame, a `datasets.Dataset`,
    {column: values} or a generator. Rows of large files stay on disk until their batch is built.
    The prompt is tokenized; every other column reaches the reward functions.

    Args:
        train: source of the training prompts; or several tasks with names, `{math: a.jsonl, chat:
            b.jsonl}`, whose rows get the name as column `task` (docs/howto/tasks_and_rollouts.md).
        val: source of the validation prompts; or several with names, `{easy: a.jsonl, hard:
            b.jsonl}`, whose metrics are `val/easy/...`; or hold out some of `train` with
            `val_fraction`.
        test: source of the test prompts, or several with names.
        task_weights: shares of the tasks in the batches, such as `{math: 2, chat: 1}`; default: as
            many as they have rows.
        curriculum: sample prompts less often that the policy always or never solves; null: each
            once per epoch.
        predict: source of the prompts to answer.
        prompts: the prompts to answer, a text or a list of texts, instead of `predict`.
        columns: names of columns, litgrpo's first: `{prompt: question, answer: answer}`; or of a
            field within a column, `{answer: reward_model.ground_truth}`.
        extract: regular expression with one group per column, to keep that group only:
            `{answer: '####\s*(.+)'}`.
        template: Jinja text with the row's columns as variables, such as `Question: {{ prompt }}`.
        reference_template: Jinja text of the prompt that the reference of the KL term reads instead
            of the policy's, with the row's columns as variables; `prompt` is the policy's prompt,
            after `template`, or the last user message, which the text replaces. Such as `{{ prompt
            }} The answer is {{ answer }}.` for a teacher that sees the answer; see
            docs/howto/distillation.md.
        chat: `true` renders the prompt with the chat template of the tokenizer as a user message;
            `{system: text}` adds a system message.
        batch_size: prompts per iteration, all processes together.
        eval_batch_size: prompts per batch in validation, test and prediction (default: batch_size).
        max_prompt_length: largest number of tokens of a prompt.
        long_prompts: what to do with longer prompts: drop or error.
        val_fraction: share of `train` to hold out for validation, chosen by a hash of each prompt,
            so that it never changes and is the same in SFT and GRPO.
        split_by: another column to hash, such as a dialogue's persona: rows that agree in it are
            all held out, or none is.
        train_val_overlap: training prompts that are also in `val`: drop, error or keep.
        shuffle: shuffle the training prompts in every epoch; without it, those that fill no batch
            are the first of the next epoch.
        seed: random seed of the order.
        split_special_tokens: encode special tokens that the data write as text, such as `<eos>`, as
            plain text; by default they become those tokens.
        pad_to_multiple_of: length of batches is a multiple of this (fewer shapes to compile).
        tokenizer: Hub id or folder; default: the tokenizer of the model.

    Example:
        >>> data = PromptData(
        ...     train=[{"question": "What is 3+4?", "answer": "so #### 7"}],
        ...     columns={"prompt": "question"},
        ...     extract={"answer": "####(.+)"},
        ...     batch_size=1,
        ... )
        >>> data.reader.read(data.sources["train"])[0].values["answer"]
        '7'
    """

    @check_argument_types("train", "val", "test", "predict")
    def __init__(  # noqa: PLR0913 (each is an option of a recipe)
        self,
        train: SetsLike | None = None,
        *,
        val: SetsLike | None = None,
        test: SetsLike | None = None,
        task_weights: dict[str, float] | None = None,
        curriculum: Curriculum | None = None,
        predict: SourceLike | None = None,
        prompts: list[str] | str | None = None,
        columns: dict[str, str] | None = None,
        extract: dict[str, str] | None = None,
        template: str | None = None,
        reference_template: str | None = None,
        chat: bool | Chat = False,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        max_prompt_length: int = 512,
        long_prompts: LongPrompts = "drop",
        val_fraction: float = 0.0,
        split_by: str = "prompt",
        train_val_overlap: TrainValOverlap = "drop",
        shuffle: bool = True,
        seed: int = 0,
        split_special_tokens: bool = False,
        pad_to_multiple_of: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        if prompts is not None:  # never paths, even if a prompt looks like one
            texts = [prompts] if isinstance(prompts, str) else prompts
            predict = [{"prompt": text} for text in texts]
        super().__init__(
            {"train": train, "val": val, "test": test, "predict": predict},
            RowReader(columns or {}, extract or {}, val_fraction, train_val_overlap, split_by),
            build_prompt_format(template, chat, split_special_tokens, reference_template),
            LengthLimit("max_prompt_length", max_prompt_length, long_prompts),
            tokenizer=tokenizer,
            pad_to_multiple_of=pad_to_multiple_of,
            task_weights=task_weights,
        )
        one_of("long_prompts", long_prompts, get_args(LongPrompts))
        at_least("batch_size", batch_size, 1)
        at_least("eval_batch_size", eval_batch_size, 1)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.curriculum, self.shuffle, self.seed = curriculum, shuffle, seed

    def setup(self, stage: str) -> None:
        """Read, split and tokenize the sets of a stage: fit, validate, test or predict."""
        self._stage = stage
        rows = self._read_sets(stage)
        texts = (text for part in rows.values() for text in self.prompt_format.plain_texts(part))
        tokenizer = self.find_tokenizer(texts)
        prompt_format = self.add_tools(tokenizer)
        self.sets = {
            name: PromptSet(
                part,
                name,
                # Only training compares with the reference.
                prompt_format=prompt_format
                if name == "train"
                else replace(prompt_format, reference=None),
                limit=self.limit,
                tokenizer=tokenizer,
                pad_to_multiple_of=self.pad_to_multiple_of,
            )
            for name, part in rows.items()
        }
        if stage == "fit":
            self._check_batches()
        self.disable_validation_without("val", stage)
        sizes = ", ".join(f"{name} {len(prompts)}" for name, prompts in self.sets.items())
        rank_zero_info(f"Prompts: {sizes}")

    def _check_batches(self) -> None:
        """Check before any evaluation that the training prompts make batches."""
        count, (_, world_size) = len(self.sets["train"]), self.rank_and_world_size
        require(
            count >= self.batch_size,
            f"{count} training prompts do not fill one batch of {self.batch_size}; "
            "lower batch_size or add prompts",
        )
        require(
            self.batch_size % world_size == 0,
            f"batch_size {self.batch_size} (prompts of all processes together) is not divisible by "
            f"{world_size} processes",
        )
        if self.weights is not None:
            self._plan_epoch(0)  # each source needs a row of it
        elif self.shuffle and count % self.batch_size:
            rank_zero_info(
                f"train: {count % self.batch_size} of {count} prompts fill no batch of "
                f"{self.batch_size}: an epoch leaves out as many, others each time"
            )

    def train_dataloader(self) -> BatchLoader[PromptBatch]:
        """Return full batches; their order depends only on seed and epoch."""
        prompts = self.sets["train"]
        identity = {
            "prompts": prompts.data_fingerprint,
            "rendered_prompts": prompts.token_fingerprint,
            "num_prompts": len(prompts),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "curriculum": self.curriculum and vars(self.curriculum),
        }
        return self.train_loader(self._train_order(), identity)

    def _train_order(self) -> BatchOrder:
        rank, world_size = self.rank_and_world_size
        if self.curriculum is None:
            return BatchOrder(self._plan_epoch, rank, world_size)
        prompts: PromptSet = self.sets["train"]
        return CurriculumOrder(
            self._plan_epoch,
            self.curriculum,
            index_of=prompts.index_of,
            num_indices=prompts.num_indices,
            num_prompts=len(prompts),
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )

    def val_dataloader(self) -> BatchLoader[PromptBatch]:
        return self._loader_in_order("val")

    def test_dataloader(self) -> BatchLoader[PromptBatch]:
        return self._loader_in_order("test")

    def predict_dataloader(self) -> BatchLoader[PromptBatch]:
        return self._loader_in_order("predict")

    def _loader_in_order(self, name: str) -> BatchLoader[PromptBatch]:
        names = self.sets[name].set_names
        return self.loader(name, batch_by_set(names, self.eval_batch_size))

    def _plan_epoch(self, epoch: int) -> Sequence[list[int]]:
        count, size = len(self.sets["train"]), self.batch_size
        if self.weights is None:
            if self.shuffle:
                return shuffle_batches(count, size, self.seed, epoch)
            return batches_in_turn(count, size, epoch)
        rows = mix_sources(
            self.weight_numbers,
            self.weights,
            self.seed,
            epoch,
            self.shuffle,
            count=count - count % size,
        )
        return [rows[n : n + size] for n in range(0, len(rows), size)]

    def _read_sets(self, stage: str) -> dict[str, Rows]:
        needed_by_template = self.prompt_format.template.required
        required = needed_by_template | self.reader.required
        if stage == "predict":  # prompts to answer need no reference answer
            return {"predict": self.reader.read(self._source("predict"), needed_by_template)}
        if stage == "test":
            return {"test": self.reader.read(self._source("test"), required)}
        if stage == "validate" and self.sources["val"] is not None:
            return {"val": self.reader.read(self.sources["val"], required)}
        train, val = self.reader.read_train_and_val(
            self._source("train"), self.sources["val"], required
        )
        if stage == "validate":
            return {"val": self.require_validation(val)}
        return {"train": train} if val is None else {"train": train, "val": val}

    def _source(self, name: str) -> Any:
        hint = " (or prompts)" if name == "predict" else ""
        require(self.sources[name] is not None, f"the data have no {name} source; set {name}{hint}")
        return self.sources[name]


class PairData(SourceData[PairBatch]):
    """Prompts with completions for supervised fine-tuning, or conversations.

    Sources, columns, template and chat are those of PromptData. The loss includes the completion
    and its end token, never the prompt. Batches contain pairs of about equal length.

    With `chat` a row may instead have `messages`, a list of `{role: ..., content: ...}`, or a
    completion that is such a list: then the loss includes the assistant's messages and the tokens
    that end them. Without `chat` a completion may be such a list as well: its texts are
    concatenated, and only those of the role `assistant` are in the loss.

    Args:
        train: source of the training pairs; or several with names, `{math: a.jsonl, chat:
            b.jsonl}`.
        val: source of the validation pairs; or several with names, `{easy: a.jsonl, hard:
            b.jsonl}`, whose metrics are `val/easy/...`; or hold out some of `train` with
            `val_fraction`.
        task_weights: shares of the named sources in the batches, such as `{math: 2, chat: 1}`;
            default: as many as they have rows.
        columns: names of columns, litgrpo's first: `{prompt: question, completion: answer}`.
        extract: regular expression with one group per column, to keep that group only.
        template: Jinja text of the prompt with the row's columns as variables.
        completion_template: Jinja text of the completion with the row's columns as variables.
        chat: `true` renders the prompt with the chat template of the tokenizer as a user message;
            `{system: text}` adds a system message.
        train_on_turns: of a conversation, train on `all` of the assistant's turns, or on the `last`
            one, for chat templates that render earlier turns differently (without reasoning).
        group_by_length: batches of pairs of about equal length, to reduce padding; `false` mixes
            all lengths, for data whose content depends on the length.
        batch_size: largest number of pairs per optimizer step, all processes together; null for no
            limit but max_tokens_per_batch.
        max_tokens_per_batch: largest number of tokens per optimizer step, padding included, all
            processes together.
        max_length: largest number of tokens of prompt and completion.
        long_examples: what to do with longer pairs: drop, truncate (keeps the start) or error.
        val_fraction: share of `train` to hold out for validation, chosen by a hash of each prompt,
            so that it never changes and is the same in SFT and GRPO.
        split_by: another column to hash, such as a dialogue's persona: rows that agree in it are
            all held out, or none is.
        train_val_overlap: training prompts that are also in `val`: drop, error or keep.
        seed: random seed of the order of batches, and of pairs among those of about equal length.
        pad_to_multiple_of: length of batches is a multiple of this (fewer shapes to compile).
        tokenizer: Hub id or folder; default: the tokenizer of the model.

    Example:
        >>> data = PairData(train=[{"prompt": "2+2?", "completion": "4"}], batch_size=1)
        >>> data.max_tokens_per_batch is None
        True
    """

    @check_argument_types("train", "val", "test")
    def __init__(  # noqa: PLR0913 (each is an option of a recipe)
        self,
        train: SetsLike,
        *,
        val: SetsLike | None = None,
        task_weights: dict[str, float] | None = None,
        columns: dict[str, str] | None = None,
        extract: dict[str, str] | None = None,
        template: str | None = None,
        completion_template: str | None = None,
        chat: bool | Chat = False,
        train_on_turns: TrainOnTurns = "all",
        group_by_length: bool = True,
        batch_size: int | None = 32,
        max_tokens_per_batch: int | None = None,
        max_length: int = 1024,
        long_examples: LongExamples = "drop",
        val_fraction: float = 0.0,
        split_by: str = "prompt",
        train_val_overlap: TrainValOverlap = "drop",
        seed: int = 0,
        pad_to_multiple_of: int = 1,
        tokenizer: str | None = None,
    ) -> None:
        substitutes = {"messages": {"prompt", "completion"}} if chat else {}
        super().__init__(
            {"train": train, "val": val},
            RowReader(
                columns or {}, extract or {}, val_fraction, train_val_overlap, split_by, substitutes
            ),
            build_prompt_format(template, chat),
            LengthLimit("max_length", max_length, long_examples, "long_examples"),
            tokenizer=tokenizer,
            pad_to_multiple_of=pad_to_multiple_of,
            task_weights=task_weights,
        )
        at_least("batch_size", batch_size, 1)
        at_least("max_tokens_per_batch", max_tokens_per_batch, 1)
        unlimited = batch_size is None and max_tokens_per_batch is None
        require(not unlimited, "batch_size and max_tokens_per_batch are both null; set one of them")
        require(
            self.weights is None or max_tokens_per_batch is None,
            "with task_weights every epoch has other rows, and with max_tokens_per_batch another "
            "number of batches: leave max_tokens_per_batch out and set batch_size",
        )
        one_of("long_examples", long_examples, get_args(LongExamples))
        one_of("train_on_turns", train_on_turns, get_args(TrainOnTurns))
        completion = TextTemplate("completion", completion_template, "completion_template")
        self.pair_format = PairFormat(self.prompt_format, completion, train_on_turns)
        self.batch_size, self.max_tokens_per_batch = batch_size, max_tokens_per_batch
        self.group_by_length, self.seed = group_by_length, seed

    def setup(self, stage: str) -> None:
        """Read, split and tokenize.

        The training rows are also read for validation: a tokenizer may be trained on them.
        """
        self._stage = stage
        has_pairs = stage in ("fit", "validate")
        require(has_pairs, f"PairData is for fit and validate, not {stage}; use PromptData")
        required = self.prompt_format.template.required | self.pair_format.completion.required
        train, val = self.reader.read_train_and_val(
            self.sources["train"], self.sources["val"], required | self.reader.required
        )
        if stage == "validate":
            self.require_validation(val)
        tokenizer = self.find_tokenizer(self.pair_format.plain_texts(train))
        rows = {"train": train} if val is None else {"train": train, "val": val}
        pair_format = replace(self.pair_format, prompt=self.format_for_model())
        self.final_format = pair_format.prompt, tokenizer
        self.sets = {
            name: tokenize_pairs(
                part,
                name,
                pair_format=pair_format,
                limit=self.limit,
                tokenizer=tokenizer,
                pad_to_multiple_of=self.pad_to_multiple_of,
            )
            for name, part in rows.items()
        }
        self.disable_validation_without("val", stage)
        for name, pairs in self.sets.items():
            batches = self._batches(pairs, range(len(pairs)), 0)
            rank_zero_info(
                f"{name}: {len(pairs)} pairs, {len(batches)} batches, "
                f"{100 * padding_frac(pairs.lengths, batches):.1f} % padding"
            )

    def train_dataloader(self) -> BatchLoader[PairBatch]:
        """Return all pairs; their order depends only on seed and epoch."""
        pairs = self.sets["train"]
        identity = {
            "pairs": pairs.data_fingerprint,
            "rendered_pairs": pairs.token_fingerprint,
            "num_pairs": len(pairs),
            "batch_size": self.batch_size,
            "max_tokens_per_batch": self.max_tokens_per_batch,
            "group_by_length": self.group_by_length,
            "seed": self.seed,
        }
        return self.train_loader(BatchOrder(self._plan_epoch, *self.rank_and_world_size), identity)

    def val_dataloader(self) -> BatchLoader[PairBatch]:
        """Return the validation pairs, each once, in batches of one set."""
        pairs, rows_of = self.sets["val"], dict[str, list[int]]()
        for row, name in enumerate(pairs.set_names):
            rows_of.setdefault(name, []).append(row)
        batches = [batch for rows in rows_of.values() for batch in self._batches(pairs, rows, 0)]
        return self.loader("val", batches)

    def _plan_epoch(self, epoch: int) -> list[list[int]]:
        pairs = self.sets["train"]
        if self.weights is None:
            return self._batches(pairs, range(len(pairs)), epoch)
        rows = mix_sources(self.weight_numbers, self.weights, self.seed, epoch)
        return self._batches(pairs, rows, epoch)

    def _batches(self, pairs: PairSet, rows: Sequence[int], epoch: int) -> list[list[int]]:
        """Return batches of these rows; numbers beyond the last row are repetitions."""
        lengths = pairs.lengths[torch.tensor(rows) % len(pairs)]
        if not self.group_by_length:
            lengths = torch.full_like(lengths, int(lengths.max()))
        places = batch_by_length(
            lengths, self.batch_size, self.max_tokens_per_batch, self.seed, epoch
        )
        return [[rows[place] for place in batch] for batch in places]


def validation_set_names(trainer: Trainer) -> list[str]:
    """Return the names of the sets that a trainer validates or tests on; [""] without names."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    sets = data.sets if isinstance(data, SourceData) else {}
    held_out = [part for role, part in sets.items() if role in ("val", "test")]
    return list(dict.fromkeys(name for part in held_out for name in part.set_names)) or [""]


MAX_TASKS = 32  # whose metrics are logged


def task_names(trainer: Trainer) -> list[str]:
    """Return the tasks of the training prompts, the values of their column `task`.

    Empty without such a column, and for more than 32 values.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    train = data.sets.get("train") if isinstance(data, SourceData) else None
    names = sorted(train.tasks) if isinstance(train, PromptSet) else []
    return names if len(names) <= MAX_TASKS else []


def curriculum_of(trainer: Trainer) -> CurriculumOrder | None:
    """Return the order of the training prompts if it is a curriculum's."""
    loader = trainer.train_dataloader
    order = loader.sampler if isinstance(loader, BatchLoader) else None
    return order if isinstance(order, CurriculumOrder) else None


def reward_columns(trainer: Trainer) -> list[dict[str, list[Any]]]:
    """Return {column: values} of each set whose completions are rewarded.

    Of a large set, these are the rows that stay in memory.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    sets = data.sets if isinstance(data, SourceData) else {}
    rewarded = {name: part for name, part in sets.items() if name != "predict"}
    return [part.columns for part in rewarded.values() if isinstance(part, PromptSet)]
