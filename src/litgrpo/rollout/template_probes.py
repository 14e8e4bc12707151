"""Verify before training that a chat template's turn format gives the template's own tokens.

Probe conversations are rendered as a whole by the template, and their last observation is compared
with the tokens that `TemplateFormat` gives without seeing the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from litgrpo.arguments import require
from litgrpo.data.messages import Messages
from litgrpo.data.rendering import TEMPLATE_ERRORS, ChatPromptFormat, PromptFormat
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.rollout.turn_format import (
    ChatFormat,
    Roles,
    TemplateFormat,
    TurnFormat,
    collapse_roles,
    describe_template_error,
    make_call,
)

if TYPE_CHECKING:  # slow to import; only used in annotations
    from transformers import PreTrainedTokenizerBase


THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": "1"}}\n</tool_call>'
MERGES = "merges tokens where a prompt meets a reply"
MISMATCH = (
    "in a longer conversation the chat template or the tokenizer gives other tokens "
    "(conversation {name!r})"
)


def user_message(text: str) -> Messages:
    """Return a user message, as a list."""
    return [{"role": "user", "content": text}]


def tool_messages(*texts: str) -> Messages:
    """Return one tool message per text."""
    return [{"role": "tool", "name": "tool", "content": text} for text in texts]


@dataclass(frozen=True)
class ProbeConversation:
    """A conversation: a prompt, and turns of the policy with an observation after each.

    Args:
        prompt: messages before the first turn.
        turns: (reply of the policy, observation) of each turn.
    """

    prompt: Messages
    turns: tuple[tuple[str, Messages], ...]

    @property
    def last_observation(self) -> Messages:
        """Observation after the last turn."""
        return self.turns[-1][1]


# Boundaries with spaces, line breaks and nothing; thoughts; calls; several results; later turns.
PROBES = {
    "user": ProbeConversation(
        user_message("Guess"), (("I say 17", user_message("Too low, 17 > 3.\n")),)
    ),
    "user, third turn": ProbeConversation(
        user_message("Guess"),
        (
            ("a 1", user_message("lower")),
            ("b\n2 ", user_message("hi!")),
            (" 3\n\n", user_message(" no")),
        ),
    ),
    "user, thought": ProbeConversation(
        user_message("Guess"), ((f"{THOUGHT}I say 17", user_message("Too low")),)
    ),
    "user, nothing said": ProbeConversation(
        user_message("Guess"), (("", user_message("Say something.")),)
    ),
    "tool": ProbeConversation(user_message("6*7?"), ((CALL, tool_messages("42")),)),
    "tool, thought": ProbeConversation(
        user_message("6*7?"), ((f"{THOUGHT}{CALL}", tool_messages("42")),)
    ),
    "tool, several": ProbeConversation(
        user_message("6*7?"), ((f"{CALL}\n{CALL}", tool_messages("42", " 43\n", "44")),)
    ),
    "tool, second turn": ProbeConversation(
        user_message("6*7?"), ((CALL, tool_messages("42")), (f"So. {CALL}", tool_messages("7")))
    ),
    "tool, empty": ProbeConversation(
        user_message(" 6*7?\n"), ((f" {CALL} \n", tool_messages("")),)
    ),
    "tool, then user": ProbeConversation(
        user_message("6*7?"), ((CALL, [*tool_messages("42"), *user_message("Continue.")]),)
    ),
    "user, twice": ProbeConversation(
        user_message("Guess"), (("17", [*user_message("No."), *user_message("Lower.")]),)
    ),
    "user after a tool": ProbeConversation(
        user_message("6*7?"), ((CALL, tool_messages("42")), ("It is 42.", user_message("Sure?")))
    ),
}


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of a probe conversation.

    Args:
        roles: roles of its last observation.
        rejected: why the turn format cannot render the observation; "" if it can.
        mismatch: True if the turn format gives other tokens than the template.
        history_change: how the template would render earlier messages differently; "" if every
            token of the conversation is the same.
    """

    roles: Roles
    rejected: str = ""
    mismatch: bool = False
    history_change: str = ""

    @property
    def outcome(self) -> str:
        """`exact`, `tail exact`, `rejected` or `mismatch`."""
        if self.mismatch:
            return "mismatch"
        if self.rejected:
            return "rejected"
        return "tail exact" if self.history_change else "exact"

    @property
    def is_usable(self) -> bool:
        """True if observations with these roles may be used in training.

        A changed history does no harm: a row keeps the tokens that were sampled.
        """
        return not (self.rejected or self.mismatch)


