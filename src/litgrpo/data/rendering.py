"""From rows to prompt texts and token ids: template, chat format, begin token, length limit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

import jinja2
import jinja2.meta

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, require, without_repeats
from litgrpo.data.messages import (
    ASSISTANT,
    Messages,
    check_fields,
    ends_with_assistant,
    has_system,
    looks_like_messages,
    read_messages,
    with_system,
)
from litgrpo.data.sources import SourceRow
from litgrpo.data.tokenization import (
    Placeholders,
    added_ids,
    encode_as_plain_text,
    encode_with_placeholders,
    longest_token,
    special_token_texts,
    texts_in,
    tokenize,
)
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.text.chat_templates import TemplateError, render_messages
from litgrpo.types import TASK

if TYPE_CHECKING:  # slow to import; used in annotations only
    from transformers import PreTrainedTokenizerBase

# Chat templates are third-party code: these are what they raise for messages that they reject.
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError)
# Placeholder for a reply. Characters of the private use area occur in no template and in no
# ordinary text.
REPLY = "\ue000reply\ue001"
LongPrompts = Literal["drop", "error"]  # a prompt without its beginning is another task
LongExamples = Literal["drop", "truncate", "error"]
# Arguments of `apply_chat_template` that `template_kwargs` cannot set: what to do instead.
OF_THE_DATA = "leave it out: it comes from the data"
NO_TOKENS = "leave it out: the template renders text, which is tokenized afterwards"
RESERVED_KWARGS = {
    "tools": "set `tools` of chat instead",
    "continue_final_message": "set `continue_final_message` of chat instead",
    "chat_template": "set it in the folder of the tokenizer, which `tokenizer` of the data names",
    **dict.fromkeys(("messages", "conversation", "add_generation_prompt"), OF_THE_DATA),
    **dict.fromkeys(("tokenizer", "strftime_now", "raise_exception"), "leave it out"),
    **dict.fromkeys(("tokenize", "tokenizer_kwargs", "padding", "truncation"), NO_TOKENS),
    **dict.fromkeys(("max_length", "return_tensors", "return_dict"), NO_TOKENS),
    "return_assistant_tokens_mask": NO_TOKENS,
}


@check_field_types
@dataclass(frozen=True)
class Chat:
    """Render prompts with the tokenizer's chat template, as a user message.

    Args:
        system: text of a system message at the start of prompts that have none; null for none.
        template_kwargs: more arguments for the tokenizer's chat template, such as
            `enable_thinking: false`.
        tools: JSON schemas of tools that the template shows to the model; those of
            `model.environment` are added automatically.
        continue_final_message: let the policy continue a last message of the assistant, such as
            "The answer is"; without it such a prompt, which may contain the answer, is an error.

    Example:
        >>> Chat(system="Be brief.", template_kwargs={"enable_thinking": False}).system
        'Be brief.'
    """

    system: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: Messages = field(default_factory=list)
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        for name in self.template_kwargs:
            require(
                name not in RESERVED_KWARGS,
                f"data.chat.template_kwargs contains {name!r}, an argument that litgrpo sets "
                f"itself; {RESERVED_KWARGS.get(name)}",
            )


class RunTime:
    """The time that chat templates write: that of the run's start, also if it is resumed later."""

    def __init__(self) -> None:
        self.time = datetime.now()  # changed when a checkpoint is loaded

    def strftime_now(self, format: str) -> str:
        """Return the time as text; templates call this function of transformers by its name."""
        return self.time.strftime(format)


@dataclass(frozen=True)
class TimedChat(Chat):
    """The chat format of a run, whose template writes the time of the run."""

    run_time: RunTime = field(default_factory=RunTime)


