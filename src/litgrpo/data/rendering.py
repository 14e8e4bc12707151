"""From rows to prompt texts and token ids: template, chat format, begin token, length limit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import jinja2

from litgrpo.arguments import at_least, one_of, require
from litgrpo.data.sources import Row
from litgrpo.data.special_tokens import plain_ids, special_texts
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.types import PromptBatch

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]  # {"role": ..., "content": text}, as chat templates take them
LongRows = Literal["drop", "truncate", "error"]
FIRST_HEARD = 100_000  # number of the mark of an environment's first text
DONE = {"drop": "dropped", "truncate": "truncated"}
# What a field that should be text may be, and what to do about it.
HINTS = {list: "a list of messages needs `chat: true`"}


@dataclass(frozen=True)
class Chat:
    """Give prompts in the chat format of the tokenizer, as a user's message.

    Args:
        system: text of a system message in front; null for none.
        template_kwargs: more arguments for the tokenizer's chat template, such as
            `enable_thinking: false`.
        tools: JSON schemas of tools that the template shows to the model; those of
            `model.environment` need not be given.
    """

    system: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: Messages = field(default_factory=list)


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
        value = self._value(row)
        if not isinstance(value, str):
            hint = HINTS.get(type(value), "not text")
            raise ValueError(f"{row.place}, field {self.field!r}: {value!r:.60} ({hint})")
        require(bool(value.strip()), f"{row.place}: the {self.field} is empty")
        return value

    def _value(self, row: Row) -> Any:
        if self.source is None:
            return row.values[self.field]
        try:
            return self._jinja.render(row.values)
        except jinja2.UndefinedError as error:
            has = ", ".join(row.values)
            raise ValueError(f"{row.place}: template: {error} (the row has: {has})") from error


@dataclass(frozen=True)
class PromptStyle:
    """How a row becomes the text and the token ids that a policy continues: as it is.

    Args:
        template: makes the text.
        split_special_tokens: read what looks like a special token in the data as plain text.
    """

    template: Template
    split_special_tokens: bool = False

    def plain(self, rows: list[Row]) -> Iterator[str]:
        """What is asked as plain texts, for a tokenizer to be fitted to."""
        return map(self.template.text, rows)

    def texts(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The prompt of each row."""
        return list(self.plain(rows))

    def given(self, row: Row) -> list[str]:
        """The texts of a row that come from the data, not from a template."""
        if self.template.source is None:
            return [self.template.text(row)]
        return [value for value in row.values.values() if isinstance(value, str)]

    def columns(self, rows: list[Row]) -> dict[str, list[Any]]:
        """What rewards are told besides the fields of the rows."""
        return {}

    def encode(
        self, texts: list[str], tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row] = ()
    ) -> list[list[int]]:
        """Token ids of each prompt, with the begin token if the tokenizer adds one, once."""
        split = self.split_special_tokens
        ids = tokenize(tokenizer, texts, add_special_tokens=True, split_special_tokens=split)
        return self._begun_once(ids, tokenizer)

    def opened(
        self,
        text: str,
        columns: dict[str, Any],
        added: str | Messages,
        tokenizer: PreTrainedTokenizerBase,
        split_added: bool = True,
    ) -> list[int]:
        """Token ids of a prompt with what an environment adds to it, without limit.

        Args:
            text: the prompt.
            columns: of the prompt's row; `columns` of this style are among them.
            added: a text for its end.
            tokenizer: of the model.
            split_added: special tokens that are written in what is added are plain text.

        Raises:
            ValueError: messages are added to a plain text.
        """
        plain = isinstance(added, str)
        hint = "they need the chat format (`chat: true` of the data)"
        require(plain, f"the environment begins with messages ({added!r:.60}), {hint}")
        if not (split_added and hidden(added, tokenizer)):
            return self.encode([f"{text}{added}"], tokenizer)[0]
        ids, closing = self.encode([text], tokenizer)[0], tokenize(tokenizer, [""], True)[0]
        # T5 closes what it reads; that stays at the end.
        last = ids[-1:] if ids[-1:] == closing[-1:] == [tokenizer.eos_token_id] else []
        return [*ids[: len(ids) - len(last)], *plain_ids(str(added), tokenizer), *last]

    def showing(self, tools: Messages, tokenizer: PreTrainedTokenizerBase) -> PromptStyle:
        """The style that shows these tools to the model, where there is a way; says where not."""
        _say_unseen(tools, "prompts are plain texts (`chat: false` of the data)")
        return self

    def _begun_once(
        self, rows: list[list[int]], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[int]]:
        doubled = [ids[:2] == [tokenizer.bos_token_id] * 2 for ids in rows]
        if any(doubled):
            rank_zero_warn(
                f"{sum(doubled)} of {len(rows)} prompts write the begin token "
                f"({tokenizer.bos_token!r}) that the tokenizer adds, too: it is kept once"
            )
        return [ids[1:] if twice else ids for ids, twice in zip(rows, doubled, strict=True)]


