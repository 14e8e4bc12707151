"""What stands between two turns, as the chat template of the run writes it.

Tokens that the policy sampled are never decoded and encoded again: a row only grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jinja2

from litgrpo.arguments import require
from litgrpo.data.rendering import (
    Chat,
    Messages,
    hidden,
    in_chat_format,
    marked,
    pieced,
    tokenize,
)
from litgrpo.rollout.bridge import Bridge

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase

Kind = tuple[str, ...]  # roles of messages, each as often as it changes
# Characters of the private use area: texts that no template and no text contains.
KEPT = 4096  # answers whose tokens are remembered
REPLY, ARGUMENT = "\ue000reply\ue001", "\ue000argument\ue001"
UNKNOWN = (
    "an environment answers with a user message, with tool messages, or with these and then it"
)
NO_TEXTS = "the chat template is made for images: its messages are lists of parts, no texts"
# What templates of strangers raise on messages that they do not expect.
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class ChatFormat:
    """How messages become token ids of a policy.

    Args:
        tokenizer: of the policy, with a chat template.
        chat: settings of the chat format, tools included.
        end_ids: tokens that end a turn of the policy.
        tool_role: the role that messages of role `tool` are given to the template with; `user`
            for templates without a tool role: neighbours become one message then.
        split_special_tokens: special tokens in what is heard are read as plain text.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    end_ids: tuple[int, ...]
    tool_role: str = "tool"
    split_special_tokens: bool = True

    def messages(self, said: str | Messages) -> Messages:
        """What is heard as the template takes it; a text is a user message."""
        given = [{"role": "user", "content": said}] if isinstance(said, str) else said
        good = all(_is_text(each) for each in given)
        expected = "[{role: tool, content: text}, ...]"
        require(good, f"the environment answered with {given!r:.60}; expected a text or {expected}")
        heard = [self._named(each, number) for number, each in enumerate(given)]
        if self.tool_role != "user":
            return heard
        joined: Messages = []
        for each in heard:
            if joined and joined[-1]["role"] == each["role"] == "user":
                content = f"{joined[-1]['content']}\n{each['content']}"
                joined[-1] = {"role": "user", "content": content}
            else:
                joined.append(each)
        return joined

    def _named(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        """A message with the role and names that templates ask for."""
        if message["role"] != "tool":
            return message
        names = {"name": "tool", "tool_call_id": f"call{number:05}"}
        return names | message | {"role": self.tool_role}

    def text(self, messages: Messages, *, asks: bool = True) -> str:
        """Messages in the chat format; `asks` adds what an answer of the policy follows."""
        return in_chat_format(messages, self.chat, self.tokenizer, asks=asks)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in the chat format."""
        return tokenize(self.tokenizer, [text], False)[0]

    @property
    def wants_parts(self) -> bool:
        """Whether the template writes messages that are lists of parts, and not texts."""
        return not self._writes(REPLY) and self._writes([{"type": "text", "text": REPLY}])

    def _writes(self, content: Any) -> bool:
        try:
            return REPLY in self.text([{"role": "user", "content": content}])
        except TEMPLATE_ERRORS:
            return False

    @property
    def end_texts(self) -> list[str]:
        """The end tokens that the tokenizer reads as one token wherever they stand."""
        added = self.tokenizer.added_tokens_decoder
        return [str(added[token_id]) for token_id in self.end_ids if token_id in added]


@dataclass(frozen=True)
class Template(Bridge):
    """Takes the tokens between turns from the chat template.

    A conversation with a mark in place of what the policy said is rendered. What follows the mark
    begins with an end token, which the tokenizer reads as one token wherever it stands; so the
    tokens after it are those of the whole conversation, whatever was said before. `proved` (in
    `bridge_proof`) measures that.

    Args:
        format: the chat format.
        exact: roles of the messages that it may write.
        refused: {roles: why such messages cannot be written}.
    """

    format: ChatFormat
    exact: frozenset[Kind]
    refused: dict[Kind, str] = field(default_factory=dict)
    _closings: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _heard: dict[str, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def ids(self, said: str | Messages, ended: bool) -> list[int]:
        """The tokens between two turns; a text is a user message."""
        heard = self.format.messages(said)
        key = repr(heard)  # a group often hears the same, and a template takes its time
        if key not in self._heard:
            if len(self._heard) >= KEPT:
                self._heard.clear()
            self._heard[key] = self._ids(heard)
        return self._heard[key][ended:]

    def _ids(self, heard: Messages) -> list[int]:
        """The tokens between two turns, from the end token on."""
        kind = kind_of(heard)
        why = "" if kind in self.exact else self.refused.get(kind, UNKNOWN)
        require(not why, f"messages of role {', '.join(kind) or 'none'} between turns: {why}")
        # What looks like a special token, or like a mark of ours, is not for the template to see.
        marks = hidden(heard, self.format.tokenizer) if self.format.split_special_tokens else {}
        text = self._from_end(marked(heard, marks))  # type: ignore[arg-type]
        ids = pieced(text, marks, self.format.tokenizer)
        require(
            ids[0] in self.format.end_ids,
            f"the tokenizer reads the end of a turn as other tokens ({text[:20]!r})",
        )
        return ids

    def _from_end(self, heard: Messages) -> str:
        """The chat format from the end token of the policy's turn on."""
        problems = []
        for reply, mark in _replies(heard):
            before: Messages = [{"role": "user", "content": "?"}, reply]
            try:
                return self._cut(before, mark, self.format.text([*before, *heard]))
            except TEMPLATE_ERRORS as error:
                problems.append(reason(error))
        takes_none = [NO_TEXTS] if self.format.wants_parts else []
        raise ValueError("; ".join(dict.fromkeys(takes_none or problems)))

    def _cut(self, before: Messages, mark: str, text: str) -> str:
        """What follows the policy's turn.

        Args:
            before: the messages up to the policy's turn.
            mark: what the policy says last in it.
            text: of the conversation.
        """
        times, tail = text.count(mark), text.rpartition(mark)[2]
        writes = {0: "leaves it out"}.get(times, f"writes it {times} times")
        require(times == 1, f"what the policy says is a text, and the chat template {writes}")
        ends, known = self.format.end_texts, ", ".join(map(repr, self.format.end_texts))
        place, end = min(((tail.find(end), end) for end in ends if end in tail), default=(-1, ""))
        # A template may close a reply before it ends it; the policy says that itself. It does so
        # whatever is heard, so what is heard cannot be taken for it.
        closed = tail[:place] + end
        closing = self._closing(before, mark) if place > 0 else closed
        require(
            place >= 0 and closing.startswith(closed),
            f"the chat template goes on with {tail[:20]!r} where a turn of the policy ends, and "
            f"that is no end token of this run ({known or 'none is a special token'}); "
            "`sampling.stop_token_ids` can name more",
        )
        return tail[place:]

    def _closing(self, before: Messages, mark: str) -> str:
        """What follows the policy's turn where nothing is heard."""
        key = repr(before)
        if key not in self._closings:
            text = self.format.text(before, asks=False)
            self._closings[key] = text.partition(mark)[2]
        return self._closings[key]


def _is_text(message: Any) -> bool:
    return isinstance(message, dict) and {str} == {
        type(message.get(name)) for name in ("role", "content")
    }


def kind_of(messages: Messages) -> Kind:
    """The roles of messages; where one comes more than twice in a row, twice."""
    roles = [each["role"] for each in messages]
    again = [n for n, role in enumerate(roles) if n > 1 and roles[n - 2 : n] == [role] * 2]
    return tuple(role for n, role in enumerate(roles) if n not in again)


def reason(error: BaseException) -> str:
    """What a template says of messages that it does not take, or what we say of the template."""
    cause = error.__cause__
    if isinstance(error, ValueError) and cause is None:
        return str(error)
    return f"the chat template says: {str(cause or error).splitlines()[0]:.100}"


def _replies(heard: Messages) -> Iterator[tuple[dict[str, Any], str]]:
    """What the policy may have said before: calls, where tools answer; and a text.

    Templates are made for calls that are told apart from the text, and some insist on them.

    Yields:
        The message, and the mark that it ends with.
    """
    results = [each for each in heard if each["role"] == "tool"]
    if results:
        called = [call(each) for each in results]
        called[-1]["function"]["arguments"] = {"x": ARGUMENT}
        yield {"role": "assistant", "content": "", "tool_calls": called}, ARGUMENT
    yield {"role": "assistant", "content": REPLY}, REPLY


def call(result: dict[str, Any], argument: str = "1") -> dict[str, Any]:
    """The call that a tool's result answers, as chat templates take it.

    Args:
        result: message of role `tool`, with its names.
        argument: of the call.
    """
    function = {"name": result["name"], "arguments": {"x": argument}}
    return {"type": "function", "id": result["tool_call_id"], "function": function}