@dataclass(frozen=True)
class TextTemplate:
    """Makes a text of a row's fields."""

    field: str  # the field to use without a template
    source: str | None = None  # Jinja text with the row's fields as variables, or None
    option: str = "template"  # name of the option that sets it, for messages

    def __post_init__(self) -> None:
        assert self._jinja
        if self.source is None:
            return
        # A template of another language, `{prompt}` or `$prompt`, is a constant in Jinja.
        written = re.search(rf"[{{$<\[(]{{1,2}}{self.field}\b", self.source)
        unread = self.field not in self.variables and written is not None
        if unread or not self.variables:
            raise ValueError(
                f"{self.option} is {self.source!r:.60}, in which no variable is the row's "
                f"{self.field}: every row would give the same text; write "
                f"`{{{{ {self.field} }}}}`, with two braces"
            )

    @property
    def required(self) -> set[str]:
        """Fields that every row needs; Jinja reports those that a template uses."""
        return {self.field} if self.source is None else set()

    @cached_property
    def _jinja(self) -> jinja2.Template:
        # The line break at the end of a template is part of the prompt.
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        # The text is a function of the row: a resumed run has to read the same prompts.
        del environment.filters["random"], environment.globals["lipsum"]
        try:
            return environment.from_string(self.source or "")
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.option}, line {error.lineno}: {error}") from error

    def render(self, row: SourceRow) -> str:
        """Return the text of one row; ValueError if it is empty or not a text."""
        value = self._value(row)
        if not isinstance(value, str):
            is_list = isinstance(value, list)
            hint = "a list of messages needs `chat: true`" if is_list else "not text"
            raise ValueError(f"{row.place}, field {self.field!r}: {value!r:.60} ({hint})")
        by = "" if self.source is None else f" ({self.option})"
        require(bool(value.strip()), f"{row.place}: the {self.field} is empty{by}")
        return value

    @cached_property
    def variables(self) -> set[str]:
        """Fields that the template reads."""
        environment = self._jinja.environment
        names = jinja2.meta.find_undeclared_variables(environment.parse(self.source or ""))
        return names - environment.globals.keys()

    def _value(self, row: SourceRow) -> Any:
        if self.source is None:
            return row.values[self.field]
        value = row.values.get(self.field)
        blank = isinstance(value, str) and not value.strip() and self.field in self.variables
        require(not blank, f"{row.place}: the {self.field} is empty")
        try:
            return self._jinja.render(row.values)
        except jinja2.UndefinedError as error:
            has = ", ".join(row.values)
            raise ValueError(f"{row.place}: template: {error} (the row has: {has})") from error


