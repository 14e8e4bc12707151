"""Conversations to imitate: which parts of the chat format the assistant wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from litgrpo.arguments import require
from litgrpo.data.rendering import Chat, ChatStyle, in_chat_format
from litgrpo.data.sources import Row

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase

Turns = Literal["all", "last"]
Part = tuple[str, bool]  # a text, and whether it is learned


def conversation_of(row: Row, style: ChatStyle) -> list[dict[str, str]] | None:
    """All messages of a row that holds a conversation; None where it is prompt and completion.

    A row holds `messages`, or a `prompt` and a `completion` that is a list of messages.
    """
    values = row.values
    messages, completion = values.get("messages"), values.get("completion")
    if messages is None and not isinstance(completion, list):
        return None
    given = messages if messages is not None else [*style.messages(row), *(completion or [])]
    good = isinstance(given, list) and all(_is_message(each) for each in given)
    said = f"{row.place}: messages are {given!r:.60}; expected [{{role: user, content: text}}, ...]"
    require(good, said)
    return given


def _is_message(each: Any) -> bool:
    return isinstance(each, dict) and {"role", "content"} <= each.keys()


def spoken_and_heard(row: Row, messages: list[Any]) -> list[Part]:
    """A completion of several turns without chat format: its texts, one after the other.

    Args:
        row: named in messages of errors.
        messages: those of the role `assistant` are learned, all others are read.

    Raises:
        ValueError: there is something else among them, or the last is not the assistant's.
    """
    texts = all(_is_message(each) and isinstance(each["content"], str) for each in messages)
    said = f"{row.place}: completion is {messages!r:.60}; expected [{{role: assistant, content: "
    require(texts and bool(messages), f"{said}text}}, ...]")
    last = messages[-1]["role"]
    require(last == "assistant", f"{row.place}: the last message of the completion is of {last!r}")
    return [(each["content"], each["role"] == "assistant") for each in messages]


def parts_of(
    row: Row,
    messages: list[dict[str, str]],
    turns: Turns,
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Part]:
    """The chat format of a conversation, cut where the assistant begins and ends.

    What is learned of a turn is what a model would have to write there: everything between the
    prompt for an answer and the mark that ends the turn, that mark included.

    Args:
        row: named in messages of errors.
        messages: up to its last answer; what follows is left out.
        turns: which answers are learned.
        chat: settings of the chat format.
        tokenizer: with a chat template.

    Raises:
        ValueError: there is no answer, or the template does not write a conversation one turn
            after the other.
    """
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    said = system + messages
    answers = [number for number, each in enumerate(said) if each["role"] == "assistant"]
    require(bool(answers), f"{row.place}: no message is the assistant's; there is nothing to learn")
    parts: list[Part] = []
    done = ""
    for number in answers if turns == "all" else answers[-1:]:
        asked = in_chat_format(said[:number], chat, tokenizer)
        answered = in_chat_format(said[: number + 1], chat, tokenizer, asks=False)
        require(
            asked.startswith(done) and answered.startswith(asked),
            f"{row.place}: the tokenizer's chat template writes a turn otherwise once others follow"
            f" (at message {number + 1}), so the answers cannot be told apart; set "
            "`train_on_turns: last`, or give the template what it needs in "
            "`chat: {template_kwargs: ...}`",
        )
        turn = answered[len(asked) :]
        # Templates write a line break behind the mark that ends a turn; no model has to.
        ended = turn.rstrip()
        parts += [(asked[len(done) :], False), (ended, True)]
        done = asked + ended
    return parts