@dataclass(frozen=True)
class ChatStyle(PromptStyle):
    """The same in the tokenizer's chat format, as a user's message or after given messages.

    Args:
        template: makes the user's message.
        chat: settings of the chat format.
    """

    chat: Chat = Chat()

    def given(self, row: Row) -> list[str]:
        """The contents of the row's messages."""
        return [message["content"] for message in self.messages(row)]

    def messages(self, row: Row) -> list[dict[str, str]]:
        """What is asked, before any tokenizer is known, without the system message."""
        given = row.values.get(self.template.field)
        if self.template.source is not None or not isinstance(given, list):
            return [{"role": "user", "content": self.template.text(row)}]
        require(bool(given), f"{row.place}: the {self.template.field} is empty")
        return given

    def plain(self, rows: list[Row]) -> Iterator[str]:
        """The contents of the messages, a line each."""
        for row in rows:
            yield "\n".join(message["content"] for message in self.messages(row))

    def texts(self, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The prompt of each row, in the chat format."""
        return [in_chat_format(asked, self.chat, tokenizer) for asked in self.conversations(rows)]

    def columns(self, rows: list[Row]) -> dict[str, list[Any]]:
        """The messages without the chat format around them."""
        return {"conversation": self.conversations(rows)}

    def conversations(self, rows: list[Row]) -> list[list[dict[str, str]]]:
        """The messages of each row before the chat format is put around them."""
        system = self.chat.system
        first = [] if system is None else [{"role": "system", "content": system}]
        return [first + self.messages(row) for row in rows]

    def encode(
        self, texts: list[str], tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row] = ()
    ) -> list[list[int]]:
        """Token ids of each prompt; the chat format wrote the begin token as text."""
        ids = tokenize(tokenizer, texts, add_special_tokens=False)
        known = special_texts(tokenizer) if self.split_special_tokens else []
        for number, row in enumerate(rows):
            if any(mark in text for mark in known for text in self.given(row)):
                ids[number] = self._apart(self.conversations([row])[0], tokenizer)
        return self._begun_once(ids, tokenizer)

    def opened(
        self,
        text: str,
        columns: dict[str, Any],
        added: str | Messages,
        tokenizer: PreTrainedTokenizerBase,
        split_added: bool = True,
    ) -> list[int]:
        """The same in the chat format: a text for the end of the last user message, or messages."""
        said = with_added(columns["conversation"], added)
        known = special_texts(tokenizer) if self.split_special_tokens else []
        if any(mark in each["content"] for mark in known for each in said):
            return self._begun_once([self._apart(said, tokenizer)], tokenizer)[0]
        # What looks like a special token, or like a mark of ours, is not for the template to see.
        marks = hidden(added, tokenizer) if split_added else {}
        said = with_added(columns["conversation"], marked(added, marks))
        text = in_chat_format(said, self.chat, tokenizer)
        if not marks:
            return self.encode([text], tokenizer)[0]
        return self._begun_once([pieced(text, marks, tokenizer)], tokenizer)[0]

    def showing(self, tools: Messages, tokenizer: PreTrainedTokenizerBase) -> PromptStyle:
        """The style whose chat format shows these tools besides its own; says if it does not."""
        shown = replace(self, chat=replace(self.chat, tools=[*self.chat.tools, *tools]))
        if shown.chat.tools:
            asked: Messages = [{"role": "user", "content": "?"}]
            with_tools, without = (
                in_chat_format(asked, chat, tokenizer)
                for chat in (shown.chat, replace(shown.chat, tools=[]))
            )
            unseen = shown.chat.tools if with_tools == without else []
            _say_unseen(unseen, "the tokenizer's chat template ignores tools")
        return shown

    def _apart(self, said: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids of a prompt whose messages are plain text, whatever they write."""
        # Characters of the private use area stand for the messages; no template knows them.
        marks = {f"\ue000{number}\ue001": each["content"] for number, each in enumerate(said)}
        marked = [each | {"content": mark} for each, mark in zip(said, marks, strict=True)]
        return pieced(in_chat_format(marked, self.chat, tokenizer), marks, tokenizer)


def prompt_style(
    template: str | None, chat: bool | Chat, split_special_tokens: bool = False
) -> PromptStyle:
    """The style behind `chat: true`, `chat: false` and `chat: {...}`; refuses a bad template."""
    made = Template("prompt", template)
    made.check()
    if chat is False:
        return PromptStyle(made, split_special_tokens)
    return ChatStyle(made, split_special_tokens, Chat() if chat is True else chat)


def _say_unseen(tools: Messages, why: str) -> None:
    """Say once that the model is not told of tools."""
    if tools:
        names = ", ".join(str(each.get("function", each).get("name", "?")) for each in tools)
        rank_zero_warn(
            f"{why}: the model is not told of its tools ({names}); `list_tools_in_prompt: true` of "
            "litgrpo.environments.Tools writes them into the prompt"
        )


def with_added(said: Messages, added: str | Messages) -> Messages:
    """A conversation with what an environment adds at its start.

    Args:
        said: the prompt's messages.
        added: a text for the end of the last user message, or messages.

    Raises:
        ValueError: a text is added where no message is the user's, or the messages are none.
    """
    if not isinstance(added, str):
        good = all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in added)
        expected = "expected [{role: user, content: text}, ...]"
        require(good, f"the environment begins with {added!r:.60}; {expected}")
        return [*said, *added]
    asked = [number for number, each in enumerate(said) if each["role"] == "user"]
    nowhere = f"the environment begins with the text {added!r:.40}, which goes to the end of the "
    require(bool(asked), f"{nowhere}last user message, and the prompt has none")
    last = said[asked[-1]]
    longer = last | {"content": f"{last['content']}{added}"}
    return [*said[: asked[-1]], longer, *said[asked[-1] + 1 :]]