@dataclass(frozen=True)
class PromptFormat:
    """Converts rows to the texts and token ids that the policy continues; here, plain texts."""

    template: TextTemplate  # makes the text of a row
    split_special_tokens: bool = False  # encode special tokens that the data write as plain text
    # prompts are for an encoder, which reads the end token that the tokenizer appends; otherwise it
    # is removed, because a policy continues its prompt
    encoder_decoder: bool = False
    # makes the text that a reference reads as prompt; None: the policy's
    reference: TextTemplate | None = None

    def at_time(self, run_time: RunTime) -> PromptFormat:
        """Return a format whose chat template writes this time; here, the same one."""
        return self

    def plain_texts(self, rows: Iterable[SourceRow]) -> Iterator[str]:
        """Yield the prompts without any chat format, to train a tokenizer on."""
        return map(self.template.render, rows)

    def texts(self, rows: list[SourceRow], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the prompt of each row."""
        return list(self.plain_texts(rows))

    def texts_of_data(self, row: SourceRow) -> list[str]:
        """Return the texts of a row that come from the data and not from a template."""
        if self.template.source is None:
            return [self.template.render(row)]
        return [value for value in row.values.values() if isinstance(value, str)]

    def reward_columns(self, rows: list[SourceRow]) -> dict[str, list[Any]]:
        """Return {name: values} of columns for rewards in addition to the fields of the rows."""
        return {}

    def count_systems(self, rows: list[SourceRow]) -> int:
        """Return how many rows have a system message that replaces `chat.system`."""
        return 0

    def encode(
        self, texts: list[str], tokenizer: PreTrainedTokenizerBase, rows: Sequence[SourceRow] = ()
    ) -> list[list[int]]:
        """Return token ids of each prompt, with one begin token if the tokenizer adds one."""
        if self.split_special_tokens:
            encoded = [encode_as_plain_text(text, tokenizer) for text in texts]
        else:
            encoded = tokenize(tokenizer, texts)
        # Tokens that the tokenizer appends (`add_eos_token`) are for an encoder only.
        before, after = added_ids(tokenizer)
        after = after if self.encoder_decoder else []
        return self._remove_second_begin([[*before, *ids, *after] for ids in encoded], tokenizer)

    def encode_for_reference(
        self, rows: list[SourceRow], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[int]]:
        """Return token ids of each prompt for the reference; [] if it reads the policy's."""
        if self.reference is None:
            return []
        field = self.template.field
        rows = [replace(row, values=row.values | {field: self._for_reference(row)}) for row in rows]
        rendered = replace(self, template=TextTemplate(field))
        return rendered.encode(rendered.texts(rows, tokenizer), tokenizer, rows)

    def _for_reference(self, row: SourceRow) -> str | Messages:
        """Return a text instead of the row's prompt."""
        return self._reference_text(row, self.template.render(row))

    def _reference_text(self, row: SourceRow, prompt: str) -> str:
        """Render the reference's template, with the policy's prompt as `prompt`."""
        assert self.reference is not None
        return self.reference.render(replace(row, values=row.values | {"prompt": prompt}))

    def encode_opening(
        self,
        text: str,
        columns: dict[str, Any],
        added: str | Messages,
        tokenizer: PreTrainedTokenizerBase,
        split_added: bool = True,
    ) -> list[int]:
        """Return token ids of a prompt with an environment's first observation, not truncated."""
        plain = isinstance(added, str)
        hint = "they need the chat format (`chat: true` of the data)"
        require(plain, f"the environment begins with messages ({added!r:.60}), {hint}")
        if not (split_added and Placeholders(tokenizer).finds_special(added)):
            return self.encode([f"{text}{added}"], tokenizer)[0]
        ids = self.encode([text], tokenizer)[0]
        # T5's tokenizer appends an end token to every prompt; it has to stay last.
        after = added_ids(tokenizer)[1] if self.encoder_decoder else []
        end = len(ids) - len(after)
        return [*ids[:end], *encode_as_plain_text(str(added), tokenizer), *after]

    def with_tools(
        self, tools: Messages | Mapping[str, Messages], tokenizer: PreTrainedTokenizerBase
    ) -> PromptFormat:
        """Return a format that shows these tools to the model; warn if it cannot."""
        why = "prompts are plain texts (`chat: false` of the data)"
        _warn_of_unseen_tools(_all_tools(tools), why)
        return self

    def find_end_token(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the first special token after a reply in the chat template; None without one."""
        return None

    def _remove_second_begin(
        self, rows: list[list[int]], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[int]]:
        doubled = [ids[:2] == [tokenizer.bos_token_id] * 2 for ids in rows]
        if any(doubled):
            # Without numbers: a warning is shown once, and prompts are encoded in many calls.
            rank_zero_warn(
                f"there are prompts that write the begin token ({tokenizer.bos_token!r}), which "
                "the tokenizer adds as well: it is kept once"
            )
        return [ids[1:] if twice else ids for ids, twice in zip(rows, doubled, strict=True)]


@dataclass(frozen=True)
class ChatPromptFormat(PromptFormat):
    """Prompts in the tokenizer's chat format: a user message, or the messages of a row."""

    chat: Chat = Chat()
    # {task: tools that the chat template shows in its rows}, in addition to those of `chat`
    tools_of_tasks: Mapping[str, Messages] = field(default_factory=dict)

    def at_time(self, run_time: RunTime) -> PromptFormat:
        return replace(self, chat=TimedChat(**vars(self.chat) | {"run_time": run_time}))

    def texts_of_data(self, row: SourceRow) -> list[str]:
        return [*texts_in(self.messages(row))]

    def messages(self, row: SourceRow) -> Messages:
        """Return the messages of a row without `chat.system`."""
        prompt = row.values.get(self.template.field)
        is_text = not isinstance(prompt, list | tuple | Mapping) and not looks_like_messages(prompt)
        if self.template.source is not None or is_text:
            return [{"role": "user", "content": self.template.render(row)}]
        messages = read_messages(prompt, row.place)
        written = any(message["content"].strip() or "tool_calls" in message for message in messages)
        require(written, f"{row.place}: the {self.template.field} is empty")
        return messages

    def conversation(self, row: SourceRow) -> Messages:
        """Return the messages of a row, with the system message."""
        # A last message of the assistant may contain the answer.
        messages = with_system(self.messages(row), self.chat.system)
        if ends_with_assistant(messages) and not self.chat.continue_final_message:
            raise ValueError(
                f"{row.place}: the prompt ends with a message of the assistant "
                f"({messages[-1]['content']!r:.40}), which may be the answer: leave that message "
                "out, or let the policy continue it with `chat: {continue_final_message: true}`"
            )
        return messages

    def plain_texts(self, rows: Iterable[SourceRow]) -> Iterator[str]:
        """Yield the contents of the messages, one per line."""
        for row in rows:
            yield "\n".join(message["content"] for message in self.messages(row))

    def texts(self, rows: list[SourceRow], tokenizer: PreTrainedTokenizerBase) -> list[str]:
        texts = []
        for row in rows:
            messages = self.conversation(row)
            check_fields(messages, row.place, tokenizer.chat_template)
            try:
                texts.append(self._render(messages, tokenizer, row.values.get(TASK)))
            except TemplateFailure as error:
                raise ValueError(f"{row.place}: {error}") from error
        return texts

    def _for_reference(self, row: SourceRow) -> str | Messages:
        """Return the row's messages with another text as last user message."""
        messages = self.messages(row)
        users = [n for n, message in enumerate(messages) if message["role"] == "user"]
        require(bool(users), f"{row.place}: reference_template needs a user message")
        text = self._reference_text(row, messages[users[-1]]["content"])
        messages[users[-1]] = messages[users[-1]] | {"content": text}
        return messages

    def _render(
        self,
        messages: Messages,
        tokenizer: PreTrainedTokenizerBase,
        task: Any = None,
        placeholders: Placeholders | None = None,
    ) -> str:
        """Render a prompt up to where the policy's answer begins, or is continued."""
        continued = self.chat.continue_final_message and ends_with_assistant(messages)
        chat = self._chat_of(task)
        return apply_chat_template(
            messages,
            chat if placeholders is None else hide_tools(chat, placeholders),
            tokenizer,
            add_generation_prompt=not continued,
            continue_final_message=continued,
        )

    def _chat_of(self, task: Any) -> Chat:
        """Return the settings with the tools of a task."""
        tools = self.tools_of_tasks.get(str(task), [])
        return replace(self.chat, tools=[*self.chat.tools, *tools]) if tools else self.chat

    def reward_columns(self, rows: list[SourceRow]) -> dict[str, list[Any]]:
        # The messages without the chat format.
        return {"conversation": [self.conversation(row) for row in rows]}

    def count_systems(self, rows: list[SourceRow]) -> int:
        if self.chat.system is None:
            return 0
        return sum(has_system(self.messages(row)) for row in rows)

    def encode(
        self, texts: list[str], tokenizer: PreTrainedTokenizerBase, rows: Sequence[SourceRow] = ()
    ) -> list[list[int]]:
        # The chat template has written the begin token. Special tokens that tools write are plain
        # text, those of the rows if they are to be split.
        ids = tokenize(tokenizer, texts)
        special = Placeholders(tokenizer)
        tools = {
            task: special.finds_special(_foreign_texts(self._chat_of(task)))
            for task in {row.values.get(TASK) for row in rows}
        }
        for number, row in enumerate(rows):
            task = row.values.get(TASK)
            split = self.split_special_tokens and special.finds_special(self.messages(row))
            if split or tools[task]:
                placeholders, messages = Placeholders(tokenizer), self.conversation(row)
                safe = placeholders.hide_messages(messages) if split else messages
                ids[number] = self._encode_safe(safe, placeholders, tokenizer, task)
        return self._remove_second_begin(ids, tokenizer)

    def encode_opening(
        self,
        text: str,
        columns: dict[str, Any],
        added: str | Messages,
        tokenizer: PreTrainedTokenizerBase,
        split_added: bool = True,
    ) -> list[int]:
        placeholders, conversation = Placeholders(tokenizer), columns["conversation"]
        if self.split_special_tokens:
            messages = placeholders.hide_messages(append_opening(conversation, added))
        elif not split_added:
            messages = append_opening(conversation, added)
        elif isinstance(added, str):
            messages = append_opening(conversation, placeholders.hide_text(added))
        else:
            append_opening(conversation, added)  # rejects malformed messages
            messages = append_opening(conversation, placeholders.hide_messages(added))
        ids = self._encode_safe(messages, placeholders, tokenizer, columns.get(TASK))
        return self._remove_second_begin([ids], tokenizer)[0]

    def with_tools(
        self, tools: Messages | Mapping[str, Messages], tokenizer: PreTrainedTokenizerBase
    ) -> PromptFormat:
        every = replace(self.chat, tools=[*self.chat.tools, *_all_tools(tools)])
        if every.tools:
            example: Messages = [{"role": "user", "content": "?"}]
            with_tools, without = (
                apply_chat_template(example, chat, tokenizer)
                for chat in (every, replace(every, tools=[]))
            )
            if with_tools == without:
                _warn_of_unseen_tools(every.tools, "the tokenizer's chat template ignores tools")
        if isinstance(tools, Mapping):
            return replace(self, tools_of_tasks=tools)
        return replace(self, chat=every)

    def find_end_token(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        messages = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": REPLY}]
        try:
            text = apply_chat_template(messages, self.chat, tokenizer, add_generation_prompt=False)
        except TEMPLATE_ERRORS:  # prompts of other roles may be all that the template renders
            return None
        tail = text.rpartition(REPLY)[2] if REPLY in text else ""
        # The longest of those that begin first: one special token may begin with another.
        in_tail = [special for special in special_token_texts(tokenizer) if special in tail]
        if not in_tail:
            return None
        special = min(in_tail, key=lambda text: (tail.find(text), -len(text)))
        token_id: Any = tokenizer.convert_tokens_to_ids(special)
        return None if token_id is None else int(token_id)

    def _encode_safe(
        self,
        messages: Messages,
        placeholders: Placeholders,
        tokenizer: PreTrainedTokenizerBase,
        task: Any,
    ) -> list[int]:
        """Return token ids of a prompt from messages with placeholders; add those of the tools."""
        text = self._render(messages, tokenizer, task, placeholders)
        return encode_with_placeholders(text, placeholders.texts, tokenizer)


def build_prompt_format(
    template: str | None,
    chat: bool | Chat,
    split_special_tokens: bool = False,
    reference_template: str | None = None,
) -> PromptFormat:
    """Return the format for `chat: true`, `chat: false` or `chat: {...}`."""
    reference = None
    if reference_template is not None:
        reference = TextTemplate("prompt", reference_template, "reference_template")
    format_of_text = PromptFormat(
        TextTemplate("prompt", template), split_special_tokens, reference=reference
    )
    if chat is False:
        return format_of_text
    settings = Chat() if chat is True else chat
    return ChatPromptFormat(**vars(format_of_text), chat=settings)


def _foreign_texts(chat: Chat) -> list[Any]:
    """Return the settings of a chat format that servers and documents wrote."""
    return [chat.tools, chat.template_kwargs.get("documents")]


def hide_tools(chat: Chat, placeholders: Placeholders) -> Chat:
    """Return settings with placeholders for the special tokens that tools and documents write."""
    if not placeholders.finds_special(_foreign_texts(chat)):
        return chat
    kwargs = chat.template_kwargs
    documents = {n: placeholders.hide(kwargs[n]) for n in ("documents",) if n in kwargs}
    return replace(chat, tools=placeholders.hide(chat.tools), template_kwargs=kwargs | documents)


def _all_tools(tools: Messages | Mapping[str, Messages]) -> Messages:
    """Return the tools of all tasks, each once."""
    if not isinstance(tools, Mapping):
        return tools
    return without_repeats(tool for task_tools in tools.values() for tool in task_tools)


def _warn_of_unseen_tools(tools: Messages, why: str) -> None:
    if tools:
        names = ", ".join(str(tool.get("function", tool).get("name", "?")) for tool in tools)
        rank_zero_warn(
            f"{why}: the prompt does not list the tools ({names}); `list_tools_in_prompt: true` of "
            "litgrpo.environments.Tools writes them into the prompt"
        )


def append_opening(messages: Messages, added: str | Messages) -> Messages:
    """Return a conversation with an environment's first observation, a text or messages."""
    if not isinstance(added, str):
        good = all(
            isinstance(message, dict) and {"role", "content"} <= message.keys() for message in added
        )
        expected = "expected [{role: user, content: text}, ...]"
        require(good, f"the environment begins with {added!r:.60}; {expected}")
        return [*messages, *added]
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise ValueError(
            f"the environment begins with the text {added!r:.40}, which is appended to the last "
            "user message, and the prompt has none"
        )
    last_user = messages[users[-1]]
    longer = last_user | {"content": f"{last_user['content']}{added}"}
    return [*messages[: users[-1]], longer, *messages[users[-1] + 1 :]]


def apply_chat_template(
    messages: Messages,
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Render messages in the tokenizer's chat format."""
    has_template, tools = tokenizer.chat_template is not None, cast(Any, chat.tools or None)
    require(
        has_template,
        "chat: the tokenizer has no chat template; set chat to false",
    )
    try:
        return render_messages(
            tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            strftime_now=chat.run_time.strftime_now if isinstance(chat, TimedChat) else None,
            **chat.template_kwargs,
        )
    except TemplateError as error:  # Gemma's template raises one on a system message
        advice = "; if the model has no system messages, put that text into `template`"
        raise TemplateFailure(
            f"chat: the tokenizer's chat template failed: {error}"
            f"{advice if has_system(messages) else ''}"
        ) from error


class TemplateFailure(ValueError):
    """A chat template rejected the messages of a row."""


class PromptDropped(ValueError):
    """A prompt is too long, and the limit of its tokens drops it."""


@dataclass(frozen=True)
class LengthLimit:
    """Limit of a row's tokens, and the action for longer rows."""

    name: str  # option that sets the limit, for messages
    tokens: int  # largest number of tokens
    action: LongExamples  # `drop` leaves the row out, `truncate` shortens it, `error` stops
    option: str = "long_prompts"  # name of the option that sets the action, for messages

    def __post_init__(self) -> None:
        at_least(self.name, self.tokens, 1)

    @property
    def remedy(self) -> str:
        """Advice for an error about a row that is too long."""
        return f"raise {self.name} or set `{self.option}: drop`"

    def max_chars(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Number of characters above which a text has more tokens than the limit.

        Tokenizing a text of many megabytes takes minutes and gigabytes, to find it too long.
        """
        return (self.tokens + 1) * longest_token(tokenizer)

    def select(self, lengths: Sequence[int], rows: Sequence[SourceRow], role: str) -> list[int]:
        """Return the numbers of the rows to use; warn once about those that are too long."""
        fitting = [number for number, length in enumerate(lengths) if length <= self.tokens]
        if len(fitting) == len(rows):
            return fitting
        longest = max(range(len(rows)), key=lengths.__getitem__)
        problem = (
            f"{role}: {len(rows) - len(fitting)} of {len(rows)} rows have more than "
            f"{self.name}={self.tokens} tokens (the longest {lengths[longest]}, "
            f"{rows[longest].place})"
        )
        if self.action == "error":
            raise ValueError(f"{problem}; {self.remedy}")
        if self.action == "truncate":
            rank_zero_warn(f"{problem}: truncated")
            return list(range(len(rows)))
        require(bool(fitting), f"{problem}: none is left; raise {self.name}")
        rank_zero_warn(f"{problem}: dropped")
        return fitting
