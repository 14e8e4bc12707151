"""Rewards that hold weights: a sequence classification model as judge of completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import nan
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from litgrpo.rewards.judging import (
    Encoded,
    Form,
    JudgeInput,
    Messages,
    Overlong,
    as_messages,
    batches_by_length,
)
from litgrpo.text import text_of

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
POLICY = "policy"
NO_LIMIT = 10**9  # a tokenizer without a limit says 10**30


class Judge(ABC):
    """A reward that is too heavy to copy: it is loaded once and runs in the training process."""

    in_process = True

    @abstractmethod
    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """Make ready, once; before training, so that a mistake is found there.

        Args:
            device: where the policy is.
            policy: what the policy was loaded from.
        """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Sequence[float | None] | Tensor:
        """One reward for each of N completions; arguments as those of any reward function."""


def load_judges(functions: Iterable[object], device: torch.device | str, policy: str) -> None:
    """Load every judge among some reward functions; see `Judge.load`."""
    for function in functions:
        if isinstance(function, Judge):
            function.load(device, policy)


class RewardModel(Judge):
    """The score that a reward model, or any other sequence classification model, gives.

    The model is frozen, not part of checkpoints, and computes in its own precision whatever the
    trainer's. A score that is not a number masks its completion. Input over the model's limit
    loses the start of what was asked; the completion is never cut, and one that does not fit alone
    is masked.

    Args:
        pretrained: hub id or folder of an `AutoModelForSequenceClassification`.
        label: the label whose score is the reward, by name or number; needed if there are several.
        output: the label's `logit`, or its `probability` among the labels (the sigmoid where there
            is one label, or where labels do not exclude each other).
        form: how prompt and completion are given: in the model's own `chat` format, as a `pair` of
            texts, or as one `text`. Default: chat where its tokenizer has a chat template, else
            pair where it has a separator token, else text.
        tokenizer: hub id or folder; default: the model's own.
        max_len: tokens of prompt and completion at most; default: the model's own limit.
        overlong: `truncate` the start of the prompt, or `mask` the completion.
        max_tokens: padded tokens that go through the model at once, in batches of about equal
            length; only memory and speed depend on it.
        dtype: of the weights and of the arithmetic.
        device: `policy` for where the policy is, or a device by name, such as `cpu` (best where
            every new shape is compiled, since batches differ in length).
        allow_policy_as_reward: accept a language model without a trained score, such as the policy
            itself; its scores are those of random weights, for trying things out only.
    """

    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        pretrained: str,
        *,
        label: int | str | None = None,
        output: Literal["logit", "probability"] = "logit",
        form: Form | None = None,
        tokenizer: str | None = None,
        max_len: int | None = None,
        overlong: Overlong = "truncate",
        max_tokens: int = 8192,
        dtype: Dtype = "float32",
        device: str = POLICY,
        allow_policy_as_reward: bool = False,
    ) -> None:
        """Check the settings; the weights come with `load`."""
        _allow("output", output, ("logit", "probability"))
        _allow("form", form, (None, "chat", "pair", "text"))
        _allow("overlong", overlong, ("truncate", "mask"))
        _allow("dtype", dtype, ("float32", "bfloat16", "float16", "float64"))
        for name, size in {"max_len": max_len, "max_tokens": max_tokens}.items():
            if size is not None and size < 1:
                raise ValueError(f"reward model: {name} is {size}; it must be at least 1")
        self.pretrained, self.label, self.output, self.form = pretrained, label, output, form
        self.tokenizer_path = tokenizer or pretrained
        self.max_len, self.overlong, self.max_tokens = max_len, overlong, max_tokens
        self.dtype, self.device = getattr(torch, dtype), device
        self.allow_policy_as_reward = allow_policy_as_reward
        self.model: Any = None
        self.input: JudgeInput | None = None
        self.column = 0
        self.pad_id: int | None = None

    @property
    def counts(self) -> Counter[str]:
        """How many inputs were over the limit, and how many of these were masked."""
        return Counter() if self.input is None else self.input.counts

    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """Load model and tokenizer, once.

        Args:
            device: where the policy is.
            policy: what the policy was loaded from.

        Raises:
            ValueError: there is no such model, its label is not chosen, or it is the policy.
        """
        if policy is not None and not self.allow_policy_as_reward:
            _refuse_policy(self.pretrained, policy)
        if self.model is not None:
            return
        tokenizer, model = self._loaded()
        form: Form = "text" if tokenizer.sep_token_id is None else "pair"
        form = self.form or ("chat" if tokenizer.chat_template is not None else form)
        if form == "chat" and tokenizer.chat_template is None:
            raise ValueError(
                f"reward model: the tokenizer of {self.tokenizer_path!r} has no chat template; give"
                " form: text or pair, or a `tokenizer` that has one"
            )
        limit = self.max_len or own_limit(model.config, tokenizer)
        self.input = JudgeInput(tokenizer, form, limit, self.overlong)
        self.column = column_of(self.label, model.config.id2label, self.pretrained)
        self.pad_id = model.config.get_text_config().pad_token_id
        place = (device or "cpu") if self.device == POLICY else self.device
        self.model = model.to(place).requires_grad_(False).eval()

    def _loaded(self) -> tuple[Any, Any]:
        """Tokenizer and model, still on the CPU."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.tokenizer_path)
            config = AutoConfig.from_pretrained(self.pretrained)
            scores = any("Classification" in name for name in config.architectures or [])
            if not scores and self.allow_policy_as_reward:
                config.num_labels = 1
            with torch.random.fork_rng(devices=[]), _no_progress_bars():
                torch.manual_seed(0)  # of a random score: a resumed run needs the same one
                model, found = AutoModelForSequenceClassification.from_pretrained(
                    self.pretrained,
                    config=config,
                    dtype=self.dtype,
                    output_loading_info=True,
                )
        except (OSError, ValueError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"reward model: {self.pretrained!r} cannot be loaded: {first_line}"
            ) from error
        if len(tokenizer) <= len(tokenizer.all_special_ids):  # what a folder without one gives
            raise ValueError(
                f"reward model: {self.tokenizer_path!r} has no tokenizer files; save its tokenizer"
                " there, or name another one by `tokenizer`"
            )
        missing = sorted(found["missing_keys"])
        if missing and not self.allow_policy_as_reward:
            kind = ", ".join(config.architectures or ["unknown"])
            raise ValueError(
                f"reward model: {self.pretrained!r} ({kind}) was not trained to score: it has no"
                f" {missing[0]}, so its scores would be those of random weights. Give a sequence"
                " classification model, or set allow_policy_as_reward: true to try it all the same."
            )
        return tokenizer, model

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        conversation: Sequence[Messages] | None = None,
    ) -> Tensor:
        """Score completions.

        Args:
            prompts: N texts or lists of messages.
            completions: N texts or lists of messages.
            conversation: N lists of messages, what was asked before it was put into the policy's
                chat format; taken instead of the prompts.

        Returns:
            [N] scores in the model's dtype; NaN masks a completion.
        """
        self.load()
        assert self.input is not None
        asked = prompts if conversation is None else conversation
        rows = [
            self.input(as_messages(question), text_of(completion))
            for question, completion in zip(asked, completions, strict=True)
        ]
        return self.score(rows)

    @torch.no_grad()
    def score(self, rows: Sequence[Encoded | None]) -> Tensor:
        """[N] scores of N encoded rows; NaN where there is none."""
        scores = torch.full((len(rows),), nan, dtype=self.dtype)
        device = self.model.device
        lengths = [0 if row is None else len(row["input_ids"]) for row in rows]
        for batch in batches_by_length(lengths, self.max_tokens):
            inputs = self._padded([row for n in batch if (row := rows[n]) is not None])
            # A trainer's mixed precision must not lower that of this model.
            with torch.autocast(device.type, enabled=False):
                logits = self.model(**{name: x.to(device) for name, x in inputs.items()}).logits
            scores[batch] = self._of_label(logits).to(scores)
        return scores

    def _padded(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """[M, T] ids, mask and segments, padded on the right: positions are those of a row alone.

        Causal models read the score off the last token that is not their padding token. One without
        a padding token gets one that no row contains, so that this is each row's last.
        """
        pad = self.pad_id
        if pad is None:
            used = {token for row in rows for token in row["input_ids"]}
            pad = next(token for token in count() if token not in used)
            self.model.config.get_text_config().pad_token_id = pad
        lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
        longest = int(lengths.max())
        filler = {"input_ids": pad, "token_type_ids": 0}
        padded = {
            name: torch.tensor(
                [row[name] + [filler[name]] * (longest - len(row[name])) for row in rows]
            )
            for name in rows[0]
        }
        return padded | {"attention_mask": (torch.arange(longest) < lengths).long()}

    def _of_label(self, logits: Tensor) -> Tensor:
        """[M] rewards from the scores [M, labels]."""
        if self.output == "logit":
            return logits[:, self.column]
        apart = self.model.config.problem_type == "multi_label_classification"
        alone = logits.shape[1] == 1
        return (logits.sigmoid() if alone or apart else logits.softmax(-1))[:, self.column]


def column_of(label: int | str | None, names: dict[int, str], pretrained: str) -> int:
    """The number of the chosen label, or of the only one.

    Example:
        >>> column_of("good", {0: "bad", 1: "good"}, "my_model")
        1

    Raises:
        ValueError: several labels and none chosen, or none of that name or number.
    """
    listed = ", ".join(f"{number}: {name}" for number, name in sorted(names.items()))
    if label is None and len(names) > 1:
        raise ValueError(
            f"reward model: {pretrained!r} has {len(names)} labels ({listed}), and a reward is one"
            " number; choose one with `label`"
        )
    numbers = {name: number for number, name in names.items()} | {n: n for n in names}
    chosen = 0 if label is None else label
    if chosen not in numbers:
        raise ValueError(f"reward model: {pretrained!r} has no label {label!r}; it has {listed}")
    return numbers[chosen]


def own_limit(config: Any, tokenizer: Any) -> int | None:
    """The most tokens that a model takes, or None if neither it nor its tokenizer has a limit."""
    settings = config.get_text_config().to_dict()
    limits = [settings.get(name) for name in ("max_position_embeddings", "n_positions")]
    known = [limit for limit in (*limits, tokenizer.model_max_length) if limit is not None]
    return min((limit for limit in known if limit < NO_LIMIT), default=None)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_policy(pretrained: str, policy: str) -> None:
    same = pretrained == policy
    if not same and Path(pretrained).is_dir() and Path(policy).is_dir():
        same = Path(pretrained).samefile(policy)
    if same:
        raise ValueError(
            f"reward model: {pretrained!r} is the policy itself. A language model has no score;"
            " one of random weights would take its place, and the policy would learn to please"
            " noise. Give a model that was trained to score, or set allow_policy_as_reward: true"
            " to try it all the same."
        )


def _allow(name: str, given: object, allowed: tuple[object, ...]) -> None:
    if given not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise ValueError(f"reward model: {name} is {given!r}; it can be {choices}")