def opened(
    prompts: PromptBatch,
    row: int,
    added: str | Messages,
    *,
    style: PromptStyle,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
    split_added: bool = True,
) -> list[int]:
    """Token ids of a prompt with what an environment adds to it when an episode begins.

    Args:
        prompts: B prompts, made by `style`.
        row: which of them.
        added: a text for the end of its last user message (without chat format: for its end), or
            messages; nothing leaves the prompt as it is.
        style: of the data.
        limit: of a prompt's tokens. What is longer now is shortened, left out or an error as when
            the data were loaded.
        tokenizer: of the model.
        split_added: special tokens that are written in what is added are plain text.

    Raises:
        LeftOut: it is too long, and the limit drops it.
        ValueError: it is too long, or nothing can be added to this prompt.
    """
    if not added:
        return prompts.prompt_ids[row][prompts.prompt_mask[row]].tolist()
    columns = {name: values[row] for name, values in prompts.columns.items()}
    ids = style.opened(prompts.prompts[row], columns, added, tokenizer, split_added)
    if len(ids) > limit.tokens:
        said = (
            f"the prompt has {len(ids)} tokens with what the environment adds at its start "
            f"({limit.name}={limit.tokens})"
        )
        require(limit.action != "error", f"{said}; {limit.remedy}")
        if limit.action == "drop":
            raise LeftOut(said)
    return end_of(ids, limit.tokens, tokenizer)


def end_of(ids: list[int], limit: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The last `limit` tokens; a begin token stays in front."""
    if len(ids) <= limit:
        return ids
    begin = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return begin + ids[len(ids) - limit + len(begin) :]


def in_chat_format(
    messages: Messages,
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    asks: bool = True,
) -> str:
    """Messages in the tokenizer's chat format; `asks` adds what an answer of the model follows."""
    known, tools = tokenizer.chat_template is not None, cast(Any, chat.tools or None)
    require(known, "chat: the tokenizer has no chat template; use `template` instead")
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=asks,
            **chat.template_kwargs,
        )
    except jinja2.TemplateError as error:  # Gemma's raises one on a system message
        hint = "a model without system messages takes that text in `template`"
        raise ValueError(f"chat: the tokenizer's chat template says: {error}; {hint}") from error
    assert isinstance(text, str)
    return text


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    add_special_tokens: bool,
    split_special_tokens: bool = False,
) -> list[list[int]]:
    """Token ids of each text, without limit.

    Args:
        tokenizer: of the model.
        texts: to be read; none give no ids.
        add_special_tokens: put the begin token in front, where the tokenizer has it so.
        split_special_tokens: a special token that is written in a text is read as plain text.
    """
    split: dict[str, Any] = {"split_special_tokens": True} if split_special_tokens else {}
    encoded: dict[str, Any] = tokenizer(
        texts,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        verbose=False,
        **split,
    )
    return list(encoded["input_ids"])


