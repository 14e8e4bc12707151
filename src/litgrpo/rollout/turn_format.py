"""Tokens between two turns of an episode: observations as text, or in the chat template's format.

Sampled tokens are never decoded and encoded again: a row only grows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jinja2

from litgrpo.arguments import require
from litgrpo.data.rendering import (
    Chat,
    ChatPromptFormat,
    Messages,
    PromptFormat,
    apply_chat_template,
)
from litgrpo.data.tokenization import (
    encode_as_plain_text,
    encode_with_placeholders,
    insert_placeholders,
    placeholders_for,
    special_token_texts,
    tokenize,
)
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.environments.base import Message

if TYPE_CHECKING:  # slow to import; only used in annotations
    from transformers import PreTrainedTokenizerBase


class TurnFormat(ABC):
    """Turns what an environment says into the tokens between two turns of the policy."""

    @abstractmethod
    def encode(self, said: str | list[Message], ended: bool) -> list[int]:
        """The tokens that a row hears, up to where the policy speaks again.

        Args:
            said: by the environment.
            ended: whether the turn's last token is an end token of the policy; where it is not (a
                stop string or a limit ended it), one may be needed.

        Raises:
            ValueError: it cannot be said in this way.
        """


@dataclass(frozen=True)
class InlineFormat(TurnFormat):
    """A text stands as it is: nothing is put around it.

    Args:
        tokenizer: of the policy.
        split_special_tokens: special tokens that it writes are read as plain text; other tokens
            that were added to the tokenizer stay themselves.
    """

    tokenizer: PreTrainedTokenizerBase
    split_special_tokens: bool = True

    @cached_property
    def _split(self) -> list[str]:
        return special_token_texts(self.tokenizer) if self.split_special_tokens else []

    def encode(self, said: str | list[Message], ended: bool) -> list[int]:
        """See `TurnFormat.encode`."""
        require(
            isinstance(said, str),
            f"the environment answered with messages ({said!r:.60}), but episode.turn_format is "
            f"inline,"
            " where answers are texts. Set it to template.",
        )
        if any(special in said for special in self._split):
            return encode_as_plain_text(str(said), self.tokenizer)
        return list(self.tokenizer(said, add_special_tokens=False).input_ids)


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
        return apply_chat_template(messages, self.chat, self.tokenizer, add_generation_prompt=asks)

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
class TemplateFormat(TurnFormat):
    """Takes the tokens between turns from the chat template.

    A conversation with a mark in place of what the policy said is rendered. What follows the mark
    begins with an end token, which the tokenizer reads as one token wherever it stands; so the
    tokens after it are those of the whole conversation, whatever was said before.
    `verify_template` (in
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

    def encode(self, said: str | Messages, ended: bool) -> list[int]:
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
        kind = roles_of(heard)
        why = "" if kind in self.exact else self.refused.get(kind, UNKNOWN)
        require(not why, f"messages of role {', '.join(kind) or 'none'} between turns: {why}")
        # What looks like a special token, or like a mark of ours, is not for the template to see.
        marks = (
            placeholders_for(heard, self.format.tokenizer)
            if self.format.split_special_tokens
            else {}
        )
        text = self._from_end(insert_placeholders(heard, marks))  # type: ignore[arg-type]
        ids = encode_with_placeholders(text, marks, self.format.tokenizer)
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


def roles_of(messages: Messages) -> Kind:
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


THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "tool", "arguments": {"x": "1"}}\n</tool_call>'
MERGES = "merges tokens where a prompt meets a reply"
STOPS = ("refused", "wrong")
WRONG = (
    "in a longer conversation the chat template or the tokenizer writes them otherwise "
    "(conversation {name!r})"
)


def user(text: str) -> Messages:
    """A user message."""
    return [{"role": "user", "content": text}]


def results(*texts: str) -> Messages:
    """What tools answer, one after the other."""
    return [{"role": "tool", "name": "tool", "content": text} for text in texts]


@dataclass(frozen=True)
class ProbeConversation:
    """A conversation: a prompt, and turns of the policy, each answered.

    Args:
        prompt: messages before the first turn.
        turns: (what the policy says, what it hears).
    """

    prompt: Messages
    turns: tuple[tuple[str, Messages], ...]

    @property
    def heard(self) -> Messages:
        """What is heard last."""
        return self.turns[-1][1]


