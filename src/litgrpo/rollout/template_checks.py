"""Compare the tokens between two turns with the chat template's rendering of conversations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from litgrpo.arguments import require
from litgrpo.data.messages import Messages
from litgrpo.data.rendering import TEMPLATE_ERRORS
from litgrpo.rollout.chat_format import ChatFormat, Roles, describe_template_error, make_call

# Turns of the policy before an observation: a reply and the observation after it, of each.
Turns = Sequence[tuple[str, Messages]]
QUESTION: Messages = [{"role": "user", "content": "6*7?"}]
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": "1"}}\n</tool_call>'
RESULTS, TEXTS = ("42", " 43\n", "44"), ("Too low, 17 > 3.\n", " no")
SHOWN = 40  # characters of a difference


def example_messages(roles: Roles, tool_role: str) -> Messages:
    """Return results of tools and then user messages, as many as roles; for two results three."""
    num_users = sum(role == "user" for role in roles)
    num_results = 0 if tool_role == "user" else roles.count(tool_role)
    results = RESULTS[: 1 if num_results == 1 else 3] if num_results else ()
    messages: Messages = [{"role": "tool", "name": "tool", "content": text} for text in results]
    return messages + [{"role": "user", "content": text} for text in TEXTS[:num_users]]


def find_mismatch(chat_format: ChatFormat, messages: Messages, ids: list[int]) -> str:
    """Return the conversation in which a chat template writes messages in other tokens; "": none.

    The replies before them have thoughts, calls, spaces and line breaks, and there are earlier
    turns. The end of the last reply is found without the code that made `ids`, see `encode_tail`.

    Args:
        chat_format: renders and encodes whole conversations.
        messages: an observation.
        ids: its tokens, from the end token of the policy's turn before it on.

    Raises:
        ValueError, or an error of the template: it cannot render the messages.
    """
    reply = CALL if any(message["role"] == "tool" for message in messages) else "I say 17"
    conversations: dict[str, Turns] = {
        "one turn": [(reply, messages)],
        "a thought": [(f"{THOUGHT}{reply}", messages)],
        "a later turn": [("a 1", messages), ("b\n2 ", messages), (f" {reply}\n\n", messages)],
    }
    if reply != CALL:
        conversations["an empty reply"] = [("", messages)]
    for name, turns in conversations.items():
        if encode_tail(chat_format, turns) != ids:
            return name
    result = [{"role": "tool", "name": "tool", "content": "42"}]
    try:
        after_result = encode_tail(chat_format, [(CALL, result), ("It is 42.", messages)])
    except TEMPLATE_ERRORS:  # no tool message is ever in front of them
        return ""
    return "" if after_result == ids else "after the result of a tool"


def encode_tail(chat_format: ChatFormat, turns: Turns) -> list[int]:
    """Return the tokens of the rendered conversation from the end token of the last turn on.

    Raises:
        ValueError: the template leaves out an observation, or writes no end token.
    """
    has_tools = any(message["role"] == "tool" for message in turns[-1][1])
    problems = []
    # Templates may reject tool messages without separate calls, or separate calls at all.
    for calls in (True, False) if has_tools else (False, True):
        try:
            return _encode_tail(chat_format, turns, calls)
        except TEMPLATE_ERRORS as error:
            problems.append(describe_template_error(error))
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _encode_tail(chat_format: ChatFormat, turns: Turns, calls: bool) -> list[int]:
    # Two conversations that differ only at the end of the last reply: their longest common ending
    # begins with what the template writes behind the reply.
    texts = [
        chat_format.render(_build_conversation(chat_format, turns, calls, suffix))
        for suffix in ("one", "two,")
    ]
    require(texts[0] != texts[1], "the chat template leaves out the policy's reply")
    backwards = zip(*(text[::-1] for text in texts), strict=False)
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], backwards))[::-1]
    ends = [common.index(end) for end in chat_format.end_texts if end in common]
    require(bool(ends), "the chat template writes no end token after a turn of the policy")
    tail, position = common[min(ends) :], 0
    for message in chat_format.to_messages(turns[-1][1]):
        position = tail.find(message["content"].strip(), position)
        role = message["role"]
        require(position >= 0, f"the chat template leaves out messages of role {role!r}")
    # Tokens are counted from the end: the whole conversation has as many end tokens behind the last
    # reply as the tail has, however its earlier text is tokenized.
    ids = chat_format.encode(chat_format.render(_build_conversation(chat_format, turns, calls)))
    num_ends = sum(token in chat_format.end_ids for token in chat_format.encode(tail))
    positions = [number for number, token in enumerate(ids) if token in chat_format.end_ids]
    return ids[positions[-num_ends] :]


def _build_conversation(
    chat_format: ChatFormat, turns: Turns, calls: bool = False, suffix: str = ""
) -> Messages:
    """Return all messages of a conversation.

    With `calls`, replies before tool messages are separate calls instead of texts; `suffix` is
    appended to the reply of the last turn.
    """
    messages = [*QUESTION]
    for number, (reply, observation) in enumerate(turns, start=1):
        ending = suffix if number == len(turns) else ""
        observed = chat_format.to_messages(observation)
        results = [message for message in observed if message["role"] == "tool"]
        if calls and results:
            made = [make_call(result, f"1{ending}") for result in results]
            messages.append({"role": "assistant", "content": "", "tool_calls": made})
        else:
            messages.append({"role": "assistant", "content": f"{reply}{ending}"})
        messages += observed
    return messages


def describe_history_change(chat_format: ChatFormat, observation: Messages, between: str) -> str:
    """Return how a template writes an earlier turn otherwise in a longer conversation; "": not.

    Args:
        chat_format: renders messages.
        observation: after each turn of the policy.
        between: text of the observation, from the end token of the policy's turn on.
    """
    reply = CALL if any(message["role"] == "tool" for message in observation) else "I say 17"
    replies = [f"{THOUGHT}{reply}", f" {reply}\n"]
    try:
        turns = [(text, observation) for text in replies]
        rendered = chat_format.render(_build_conversation(chat_format, turns))
    except TEMPLATE_ERRORS:
        return "it takes calls only apart from the text"
    # The row as a rollout builds it: prompt, then reply and observation of each turn.
    row = chat_format.render(QUESTION) + "".join(text + between for text in replies)
    pairs = zip(row, rendered, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if same == len(row) == len(rendered):
        return ""
    sampled, written = (text[same : same + SHOWN] for text in (row, rendered))
    return f"it writes {written!r} where the policy generated {sampled!r}"
