"""From rows to prompt texts and token ids: template, chat format, begin token, length limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jinja2
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from litgrpo.data.rows import require, require_positive
from litgrpo.data.sources import Row

if TYPE_CHECKING:  # slow to import; only named here
    from lightning import Trainer
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["drop", "truncate", "error"]


@dataclass(frozen=True)
class Chat:
    """Give prompts in the chat format of the tokenizer, as a user's message.

    Args:
        system: text of a system message in front; null for none.
        kwargs: more arguments for the tokenizer's chat template, such as `enable_thinking: false`.
    """

    system: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Template:
    """A text made of a row's fields.

    Args:
        field: the field to take where there is no template.
        source: Jinja text with the row's fields as variables, or None.
    """

    field: str
    source: str | None = None

    @property
    def needs(self) -> set[str]:
        """The fields that every row must have; Jinja checks its own."""
        return {self.field} if self.source is None else set()

    @cached_property
    def _jinja(self) -> jinja2.Template:
        """The compiled template: the newline at its end counts, an unknown field is an error."""
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        try:
            return environment.from_string(self.source or "")
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"template of {self.field}, line {error.lineno}: {error}") from error

    def check(self) -> None:
        """Refuse a template that is not Jinja."""
        assert self._jinja

    def text(self, row: Row) -> str:
        """The text of one row; an empty one is an error."""
        if self.source is None:
            value = row.values[self.field]
        else:
            try:
                value = self._jinja.render(row.values)
            except jinja2.UndefinedError as error:
                has = ", ".join(row.values)
                raise ValueError(f"{row.place}: template: {error} (the row has: {has})") from error
        if not isinstance(value, str):
            hint = (
                "a list of messages needs `chat: true`" if isinstance(value, list) else "not text"
            )
            raise ValueError(f"{row.place}, field {self.field!r}: {value!r:.60} ({hint})")
        if not value.strip():
            raise ValueError(f"{row.place}: the {self.field} is empty")
        return value


@dataclass(frozen=True)
class PromptStyle:
    """How a row becomes the text and the token ids that a policy continues.

    Args:
        template: makes the text, or the user's message.
        chat: the chat format around it, or None.
    """

    template: Template
    chat: Chat | None

    def content(self, row: Row) -> str | list[dict[str, str]]:
        """What is asked, before any tokenizer is known: a text or a list of messages."""
        value = row.values.get(self.template.field)
        if self.chat is not None and self.template.source is None and isinstance(value, list):
            if not value:
                raise ValueError(f"{row.place}: the {self.template.field} is empty")
            return value
        return self.template.text(row)

    def plain(self, rows: list[Row]) -> Iterator[str]:
        """What is asked as plain texts, for a tokenizer to be fitted to."""
        for row in rows:
            content = self.content(row)
            if isinstance(content, str):
                yield content
            else:
                yield "\n".join(message["content"] for message in content)

    def texts(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The prompt of each row, in the chat format if there is one."""
        if self.chat is None:
            return [self.template.text(row) for row in rows]
        return [_in_chat_format(said, self.chat, tokenizer) for said in self.conversations(rows)]

    def conversations(self, rows: list[Row]) -> list[list[dict[str, str]]]:
        """The messages of each row before the chat format is put around them."""
        system = self.chat.system if self.chat is not None else None
        first = [] if system is None else [{"role": "system", "content": system}]
        contents = [self.content(row) for row in rows]
        return [first + _messages(content) for content in contents]

    def encode(self, texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Token ids of each prompt, with the begin token if the tokenizer adds one, once."""
        # A chat format writes its begin token as text, so the tokenizer must not add another.
        rows = tokenize(tokenizer, texts, add_special_tokens=self.chat is None)
        begin = tokenizer.bos_token_id
        doubled = [begin is not None and ids[:2] == [begin] * 2 for ids in rows]
        if any(doubled):
            rank_zero_warn(
                f"{sum(doubled)} of {len(rows)} prompts write the begin token "
                f"({tokenizer.bos_token!r}) that the tokenizer adds, too: it is kept once"
            )
        return [ids[1:] if twice else ids for ids, twice in zip(rows, doubled, strict=True)]


def as_chat(chat: bool | Chat) -> Chat | None:
    """The settings behind `chat: true`, `chat: false` and `chat: {...}`."""
    if isinstance(chat, bool):
        return Chat() if chat else None
    return chat


def _messages(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _in_chat_format(
    messages: list[dict[str, str]], chat: Chat, tokenizer: PreTrainedTokenizerBase
) -> str:
    if tokenizer.chat_template is None:
        raise ValueError("chat: the tokenizer has no chat template; use `template` instead")
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **chat.kwargs
        )
    except jinja2.TemplateError as error:  # Gemma's raises one on a system message
        hint = "a model without system messages takes that text in `template`"
        raise ValueError(f"chat: the tokenizer's chat template says: {error}; {hint}") from error
    assert isinstance(text, str)
    return text


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each text, without limit."""
    encoded: dict[str, Any] = tokenizer(
        texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
    )
    return list(encoded["input_ids"])


def find_tokenizer(
    name: str | None, trainer: Trainer | None, texts: list[str]
) -> PreTrainedTokenizerBase:
    """The tokenizer of the data, if one is named, else that of the model.

    Args:
        name: Hub id or folder, or None.
        trainer: knows the model; its `fit_tokenizer` may train a tokenizer.
        texts: what to train it on.
    """
    if name is not None:
        return checked(_load_tokenizer(name))
    if trainer is None:
        raise ValueError("without a Trainer the data need their own tokenizer; set tokenizer")
    model: Any = trainer.lightning_module
    return checked(model.fit_tokenizer(texts))


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"data tokenizer {name!r} cannot be loaded: {error}") from error


def checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, if it has the tokens that padding and the end of a completion need."""
    ids = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    for name, token_id in ids.items():
        if token_id is None:
            hint = f"set tokenizer.{name}_token to a token that no text contains and save it"
            raise ValueError(
                f"the tokenizer ({tokenizer.name_or_path}) has no {name} token; {hint}"
            )
    return tokenizer


@dataclass(frozen=True)
class LengthLimit:
    """What to do with texts of too many tokens.

    Args:
        name: the setting, for messages.
        tokens: the largest number allowed.
        overlong: "drop" leaves the row out, "truncate" shortens it, "error" stops.
    """

    name: str
    tokens: int
    overlong: Overlong

    def __post_init__(self) -> None:
        """Refuse a limit that nothing can meet."""
        require("overlong", self.overlong, ("drop", "truncate", "error"))
        require_positive(**{self.name: self.tokens})

    def keeps(self, lengths: list[int], rows: list[Row], role: str) -> list[bool]:
        """Which rows stay; what happens to the others is counted and said once.

        Args:
            lengths: number of tokens of each row.
            rows: the rows, to name the longest.
            role: name of the set, for messages.
        """
        over = [length > self.tokens for length in lengths]
        if not any(over):
            return [True] * len(rows)
        longest = max(range(len(rows)), key=lengths.__getitem__)
        said = (
            f"{role}: {sum(over)} of {len(rows)} rows have more than {self.name}={self.tokens} "
            f"tokens (the longest {lengths[longest]}, {rows[longest].place})"
        )
        if self.overlong == "error":
            raise ValueError(f"{said}; raise {self.name} or say `overlong: drop` or `truncate`")
        if self.overlong == "drop" and all(over):
            raise ValueError(f"{said}: none is left; raise {self.name}")
        done = {"drop": "dropped", "truncate": "truncated"}
        rank_zero_warn(f"{said}: {done[self.overlong]}")
        return [self.overlong == "truncate" or not long for long in over]