def run_probes(turn_format: TurnFormat, chat_format: ChatFormat) -> dict[str, ProbeResult]:
    """Return {name of a probe conversation: its result}.

    The tokens from the end token of the last turn on are compared with those of the whole
    conversation as the template renders it. The turn format is not used to find this end token:
    two conversations that differ only in the last turn have equal texts behind it.

    Args:
        turn_format: the format to verify.
        chat_format: renders and encodes whole conversations.
    """
    return {name: run_probe(turn_format, chat_format, probe) for name, probe in PROBES.items()}


def run_probe(
    turn_format: TurnFormat, chat_format: ChatFormat, probe: ProbeConversation
) -> ProbeResult:
    """Return the result of one probe conversation; see `run_probes`."""
    roles: Roles = ()
    observations: list[list[int]] = []
    try:
        for _, observation in probe.turns:
            roles = collapse_roles(chat_format.to_messages(observation))
            observations.append(turn_format.encode(observation, turn_has_end=False))
        expected = encode_tail(chat_format, probe)
    except TEMPLATE_ERRORS as error:
        return ProbeResult(roles, rejected=describe_template_error(error))
    without_end = turn_format.encode(probe.last_observation, turn_has_end=True)
    if observations[-1] != expected or without_end != expected[1:]:
        return ProbeResult(roles, mismatch=True)
    change = describe_history_change(chat_format, probe, observations)
    return ProbeResult(roles, history_change=change)


def list_probe_roles(chat_format: ChatFormat) -> list[Roles]:
    """Return the roles of every observation of the probe conversations."""
    observations = [observation for probe in PROBES.values() for _, observation in probe.turns]
    return [collapse_roles(chat_format.to_messages(each)) for each in observations]


def verify_template(chat_format: ChatFormat, *, tools: bool) -> TemplateFormat:
    """Build the turn format of a chat template and verify it on the probe conversations.

    Logs once if the template renders earlier turns differently in a longer conversation.

    Args:
        chat_format: renders and encodes messages.
        tools: True if observations are tool messages; user messages are required otherwise. Other
            roles that the template rejects are rejected only when they occur.

    Raises:
        ValueError: the template cannot render the required messages exactly.
    """
    all_roles = frozenset(list_probe_roles(chat_format))
    found = run_probes(TemplateFormat(chat_format, all_roles), chat_format)
    rejected: dict[Roles, str] = {}
    for name, result in found.items():
        if not result.is_usable:
            why = result.rejected or MISMATCH.format(name=name)
            if "tool" in result.roles:
                why += "; for a template without a tool role set `model.episode.tool_role: user`"
            rejected.setdefault(result.roles, why)
    required = collapse_roles(chat_format.to_messages(tool_messages("") if tools else "?"))
    require(
        required not in rejected,
        f"The chat template cannot render observations: {rejected.get(required)}. Fix this, or set "
        "`model.episode.turn_format: inline`, which inserts plain texts.",
    )
    changes: dict[str, str] = {}  # {change: the first conversation that shows it}
    for name, result in found.items():
        if result.history_change not in ("", MERGES):
            changes.setdefault(result.history_change, name)
    if changes:
        listed = ", ".join(f"{change} (conversation {name!r})" for change, name in changes.items())
        rank_zero_info(
            f"The chat template renders earlier turns differently in a longer conversation: it "
            f"{listed}. Training keeps the generated tokens. Serve the model with a template that "
            "keeps them as well, or set the template's options in `data.chat: {kwargs: ...}`."
        )
    return TemplateFormat(chat_format, all_roles - {*rejected}, rejected)


def count_mismatches(turn_format: TemplateFormat) -> int:
    """Count the probe conversations for which a turn format gives other tokens than the template.

    Conversations that the turn format rejects are not counted.
    """
    found = run_probes(turn_format, turn_format.chat_format)
    return sum(result.mismatch for result in found.values())


def build_template_format(
    prompt_format: PromptFormat,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    *,
    tool_role: str = "tool",
    tools: bool = False,
    split_special_tokens: bool = True,
) -> TemplateFormat:
    """Build and verify the turn format of a run whose prompts are in a chat format.

    Args:
        prompt_format: format of the prompts, with the tools that the chat template shows.
        tokenizer: tokenizer of the policy.
        end_ids: tokens that end a turn of the policy.
        tool_role: role that the template gets instead of `tool`.
        tools: True if tools answer that the chat template does not show.
        split_special_tokens: encode special tokens in observations as plain text.

    Raises:
        ValueError: prompts are plain texts, or see `verify_template`.
    """
    if not isinstance(prompt_format, ChatPromptFormat):
        raise ValueError(
            "model.episode.turn_format is template, but prompts are plain texts. Set `data.chat: "
            "true`, or `model.episode.turn_format: inline`, which inserts plain texts."
        )
    chat = prompt_format.chat
    chat_format = ChatFormat(tokenizer, chat, tuple(end_ids), tool_role, split_special_tokens)
    return verify_template(chat_format, tools=tools or bool(chat.tools))


