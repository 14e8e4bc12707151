"""Rewards that hold weights: a sequence classification model as judge of completions.

`RewardModel` scores what `JudgeInput` has put into token ids within the model's limit.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf, nan
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import at_least, first_line, one_of, require
from litgrpo.data.tokenization import Placeholders, encode_with_placeholders
from litgrpo.distributed.random_state import seeded_on_cpu
from litgrpo.models.weights import check_finite
from litgrpo.text.answers import text_of
from litgrpo.text.chat_templates import TemplateError, render_messages
from litgrpo.workers.failures import FailureCounter

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]
Output = Literal["logit", "probability"]
Encoded = dict[str, list[int]]
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
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One reward for each of N completions; arguments as those of any reward function."""


def load_judges(functions: Iterable[object], device: torch.device | str, policy: str) -> None:
    """Load every judge among some reward functions; see `Judge.load`."""
    for function in functions:
        if isinstance(function, Judge):
            function.load(device, policy)


class RewardModel(Judge):
    """The score that a reward model, or any other sequence classification model, gives.

    The model is frozen, not part of checkpoints, and computes in its own precision, independent of
    the trainer's. It reads prompt and completion in its tokenizer's chat template; without one as
    two texts if the tokenizer has a separator token, else as one text. A score that is not a number
    masks its completion. Input over the model's limit loses the start of what was asked; the
    completion is never cut, and one that does not fit alone is masked.

    Args:
        pretrained: hub id or folder of an `AutoModelForSequenceClassification`.
        label: the label whose score is the reward, by name or number; needed if there are several.
        output: the label's `logit`, or its `probability` among the labels (the sigmoid where there
            is one label, or where labels do not exclude each other).
        tokenizer: hub id or folder; default: the model's own.
        max_length: maximum tokens of prompt and completion; default: the model's limit.
        max_batch_tokens: padded tokens that go through the model at once, in batches of about equal
            length; only memory and speed depend on it.
        dtype: of the weights and of the arithmetic.
        device: `policy` for where the policy is, or a device by name, such as `cpu` (best where
            every new shape is compiled, since batches differ in length).
        allow_policy_as_reward: accept a language model without a trained score, such as the policy
            itself; its scores are those of random weights, for trying things out only.

    Example:
        >>> model = RewardModel("Skywork/Skywork-Reward-V2-Qwen3-0.6B", max_length=2048)
        >>> model.max_length  # the weights are loaded when training starts
        2048
    """

    @check_argument_types()
    def __init__(
        self,
        pretrained: str,
        *,
        label: int | str | None = None,
        output: Output = "logit",
        tokenizer: str | None = None,
        max_length: int | None = None,
        max_batch_tokens: int = 8192,
        dtype: Dtype = "float32",
        device: str = POLICY,
        allow_policy_as_reward: bool = False,
    ) -> None:
        one_of("reward model: output", output, get_args(Output))
        one_of("reward model: dtype", dtype, get_args(Dtype))
        at_least("reward model: max_length", max_length, 1)
        at_least("reward model: max_batch_tokens", max_batch_tokens, 1)
        self.pretrained, self.label, self.output = pretrained, label, output
        self.tokenizer_path = tokenizer or pretrained
        self.max_length, self.max_batch_tokens = max_length, max_batch_tokens
        self.dtype, self.device = getattr(torch, dtype), device
        self.allow_policy_as_reward = allow_policy_as_reward
        self.model: Any = None
        self.input: JudgeInput | None = None
        self.column = 0
        self.pad_id: int | None = None

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
        tokenizer, model = self._load_files()
        limit = self.max_length or own_limit(model.config, tokenizer)
        self.input = JudgeInput(tokenizer, limit)
        self.column = column_of(self.label, model.config.id2label, self.pretrained)
        self.pad_id = model.config.get_text_config().pad_token_id
        target = (device or "cpu") if self.device == POLICY else self.device
        self.model = model.to(target).requires_grad_(False).eval()

    def _load_files(self) -> tuple[Any, Any]:
        """Tokenizer and model, still on the CPU."""
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                self.tokenizer_path, trust_remote_code=False
            )
            config = AutoConfig.from_pretrained(self.pretrained, trust_remote_code=False)
            scores = any("Classification" in name for name in config.architectures or [])
            if not scores and self.allow_policy_as_reward:
                config.num_labels = 1
            # The seed is of a random score: a resumed run needs the same one.
            with seeded_on_cpu(0), _no_progress_bars():
                model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                    self.pretrained,
                    config=config,
                    dtype=self.dtype,
                    output_loading_info=True,
                    trust_remote_code=False,
                )
        except Exception as error:  # of the library, of many types for a damaged file
            raise ValueError(
                f"reward model: {self.pretrained!r} cannot be loaded: {first_line(error)}"
            ) from error
        require(
            len(tokenizer) > len(tokenizer.all_special_ids),  # else the folder has no files of it
            f"reward model: {self.tokenizer_path!r} has no tokenizer files; save its tokenizer"
            " there, or name another one by `tokenizer`",
        )
        missing = ", ".join(sorted(loading_info["missing_keys"])[:1])
        kind = ", ".join(config.architectures or ["unknown"])
        require(
            not missing or self.allow_policy_as_reward,
            f"reward model: {self.pretrained!r} ({kind}) was not trained to score: it has no"
            f" {missing}, so its scores would be those of random weights. Give a sequence"
            " classification model, or set allow_policy_as_reward: true to try it all the same.",
        )
        check_finite(model.state_dict().items(), f"reward model: {self.pretrained!r} is damaged")
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
        for batch in batches_by_length(lengths, self.max_batch_tokens):
            inputs = self._pad([row for n in batch if (row := rows[n]) is not None])
            # A trainer's mixed precision must not lower that of this model.
            with torch.autocast(device.type, enabled=False):
                logits = self.model(**{name: x.to(device) for name, x in inputs.items()}).logits
            scores[batch] = self._of_label(logits).to(scores)
        return scores

    def _pad(self, rows: Sequence[Encoded]) -> dict[str, Tensor]:
        """Return [M, T] ids, mask, segments, padded on the right: positions as in a row alone."""
        # Causal models read the score off the last token that is not their padding token. One
        # without a padding token gets one that no row contains, so that this is each row's last.
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
    """The number of the chosen label, or of the only one."""
    listed = ", ".join(f"{number}: {name}" for number, name in sorted(names.items()))
    require(
        label is not None or len(names) == 1,
        f"reward model: {pretrained!r} has {len(names)} labels ({listed}), and a reward is one"
        " number; choose one with `label`",
    )
    numbers: dict[int | str | None, int] = {name: number for number, name in names.items()}
    numbers |= {number: number for number in names} | {None: 0}
    require(
        label in numbers, f"reward model: {pretrained!r} has no label {label!r}; it has {listed}"
    )
    return numbers[label]