# Seams with spaces, line breaks and nothing; thoughts; calls; several results; later turns.
CASES = {
    "user": ProbeConversation(user("Guess"), (("I say 17", user("Too low, 17 > 3.\n")),)),
    "user, third turn": ProbeConversation(
        user("Guess"), (("a 1", user("lower")), ("b\n2 ", user("hi!")), (" 3\n\n", user(" no")))
    ),
    "user, thought": ProbeConversation(user("Guess"), ((f"{THOUGHT}I say 17", user("Too low")),)),
    "user, nothing said": ProbeConversation(user("Guess"), (("", user("Say something.")),)),
    "tool": ProbeConversation(user("6*7?"), ((CALL, results("42")),)),
    "tool, thought": ProbeConversation(user("6*7?"), ((f"{THOUGHT}{CALL}", results("42")),)),
    "tool, several": ProbeConversation(
        user("6*7?"), ((f"{CALL}\n{CALL}", results("42", " 43\n", "44")),)
    ),
    "tool, second turn": ProbeConversation(
        user("6*7?"), ((CALL, results("42")), (f"So. {CALL}", results("7")))
    ),
    "tool, empty": ProbeConversation(user(" 6*7?\n"), ((f" {CALL} \n", results("")),)),
    "tool, then user": ProbeConversation(
        user("6*7?"), ((CALL, [*results("42"), *user("Go on.")]),)
    ),
    "user, twice": ProbeConversation(user("Guess"), (("17", [*user("No."), *user("Lower.")]),)),
    "user after a tool": ProbeConversation(
        user("6*7?"), ((CALL, results("42")), ("It is 42.", user("Sure?")))
    ),
}


@dataclass(frozen=True)
class CaseResult:
    """What a case showed.

    Args:
        kind: roles of what is heard.
        refused: why the turn_format does not write it; "" if it does.
        wrong: the turn_format's tokens are others than the template's.
        differs: how the template would write what was said before, where otherwise; "" where the
            conversation is the same in every token.
    """

    kind: Kind
    refused: str = ""
    wrong: bool = False
    differs: str = ""

    @property
    def outcome(self) -> str:
        """`exact`, `tail exact`, `refused` or `wrong`."""
        named = {"wrong": self.wrong, "refused": self.refused, "tail exact": self.differs}
        return next((name for name, holds in named.items() if holds), "exact")


def check_cases(turn_format: TurnFormat, format_: ChatFormat) -> dict[str, CaseResult]:
    """What each conversation shows: {name of the case: verdict}.

    The tokens that the turn_format gives are compared with those of the template's own rendering
    of the
    whole conversation, from the end token of the last turn on. Where that is does not come from the
    turn_format: it is where two conversations agree up to their end that differ in the last turn.

    Args:
        turn_format: to be measured.
        format_: the chat format.
    """
    return {name: check_case(turn_format, format_, case) for name, case in CASES.items()}


def check_case(turn_format: TurnFormat, format_: ChatFormat, case: ProbeConversation) -> CaseResult:
    """What one conversation shows."""
    kind: Kind = ()
    heard: list[list[int]] = []
    try:
        for _, said in case.turns:
            kind = roles_of(format_.messages(said))
            heard.append(turn_format.encode(said, ended=False))
        own = own_tail(format_, case)
    except TEMPLATE_ERRORS as error:
        return CaseResult(kind, refused=reason(error))
    if heard[-1] != own or turn_format.encode(case.heard, ended=True) != own[1:]:
        return CaseResult(kind, wrong=True)
    return CaseResult(kind, differs=difference(format_, case, heard))


def kinds(format_: ChatFormat) -> list[Kind]:
    """What the cases hear: the roles of the messages, as the template is given them."""
    heard = [said for case in CASES.values() for _, said in case.turns]
    return [roles_of(format_.messages(said)) for said in heard]


def verify_template(format_: ChatFormat, *, tools: bool) -> TemplateFormat:
    """Build the turn format of a chat template and verify it on probe conversations.

    Logs once if the template renders earlier turns differently later on.

    Args:
        format_: the chat format.
        tools: tools will answer, not only users; messages that the template does not take and that
            need not come are refused when they come.

    Raises:
        ValueError: what will be heard cannot be written exactly.
    """
    found = check_cases(TemplateFormat(format_, frozenset(kinds(format_))), format_)
    hint = {True: "; for a template without a tool role set `model.episode.tool_role: user`"}
    refused = {
        each.kind: (each.refused or WRONG.format(name=name)) + hint.get("tool" in each.kind, "")
        for name, each in reversed(found.items())
        if each.outcome in STOPS
    }
    kind = roles_of(format_.messages(results("") if tools else user("")))
    require(
        kind not in refused,
        f"What is heard between turns cannot be written in the chat format: {refused.get(kind)}. "
        "Without chat format, `model.episode.turn_format: inline` takes texts as they are.",
    )
    changed = {each.differs: name for name, each in reversed(found.items())}
    changed = {way: name for way, name in changed.items() if way not in ("", MERGES)}
    if changed:
        ways = ", ".join(f"{way} (conversation {name!r})" for way, name in changed.items())
        rank_zero_info(
            f"The chat template would write what was said before otherwise: it {ways}. Rows keep "
            "the tokens that were sampled; serve the model with a template that keeps them, too, "
            "or give the template what it needs in `chat: {kwargs: ...}`."
        )
    return TemplateFormat(format_, frozenset({*kinds(format_)} - {*refused}), refused)


