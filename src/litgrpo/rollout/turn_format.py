"""Encode observations: the tokens between two turns, as plain text or in the chat template.

Generated tokens are never decoded and encoded again: a row only grows. Encoding its text again
could give other tokens than those that were sampled, and their log-probabilities would be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import first_line, require
from litgrpo.data.messages import Messages
from litgrpo.data.rendering import TEMPLATE_ERRORS, Chat, apply_chat_template, hide_tools
from litgrpo.data.tokenization import (
    Placeholders,
    encode_as_plain_text,
    encode_with_placeholders,
    special_token_texts,
)
from litgrpo.environments.base import Message

if TYPE_CHECKING:  # slow to import; only used in annotations
    from transformers import PreTrainedTokenizerBase


class TurnFormat(ABC):
    """Encodes an observation as the tokens between two turns of the policy.

    Example::

        turn_format = InlineFormat(tokenizer)
        ids = turn_format.encode(" -> 42", turn_has_end=True)
    """

    @abstractmethod
    def encode(self, observation: str | list[Message], turn_has_end: bool) -> list[int]:
        """Return the tokens from the end of a turn up to the first token of the next one.

        Args:
            observation: text or messages of the environment.
            turn_has_end: True if the turn's last token is one of the policy's end tokens. If not,
                because a stop string or a token limit ended the turn, the format may add one.

        Raises:
            ValueError: this format cannot express the observation.
        """


@dataclass(frozen=True)
class InlineFormat(TurnFormat):
    """Inserts texts without anything around them.

    Args:
        tokenizer: tokenizer of the policy.
        split_special_tokens: encode special tokens in the text, such as `<eos>`, as plain text.
            Other tokens that were added to the tokenizer are encoded as usual.
    """

    tokenizer: PreTrainedTokenizerBase
    split_special_tokens: bool = True

    @cached_property
    def _special_texts(self) -> list[str]:
        return special_token_texts(self.tokenizer) if self.split_special_tokens else []

    def encode(self, observation: str | list[Message], turn_has_end: bool) -> list[int]:
        """See `TurnFormat.encode`."""
        require(
            isinstance(observation, str),
            f"The environment returned messages ({observation!r:.60}), but "
            "model.episode.turn_format is inline, which expects a text. Set "
            "model.episode.turn_format: template, or return a text.",
        )
        text = str(observation)
        if any(special in text for special in self._special_texts):
            return encode_as_plain_text(text, self.tokenizer)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


Roles = tuple[str, ...]  # roles of successive messages, see `collapse_roles`
# Encoded observations that are cached; the cache is emptied when it is full.
MAX_CACHED = 4096
# Placeholders for a reply and for an argument of a call. Characters of the private use area occur
# in no template and in no ordinary text.
REPLY, ARGUMENT = "\ue000reply\ue001", "\ue000argument\ue001"
UNEXPECTED_ROLES = (
    "an observation must be a user message, tool messages, or tool messages and then a user message"
)
IMAGE_TEMPLATE = (
    "the chat template is made for images: it expects lists of content parts, not texts"
)


@dataclass(frozen=True)
class ChatFormat:
    """Renders and encodes messages with the policy's chat template.

    Args:
        tokenizer: tokenizer of the policy, with a chat template.
        chat: settings of the chat format, including tools.
        end_ids: tokens that end a turn of the policy.
        tool_role: role that the template gets instead of `tool`. `user` is for templates without a
            tool role; successive user messages are then joined, as these templates often require.
        split_special_tokens: encode special tokens in observations as plain text.

    Example::

        chat_format = ChatFormat(tokenizer, Chat(), end_ids=(tokenizer.eos_token_id,))
        chat_format.render([{"role": "user", "content": "6*7?"}])
    """

    tokenizer: PreTrainedTokenizerBase
    chat: Chat
    end_ids: tuple[int, ...]
    tool_role: str = "tool"
    split_special_tokens: bool = True

    def to_messages(self, observation: str | Messages) -> Messages:
        """Return an observation as the template's messages; a text becomes a user message.

        Raises:
            ValueError: the observation is neither a text nor a list of messages with texts.
        """
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        require(
            all(_has_text(message) for message in observation),
            f"The environment returned {observation!r:.60}; expected a text or a list of messages "
            "such as {'role': 'tool', 'content': '42'}, whose content is a text.",
        )
        messages = [self._complete(message, n) for n, message in enumerate(observation)]
        if self.tool_role != "user":
            return messages
        joined: Messages = []
        for message in messages:
            if joined and joined[-1]["role"] == message["role"] == "user":
                content = f"{joined[-1]['content']}\n{message['content']}"
                joined[-1] = {"role": "user", "content": content}
            else:
                joined.append(message)
        return joined

    def _complete(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        """Add the name and the call id that templates read from tool messages."""
        if message["role"] != "tool":
            return message
        defaults = {"name": "tool", "tool_call_id": f"call{number:05}"}
        return defaults | message | {"role": self.tool_role}

    @cached_property
    def _chat_and_texts(self) -> tuple[Chat, dict[str, str]]:
        """The settings with placeholders for special tokens in the tools, and their texts."""
        placeholders = Placeholders(self.tokenizer)
        return hide_tools(self.chat, placeholders), placeholders.texts

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Render messages as text, by default up to where the policy's next reply begins.

        Special tokens that the tools write are placeholders in it: see `encode`.
        """
        chat, _ = self._chat_and_texts
        return apply_chat_template(
            messages, chat, self.tokenizer, add_generation_prompt=add_generation_prompt
        )

    def encode(self, text: str, placeholders: Placeholders | None = None) -> list[int]:
        """Return the token ids of rendered text.

        Args:
            text: what `render` returned.
            placeholders: of the messages; see `hide`.
        """
        texts = self._chat_and_texts[1] if placeholders is None else placeholders.texts
        return encode_with_placeholders(text, texts, self.tokenizer)

    def hide(self, messages: Messages) -> tuple[Messages, Placeholders]:
        """Return messages for `render` and the placeholders of special tokens that they write."""
        placeholders = Placeholders(self.tokenizer, self._chat_and_texts[1])
        if self.split_special_tokens:
            messages = placeholders.hide_messages(messages)
        return messages, placeholders

    @property
    def needs_content_parts(self) -> bool:
        """True if the template renders lists of content parts but no texts."""
        parts = [{"type": "text", "text": REPLY}]
        return not self._renders(REPLY) and self._renders(parts)

    def _renders(self, content: Any) -> bool:
        try:
            return REPLY in self.render([{"role": "user", "content": content}])
        except TEMPLATE_ERRORS:
            return False

    @property
    def end_texts(self) -> list[str]:
        """Texts of the end tokens that the tokenizer always encodes as one token."""
        added = self.tokenizer.added_tokens_decoder
        return [str(added[token_id]) for token_id in self.end_ids if token_id in added]