# --- conversations as the template renders them ---


def build_conversation(
    chat_format: ChatFormat, probe: ProbeConversation, calls: bool = False, suffix: str = ""
) -> Messages:
    """Return all messages of a probe conversation.

    Args:
        chat_format: gives observations the template's roles.
        probe: the conversation.
        calls: give replies before tool messages as separate calls instead of text.
        suffix: appended to the reply of the last turn.
    """
    messages, last = [*probe.prompt], len(probe.turns) - 1
    for number, (reply, observation) in enumerate(probe.turns):
        ending = suffix if number == last else ""
        following = chat_format.to_messages(observation)
        made = [make_call(each, f"1{ending}") for each in following if each["role"] == "tool"]
        if calls and made:
            messages.append({"role": "assistant", "content": "", "tool_calls": made})
        else:
            messages.append({"role": "assistant", "content": f"{reply}{ending}"})
        messages += following
    return messages


def encode_tail(chat_format: ChatFormat, probe: ProbeConversation) -> list[int]:
    """Return the tokens of the rendered conversation from the end token of the last turn on.

    Raises:
        ValueError: the template leaves out an observation, or writes no end token.
    """
    tools = "tool" in collapse_roles(chat_format.to_messages(probe.last_observation))
    problems = []
    # Templates may reject tool messages without separate calls, or separate calls at all.
    for calls in (True, False) if tools else (False, True):
        try:
            return _encode_tail(chat_format, probe, calls)
        except TEMPLATE_ERRORS as error:
            problems.append(describe_template_error(error))
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _encode_tail(chat_format: ChatFormat, probe: ProbeConversation, calls: bool) -> list[int]:
    # Two conversations that differ only at the end of the last reply: their longest common ending
    # begins with what the template writes behind the reply.
    texts = [
        chat_format.render(build_conversation(chat_format, probe, calls, suffix))
        for suffix in ("one", "two,")
    ]
    require(texts[0] != texts[1], "the chat template leaves out the policy's reply")
    backwards = zip(*(text[::-1] for text in texts), strict=False)
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], backwards))[::-1]
    ends = [common.index(end) for end in chat_format.end_texts if end in common]
    require(bool(ends), "the chat template writes no end token after a turn of the policy")
    tail, place = common[min(ends) :], 0
    for message in chat_format.to_messages(probe.last_observation):
        place = tail.find(message["content"].strip(), place)
        require(place >= 0, f"the chat template leaves out messages of role {message['role']!r}")
    # Tokens are counted from the end: the whole conversation has as many end tokens behind the last
    # reply as the tail has, however its earlier text is tokenized.
    ids = chat_format.encode(chat_format.render(build_conversation(chat_format, probe, calls)))
    num_ends = sum(token in chat_format.end_ids for token in chat_format.encode(tail))
    places = [number for number, token in enumerate(ids) if token in chat_format.end_ids]
    return ids[places[-num_ends] :]


def describe_history_change(
    chat_format: ChatFormat, probe: ProbeConversation, observations: list[list[int]]
) -> str:
    """Describe how the rendered conversation differs from the row that training keeps.

    Args:
        chat_format: renders and encodes messages.
        probe: the conversation.
        observations: tokens after each turn of the policy.

    Returns:
        The difference; "" if all tokens are equal.
    """
    try:
        rendered = chat_format.render(build_conversation(chat_format, probe))
    except TEMPLATE_ERRORS:
        return "takes calls only apart from the text"
    # The row as a rollout builds it: prompt, then reply and observation of each turn.
    text = chat_format.render(probe.prompt)
    row = chat_format.encode(text)
    decode = chat_format.tokenizer.decode
    for (reply, _), ids in zip(probe.turns, observations, strict=True):
        row += chat_format.encode(reply) + ids
        text += reply + str(decode(ids, clean_up_tokenization_spaces=False))
    if row == chat_format.encode(rendered):
        return ""
    return _describe_text_change(text, rendered)


def _describe_text_change(before: str, after: str) -> str:
    more_thoughts = after.count("<think>") - before.count("<think>")
    if more_thoughts < 0:
        return "drops earlier thoughts"
    if more_thoughts > 0:
        return "inserts empty thoughts"
    if after == before:  # the same text in other tokens
        return MERGES
    if "".join(after.split()) == "".join(before.split()):
        return "trims texts"
    return "formats replies differently"