def own_limit(config: Any, tokenizer: Any) -> float:
    """The most tokens that a model takes; infinite if neither it nor its tokenizer has a limit."""
    settings = config.get_text_config().to_dict()
    limits = [settings.get(name) for name in ("max_position_embeddings", "n_positions")]
    listed = [limit for limit in (*limits, tokenizer.model_max_length) if limit is not None]
    return min((limit for limit in listed if limit < NO_LIMIT), default=inf)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, which overwrite Lightning's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_policy(pretrained: str, policy: str) -> None:
    folders = Path(pretrained), Path(policy)
    same = pretrained == policy or (
        all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1])
    )
    require(
        not same,
        f"reward model: {pretrained!r} is the policy itself. A language model has no score;"
        " one of random weights would take its place, and the policy would learn to please"
        " noise. Give a model that was trained to score, or set allow_policy_as_reward: true"
        " to try it all the same.",
    )


@dataclass
class JudgeInput:
    """Turns what was asked and what was answered into what a model reads."""

    tokenizer: Any
    # in tokens; a longer input loses the start of what was asked, system messages excepted; what
    # was answered is never cut
    max_length: float
    # number of inputs over the limit, by what became of them
    over_limit: FailureCounter = field(default_factory=FailureCounter)

    def __call__(self, asked: Messages, answer: str) -> Encoded | None:
        """Token ids, and segment ids where the model has them; None for what does not fit."""
        encoded = self.encode(asked, answer)
        if not self._over(encoded):
            return encoded
        shorter: Messages | None = asked
        excess = 0
        while shorter is not None and (over := self._over(encoded)):
            excess += over  # a cut in the middle of a word may leave more tokens than expected
            shorter = without_start(asked, excess, self.tokenizer)
            if shorter is not None:
                encoded = self.encode(shorter, answer)
        self._count(fits=shorter is not None)
        return None if shorter is None else encoded

    def encode(self, asked: Messages, answer: str) -> Encoded:
        """Token ids without a limit; special tokens as the tokenizer or its chat format says.

        One that the answer spells is plain text: it would end the answer, or begin a message.
        """
        special = Placeholders(self.tokenizer)
        if self.tokenizer.chat_template is not None:
            answered = [{"role": "assistant", "content": answer}]
            try:
                text = render_messages(self.tokenizer, [*asked, *special.hide_messages(answered)])
            except TemplateError as error:
                raise ValueError(
                    f"reward model: the chat template rejected the messages: {error}. Give a"
                    " `tokenizer` whose template accepts them, or that has none."
                ) from error
            if special.texts:
                ids = encode_with_placeholders(text, special.texts, self.tokenizer)
                has_types = "token_type_ids" in self.tokenizer.model_input_names
                return {"input_ids": ids} | (
                    {"token_type_ids": [0] * len(ids)} if has_types else {}
                )
            # A chat format writes its begin token as text.
            encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        else:
            question = "\n".join(message["content"] for message in asked)
            # Without a separator, a pair may have a begin token in the middle.
            has_separator = self.tokenizer.sep_token_id is not None
            texts = (question, answer) if has_separator else (question + answer,)
            split = special.finds_special(answer)
            encoded = self.tokenizer(*texts, verbose=False, split_special_tokens=split)
        names = ("input_ids", "token_type_ids")
        return {name: list(encoded[name]) for name in names if name in encoded}

    def _over(self, encoded: Encoded) -> int:
        return int(max(0, len(encoded["input_ids"]) - self.max_length))

    def _count(self, *, fits: bool) -> None:
        if self.over_limit.add(["lost the start of the prompt" if fits else "masked"]):
            log.warning(
                "reward model: so far %d inputs were over its limit of %d tokens (%s)",
                *(self.over_limit.total(), self.max_length, self.over_limit),
            )


def without_start(messages: Messages, num_tokens: int, tokenizer: Any) -> Messages | None:
    """Cut tokens from the start, system messages left whole; None if there are not enough."""
    shorter = []
    for message in messages:
        if num_tokens <= 0 or message["role"] == "system":
            shorter.append(message)
            continue
        ids = tokenizer(message["content"], add_special_tokens=False, verbose=False)["input_ids"]
        rest = tokenizer.decode(ids[num_tokens:])
        num_tokens -= len(ids)
        shorter.append({**message, "content": rest})
    return None if num_tokens > 0 else shorter


def as_messages(asked: str | Messages) -> Messages:
    """Return a prompt as messages; a text becomes a user message."""
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


def batches_by_length(lengths: Sequence[int], max_batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers in batches of about equal length, the longest first; empty rows in none.

    Example:
        >>> list(batches_by_length([2, 9, 3, 0, 2], max_batch_tokens=6))
        [[1], [2, 0], [4]]
    """
    # `max_batch_tokens` limits rows times the longest row; a longer row is a separate batch.
    batch: list[int] = []
    for row in sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