@dataclass(frozen=True)
class TemplateFormat(TurnFormat):
    """Takes the tokens between turns from the chat template.

    A conversation with a placeholder for the policy's reply is rendered; the tokens between turns
    are what follows the placeholder. This text begins with an end token, which the tokenizer never
    merges with the text before it. The tokens therefore do not depend on the reply.
    `template_probes.verify_template` checks this for a template before training.

    Args:
        chat_format: renders and encodes messages.
        verified: roles of messages that may be rendered.
        rejected: {roles: why messages with these roles cannot be rendered}.
    """

    chat_format: ChatFormat
    verified: frozenset[Roles]
    rejected: dict[Roles, str] = field(default_factory=dict)
    _closings: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _encoded: dict[str, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def encode(self, observation: str | Messages, turn_has_end: bool) -> list[int]:
        """See `TurnFormat.encode`; a text becomes a user message."""
        messages = self.chat_format.to_messages(observation)
        # Rendering is slow, and the rows of a group often get equal observations.
        key = repr(messages)
        if key not in self._encoded:
            if len(self._encoded) >= MAX_CACHED:
                self._encoded.clear()
            self._encoded[key] = self._encode_from_end(messages)
        ids = self._encoded[key]
        return ids[1:] if turn_has_end else ids[:]

    def _encode_from_end(self, messages: Messages) -> list[int]:
        """Return the tokens between two turns, including the end token of the first one."""
        roles = collapse_roles(messages)
        if roles not in self.verified:
            why = self.rejected.get(roles, UNEXPECTED_ROLES)
            named = ", ".join(roles) or "none"
            raise ValueError(f"Could not render an observation of role {named}: {why}.")
        safe, placeholders = self.chat_format.hide(messages)
        text = self._render_from_end(safe)
        ids = self.chat_format.encode(text, placeholders)
        require(
            ids[0] in self.chat_format.end_ids,
            f"The tokenizer does not encode the end of a turn ({text[:20]!r}) as one of the end "
            f"tokens {[*self.chat_format.end_ids]}.",
        )
        return ids

    def _render_from_end(self, messages: Messages) -> str:
        """Return the rendered text from the end token of the policy's turn on.

        Raises:
            ValueError: the template renders no kind of reply followed by these messages.
        """
        problems = []
        for reply, placeholder in _placeholder_replies(messages):
            before: Messages = [{"role": "user", "content": "?"}, reply]
            try:
                text = self.chat_format.render([*before, *messages])
                return self._cut_reply(before, placeholder, text)
            except TEMPLATE_ERRORS as error:
                problems.append(describe_template_error(error))
        if self.chat_format.needs_content_parts:
            problems = [IMAGE_TEMPLATE]
        raise ValueError("; ".join(dict.fromkeys(problems)))

    def _cut_reply(self, before: Messages, placeholder: str, text: str) -> str:
        """Return what follows the policy's turn in a rendered conversation.

        Args:
            before: messages up to the policy's turn.
            placeholder: the end of the policy's reply.
            text: the rendered conversation.
        """
        times, tail = text.count(placeholder), text.rpartition(placeholder)[2]
        writes = "leaves it out" if times == 0 else f"writes it {times} times"
        require(times == 1, f"the chat template does not write a reply once: it {writes}")
        ends = self.chat_format.end_texts
        place, end = min(((tail.find(end), end) for end in ends if end in tail), default=(-1, ""))
        # A template may close a reply before its end token, for example with `</r>`. The policy
        # generates this closing itself. An end token that belongs to the observation must not be
        # taken for the reply's, so the closing has to be the same without any observation.
        closed = tail[:place] + end
        closing = self._render_closing(before, placeholder) if place > 0 else closed
        listed = ", ".join(map(repr, ends)) or "none is a special token"
        require(
            place >= 0 and closing.startswith(closed),
            f"the chat template ends a turn with {tail[:20]!r}, which is not an end token of this "
            f"run ({listed}); add the template's end token to model.sampling.stop_token_ids",
        )
        return tail[place:]

    def _render_closing(self, before: Messages, placeholder: str) -> str:
        """Return what follows the policy's turn at the end of a conversation."""
        key = repr(before)
        if key not in self._closings:
            text = self.chat_format.render(before, add_generation_prompt=False)
            self._closings[key] = text.partition(placeholder)[2]
        return self._closings[key]


def _has_text(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )


def collapse_roles(messages: Messages) -> Roles:
    """Return the roles of messages, with three or more equal ones in a row reduced to two.

    Templates may render the first and the later ones of several results differently, so two stand
    for any larger number.

    Example:
        >>> collapse_roles([{"role": "tool"}, {"role": "tool"}, {"role": "tool"}, {"role": "user"}])
        ('tool', 'tool', 'user')
    """
    roles: list[str] = []
    for message in messages:
        if roles[-2:] != [message["role"]] * 2:
            roles.append(message["role"])
    return tuple(roles)


def describe_template_error(error: BaseException) -> str:
    """Return one line on an error raised by a chat template, or by the checks on its output."""
    cause = error.__cause__
    if isinstance(error, ValueError) and cause is None:
        return str(error)
    return f"the chat template raises: {first_line(cause or error):.100}"


def _placeholder_replies(messages: Messages) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield replies that may precede these messages: calls if tools answer, and a text.

    Some templates reject tool messages without a reply whose calls are separate from its text.

    Yields:
        The message, and the placeholder that it ends with.
    """
    tool_messages = [message for message in messages if message["role"] == "tool"]
    if tool_messages:
        calls = [make_call(message) for message in tool_messages]
        calls[-1]["function"]["arguments"] = {"x": ARGUMENT}
        yield {"role": "assistant", "content": "", "tool_calls": calls}, ARGUMENT
    yield {"role": "assistant", "content": REPLY}, REPLY


def make_call(tool_message: dict[str, Any], argument: str = "1") -> dict[str, Any]:
    """Return the call that a tool message answers, in the structure that chat templates read.

    Args:
        tool_message: message of role `tool` with `name` and `tool_call_id`.
        argument: value of the call's only argument.
    """
    function = {"name": tool_message["name"], "arguments": {"x": argument}}
    return {"type": "function", "id": tool_message["tool_call_id"], "function": function}
