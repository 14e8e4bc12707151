"""Encode observations: the tokens between two turns, as plain text or in the chat template.

Generated tokens are never decoded and encoded again: a row only grows. Encoding its text again
could give other tokens than those that were sampled, and their log-probabilities would be wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import require
from litgrpo.data.messages import Messages
from litgrpo.data.rendering import REPLY, TEMPLATE_ERRORS, ChatPromptFormat, PromptFormat
from litgrpo.data.tokenization import encode_as_plain_text, special_token_texts
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.environments.base import Message
from litgrpo.rollout.chat_format import (
    ChatFormat,
    Roles,
    collapse_roles,
    describe_template_error,
    make_call,
)
from litgrpo.rollout.template_checks import (
    describe_history_change,
    example_messages,
    find_mismatch,
)

if TYPE_CHECKING:  # slow to import; only used in annotations
    from transformers import PreTrainedTokenizerBase

# Encoded observations that are cached; the cache is emptied when it is full.
MAX_CACHED = 4096
ARGUMENT = "\ue000argument\ue001"  # placeholder for an argument of a call, as `REPLY`
UNEXPECTED_ROLES = (
    "an observation must be a user message, tool messages, or tool messages and then a user message"
)
IMAGE_TEMPLATE = (
    "the chat template is made for images: it expects lists of content parts, not texts"
)


class TurnFormat(ABC):
    """Encodes an observation as the tokens between two turns of the policy."""

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


@dataclass(frozen=True)
class TemplateFormat(TurnFormat):
    """Takes the tokens between turns from the chat template.

    A conversation with a placeholder for the policy's reply is rendered; the tokens between turns
    are what follows the placeholder. This text begins with an end token, which the tokenizer never
    merges with the text before it. The tokens therefore do not depend on the reply, which is
    verified at the first observation of each sequence of roles, see `find_mismatch`.

    Args:
        chat_format: renders and encodes messages.
    """

    chat_format: ChatFormat
    # {roles of an observation: why it cannot be rendered, "" if it can}
    _problems: dict[Roles, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _closings: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _encoded: dict[str, list[int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def check(self, *, tools: bool) -> None:
        """Check before training that observations can be rendered: texts, or results of tools.

        Observations of other roles are checked when they occur first. Logs once if the template
        renders earlier turns differently in a longer conversation.

        Raises:
            ValueError: the template cannot render them exactly.
        """
        observation: Messages = [{"role": "tool" if tools else "user", "content": "42"}]
        messages = self.chat_format.to_messages(observation)
        problem = self._find_problem(collapse_roles(messages))
        require(
            not problem,
            f"The chat template cannot render observations: {problem}. Fix this, or set "
            "`model.episode.turn_format: inline`, which inserts plain texts.",
        )
        between = self._render_from_end(messages)
        change = describe_history_change(self.chat_format, observation, between)
        if change:
            rank_zero_info(
                f"The chat template renders earlier turns differently in a longer conversation: "
                f"{change}. Training keeps the generated tokens. Serve the model with a template "
                "that keeps them as well, or set the template's options in `data.chat: {kwargs: "
                "...}`."
            )

    def encode(self, observation: str | Messages, turn_has_end: bool) -> list[int]:
        # A text becomes a user message.
        messages = self.chat_format.to_messages(observation)
        # Rendering is slow, and the rows of a group often get equal observations.
        key = repr(messages)
        if key not in self._encoded:
            roles = collapse_roles(messages)
            problem = self._find_problem(roles)
            listed = ", ".join(roles) or "none"
            require(not problem, f"Could not render an observation of role {listed}: {problem}.")
            if len(self._encoded) >= MAX_CACHED:
                self._encoded.clear()
            self._encoded[key] = self._encode_from_end(messages)
        ids = self._encoded[key]
        return ids[1:] if turn_has_end else ids[:]

    def _find_problem(self, roles: Roles) -> str:
        """Return why messages of these roles cannot be rendered; "" if they can."""
        if roles not in self._problems:
            self._problems[roles] = self._verify(roles)
        return self._problems[roles]

    def _verify(self, roles: Roles) -> str:
        """Compare tokens of messages of these roles with the template's; see `_find_problem`."""
        tool_role = self.chat_format.tool_role
        in_order = sorted(roles, key=lambda role: role != tool_role)
        if not roles or not {*roles} <= {tool_role, "user"} or [*roles] != in_order:
            return UNEXPECTED_ROLES
        example = example_messages(roles, tool_role)
        try:
            ids = self._encode_from_end(self.chat_format.to_messages(example))
            conversation = find_mismatch(self.chat_format, example, ids)
        except TEMPLATE_ERRORS as error:
            problem = describe_template_error(error)
        else:
            if not conversation:
                return ""
            problem = (
                "in a longer conversation the chat template or the tokenizer gives other tokens "
                f"(conversation: {conversation})"
            )
        if "tool" in roles:
            problem += "; for a template without a tool role set `model.episode.tool_role: user`"
        return problem

    def _encode_from_end(self, messages: Messages) -> list[int]:
        """Return the tokens between two turns, including the end token of the first one."""
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
        """Return what follows the policy's turn, which ends with a placeholder, in a conversation.

        `before` are the messages up to this turn, and `text` is the rendered conversation.
        """
        times, tail = text.count(placeholder), text.rpartition(placeholder)[2]
        writes = "leaves it out" if times == 0 else f"writes it {times} times"
        require(times == 1, f"the chat template does not write a reply once: it {writes}")
        ends = self.chat_format.end_texts
        start, end = min(((tail.find(end), end) for end in ends if end in tail), default=(-1, ""))
        # A template may close a reply before its end token, for example with `</r>`. The policy
        # generates this closing itself. An end token that belongs to the observation must not be
        # taken for the reply's, so the closing has to be the same without any observation.
        closed = tail[:start] + end
        closing = self._render_closing(before, placeholder) if start > 0 else closed
        listed = ", ".join(map(repr, ends)) or "none is a special token"
        require(
            start >= 0 and closing.startswith(closed),
            f"the chat template ends a turn with {tail[:20]!r}, which is not an end token of this "
            f"run ({listed}); add the template's end token to model.sampling.stop_token_ids",
        )
        return tail[start:]

    def _render_closing(self, before: Messages, placeholder: str) -> str:
        """Return what follows the policy's turn at the end of a conversation."""
        key = repr(before)
        if key not in self._closings:
            text = self.chat_format.render(before, add_generation_prompt=False)
            self._closings[key] = text.partition(placeholder)[2]
        return self._closings[key]


