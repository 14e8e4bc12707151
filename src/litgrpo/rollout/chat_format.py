"""Messages of episodes as text and tokens of the policy's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import first_line, require
from litgrpo.data.messages import Messages
from litgrpo.data.rendering import REPLY, TEMPLATE_ERRORS, Chat, apply_chat_template, hide_tools
from litgrpo.data.tokenization import Placeholders, encode_with_placeholders

if TYPE_CHECKING:  # slow to import; only used in annotations
    from transformers import PreTrainedTokenizerBase

Roles = tuple[str, ...]  # roles of successive messages, see `collapse_roles`


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
        """Return the token ids of what `render` returned, with the placeholders of `hide`."""
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


def make_call(tool_message: dict[str, Any], argument: str = "1") -> dict[str, Any]:
    """Return the call that a tool message answers, as chat templates read calls."""
    function = {"name": tool_message["name"], "arguments": {"x": argument}}
    return {"type": "function", "id": tool_message["tool_call_id"], "function": function}