def pieced(text: str, marks: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text in which marks stand for plain texts, whatever these write.

    Args:
        text: with marks, which are a number between characters of the private use area.
        marks: {mark: the text it stands for, whose special tokens are read as plain text}.
        tokenizer: of the model.
    """
    ids: list[int] = []
    for piece in filter(None, re.split("(\ue000[0-9]+\ue001)", text)):
        if piece in marks:
            ids += plain_ids(marks[piece], tokenizer)
        else:
            ids += tokenize(tokenizer, [piece], False)[0]
    return ids


def hidden(added: str | Messages, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """{mark: text} of the texts that an environment says, where they write special tokens."""
    texts = [added] if isinstance(added, str) else [each["content"] for each in added]
    known = [*special_texts(tokenizer), "\ue000"]
    written = {n: text for n, text in enumerate(texts) if isinstance(text, str)}
    if not any(mark in text for mark in known for text in written.values()):
        return {}
    return {_heard_mark(n): text for n, text in written.items()}


def _heard_mark(number: int) -> str:
    """The mark of an environment's text; those of a prompt's messages have smaller numbers."""
    return f"\ue000{FIRST_HEARD + number}\ue001"


def marked(added: str | Messages, marks: dict[str, str]) -> str | Messages:
    """What an environment says, with marks in place of its texts; without marks, as it is."""
    if isinstance(added, str):
        return next(iter(marks), added)
    names = {n: {"content": mark} for n in range(len(added)) if (mark := _heard_mark(n)) in marks}
    return [each | names.get(n, {}) for n, each in enumerate(added)]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hub id or folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"data tokenizer {name!r} cannot be loaded: {error}") from error


def checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, if it has the tokens that padding and the end of a completion need."""
    ids = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    for name, token_id in ids.items():
        hint = f"set tokenizer.{name}_token to a token that no text contains and save it"
        said = f"the tokenizer ({tokenizer.name_or_path}) has no {name} token; {hint}"
        require(token_id is not None, said)
    return tokenizer


class LeftOut(ValueError):
    """A prompt that the limit of its tokens drops."""


@dataclass(frozen=True)
class LengthLimit:
    """What to do with texts of too many tokens.

    Args:
        name: the setting, for messages.
        tokens: the largest number allowed.
        action: `drop` leaves the row out, `truncate` shortens it, `error` stops.
        option: name of the option that sets the action, for messages.
    """

    name: str
    tokens: int
    action: LongRows
    option: str = "long_prompts"

    def __post_init__(self) -> None:
        """Refuse a limit that nothing can meet."""
        one_of(self.option, self.action, get_args(LongRows))
        at_least(self.name, self.tokens, 1)

    @property
    def remedy(self) -> str:
        """What to do about a row that is too long."""
        return f"raise {self.name} or set `{self.option}: drop` or `truncate`"

    def admits(self, length: int, row: Row) -> bool:
        """Whether a row of so many tokens is used, cut or not; refuses it where it is an error."""
        fits = length <= self.tokens
        said = f"{row.place}: has {length} tokens, more than {self.name}={self.tokens}"
        require(fits or self.action != "error", f"{said}; {self.remedy}")
        return fits or self.action == "truncate"

    def kept(self, lengths: list[int], rows: list[Row], role: str) -> list[int]:
        """Numbers of the rows that stay; what happens to the others is counted and said once.

        Args:
            lengths: number of tokens of each row.
            rows: the rows, to name the longest.
            role: name of the set, for messages.
        """
        fitting = [number for number, length in enumerate(lengths) if length <= self.tokens]
        if len(fitting) == len(rows):
            return fitting
        longest = max(range(len(rows)), key=lengths.__getitem__)
        said = (
            f"{role}: {len(rows) - len(fitting)} of {len(rows)} rows have more than "
            f"{self.name}={self.tokens} tokens (the longest {lengths[longest]}, "
            f"{rows[longest].place})"
        )
        require(self.action != "error", f"{said}; {self.remedy}")
        left = {"drop": fitting, "truncate": list(range(len(rows)))}[self.action]
        require(bool(left), f"{said}: none is left; raise {self.name}")
        rank_zero_warn(f"{said}: {DONE[self.action]}")
        return left