def _placeholder_replies(messages: Messages) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield replies that may precede these messages, and the placeholder that each ends with.

    They are calls if tools answer, because some templates reject tool messages without a reply
    whose calls are separate from its text, and a text.
    """
    tool_messages = [message for message in messages if message["role"] == "tool"]
    if tool_messages:
        calls = [make_call(message) for message in tool_messages]
        calls[-1]["function"]["arguments"] = {"x": ARGUMENT}
        yield {"role": "assistant", "content": "", "tool_calls": calls}, ARGUMENT
    yield {"role": "assistant", "content": REPLY}, REPLY


def build_template_format(
    prompt_format: PromptFormat,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    *,
    tool_role: str = "tool",
    tools: bool = False,
    split_special_tokens: bool = True,
) -> TemplateFormat:
    """Build and check the turn format of a run whose prompts are in a chat format.

    Args:
        prompt_format: format of the prompts, with the tools that the chat template shows.
        tokenizer: tokenizer of the policy.
        end_ids: tokens that end a turn of the policy.
        tool_role: role that the template gets instead of `tool`.
        tools: True if tools answer that the chat template does not show.
        split_special_tokens: encode special tokens in observations as plain text.

    Raises:
        ValueError: prompts are plain texts, or see `TemplateFormat.check`.
    """
    if not isinstance(prompt_format, ChatPromptFormat):
        raise ValueError(
            "model.episode.turn_format is template, but prompts are plain texts. Set `data.chat: "
            "true`, or `model.episode.turn_format: inline`, which inserts plain texts."
        )
    chat = prompt_format.chat
    turn_format = TemplateFormat(
        ChatFormat(tokenizer, chat, tuple(end_ids), tool_role, split_special_tokens)
    )
    turn_format.check(tools=tools or bool(chat.tools))
    return turn_format