def count_mismatches(turn_format: TemplateFormat) -> int:
    """How many of the measured conversations go on with other tokens than the template's own.

    Those whose answers the turn_format refuses are not counted.
    """
    found = check_cases(turn_format, turn_format.format)
    return sum(each.outcome == "wrong" for each in found.values())


def chat_turn_format(
    style: PromptFormat,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    *,
    tool_role: str = "tool",
    tools: bool = False,
    split_special_tokens: bool = True,
) -> TemplateFormat:
    """The turn_format of a run whose prompts are in the chat format, measured.

    Args:
        style: of the prompts, with the tools that the chat format shows.
        tokenizer: of the policy.
        end_ids: tokens that end its turns.
        tool_role: the role that the template is given for `tool`.
        tools: tools will answer; those that are shown do.
        split_special_tokens: special tokens in what is heard are read as plain text.

    Raises:
        ValueError: prompts are plain texts, or see `verify_template`.
    """
    if not isinstance(style, ChatPromptFormat):
        raise ValueError(
            "episode.turn_format is template, but prompts are plain texts: say `data.chat: "
            "true`, or "
            "`model.episode.turn_format: inline`, where texts stand as they are."
        )
    chat = style.chat
    format_ = ChatFormat(tokenizer, chat, tuple(end_ids), tool_role, split_special_tokens)
    return verify_template(format_, tools=tools or bool(chat.tools))


# --- the template's own ---


def conversation(
    format_: ChatFormat, case: ProbeConversation, calls: bool = False, other: str = ""
) -> Messages:
    """All messages of a case as the template is given them.

    Args:
        format_: the chat format.
        case: the conversation.
        calls: what the policy says before a tool's result is given as calls, not as text.
        other: goes to the end of the last turn.
    """
    messages, last = [*case.prompt], len(case.turns) - 1
    for number, (said, heard) in enumerate(case.turns):
        ending, given = other * (number == last), format_.messages(heard)
        results_ = [each for each in given if each["role"] == "tool"] if calls else []
        called = [call(each, f"1{ending}") for each in results_]
        text: dict[str, Any] = {"role": "assistant", "content": f"{said}{ending}"}
        calling = {"role": "assistant", "content": "", "tool_calls": called}
        messages += [calling if called else text, *given]
    return messages


def own_tail(format_: ChatFormat, case: ProbeConversation) -> list[int]:
    """The tokens of the template's own rendering from the end of the last turn on.

    Raises:
        ValueError: the template leaves out what is heard, or writes no end token.
    """
    tools = "tool" in roles_of(format_.messages(case.heard))
    problems = []
    for calls in (True, False) if tools else (False, True):
        try:
            return _tail(format_, case, calls)
        except TEMPLATE_ERRORS as error:
            problems.append(reason(error))
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _tail(format_: ChatFormat, case: ProbeConversation, calls: bool) -> list[int]:
    texts = [format_.text(conversation(format_, case, calls, other)) for other in ("one", "two,")]
    require(texts[0] != texts[1], "the chat template leaves out what the policy says")
    backwards = zip(*(text[::-1] for text in texts), strict=False)
    alike = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], backwards))[::-1]
    ends = [alike.index(end) for end in format_.end_texts if end in alike]
    require(bool(ends), "the chat template writes no end token after a turn of the policy")
    tail, place = alike[min(ends) :], 0
    for each in format_.messages(case.heard):
        place = tail.find(each["content"].strip(), place)
        says = f"the chat template leaves out what messages of role {each['role']!r} say"
        require(place >= 0, says)
    # Whatever was said before: as many end tokens as the tail has are behind its first one.
    ids = format_.encode(format_.text(conversation(format_, case, calls)))
    behind = sum(token in format_.end_ids for token in format_.encode(tail))
    places = [number for number, token in enumerate(ids) if token in format_.end_ids]
    return ids[places[-behind] :]


def difference(format_: ChatFormat, case: ProbeConversation, heard: list[list[int]]) -> str:
    """How the template writes the whole conversation otherwise than it was played; "": the same.

    Args:
        format_: the chat format.
        case: the conversation.
        heard: the tokens after each turn of the policy.
    """
    try:
        whole = format_.text(conversation(format_, case))
    except TEMPLATE_ERRORS:
        return "takes calls only apart from the text"
    text = format_.text(case.prompt)
    played = format_.encode(text)
    for (said, _), ids in zip(case.turns, heard, strict=True):
        played += format_.encode(said) + ids
        text += said + str(format_.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    if played == format_.encode(whole):
        return ""
    more = whole.count("<think>") - text.count("<think>")
    ways = {
        "drops earlier thoughts": more < 0,
        "puts empty thoughts in": more > 0,
        MERGES: whole == text,
        "trims texts": "".join(whole.split()) == "".join(text.split()),
    }
    return next((way for way, holds in ways.items() if holds), "gives replies another form")
