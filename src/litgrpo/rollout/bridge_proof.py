"""Whether the tokens between turns are the chat template's own, measured on conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import require
from litgrpo.data.rendering import ChatStyle, Messages, PromptStyle
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.rollout.bridge import Bridge
from litgrpo.rollout.chat_bridge import (
    TEMPLATE_ERRORS,
    ChatFormat,
    Kind,
    Template,
    call,
    kind_of,
    reason,
)

if TYPE_CHECKING:  # slow to import; only named here
    from transformers import PreTrainedTokenizerBase

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
class Case:
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
    "user": Case(user("Guess"), (("I say 17", user("Too low, 17 > 3.\n")),)),
    "user, third turn": Case(
        user("Guess"), (("a 1", user("lower")), ("b\n2 ", user("hi!")), (" 3\n\n", user(" no")))
    ),
    "user, thought": Case(user("Guess"), ((f"{THOUGHT}I say 17", user("Too low")),)),
    "user, nothing said": Case(user("Guess"), (("", user("Say something.")),)),
    "tool": Case(user("6*7?"), ((CALL, results("42")),)),
    "tool, thought": Case(user("6*7?"), ((f"{THOUGHT}{CALL}", results("42")),)),
    "tool, several": Case(user("6*7?"), ((f"{CALL}\n{CALL}", results("42", " 43\n", "44")),)),
    "tool, second turn": Case(user("6*7?"), ((CALL, results("42")), (f"So. {CALL}", results("7")))),
    "tool, empty": Case(user(" 6*7?\n"), ((f" {CALL} \n", results("")),)),
    "tool, then user": Case(user("6*7?"), ((CALL, [*results("42"), *user("Go on.")]),)),
    "user, twice": Case(user("Guess"), (("17", [*user("No."), *user("Lower.")]),)),
    "user after a tool": Case(user("6*7?"), ((CALL, results("42")), ("It is 42.", user("Sure?")))),
}


@dataclass(frozen=True)
class Verdict:
    """What a case showed.

    Args:
        kind: roles of what is heard.
        refused: why the bridge does not write it; "" if it does.
        wrong: the bridge's tokens are others than the template's.
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


def verdicts(bridge: Bridge, format_: ChatFormat) -> dict[str, Verdict]:
    """What each conversation shows: {name of the case: verdict}.

    The tokens that the bridge gives are compared with those of the template's own rendering of the
    whole conversation, from the end token of the last turn on. Where that is does not come from the
    bridge: it is where two conversations agree up to their end that differ in the last turn.

    Args:
        bridge: to be measured.
        format_: the chat format.
    """
    return {name: verdict(bridge, format_, case) for name, case in CASES.items()}


def verdict(bridge: Bridge, format_: ChatFormat, case: Case) -> Verdict:
    """What one conversation shows."""
    kind: Kind = ()
    heard: list[list[int]] = []
    try:
        for _, said in case.turns:
            kind = kind_of(format_.messages(said))
            heard.append(bridge.ids(said, ended=False))
        own = own_tail(format_, case)
    except TEMPLATE_ERRORS as error:
        return Verdict(kind, refused=reason(error))
    if heard[-1] != own or bridge.ids(case.heard, ended=True) != own[1:]:
        return Verdict(kind, wrong=True)
    return Verdict(kind, differs=difference(format_, case, heard))


def kinds(format_: ChatFormat) -> list[Kind]:
    """What the cases hear: the roles of the messages, as the template is given them."""
    heard = [said for case in CASES.values() for _, said in case.turns]
    return [kind_of(format_.messages(said)) for said in heard]


def proved(format_: ChatFormat, *, tools: bool) -> Template:
    """The bridge of a chat template, measured; says once where the template writes history anew.

    Args:
        format_: the chat format.
        tools: tools will answer, not only users; messages that the template does not take and that
            need not come are refused when they come.

    Raises:
        ValueError: what will be heard cannot be written exactly.
    """
    found = verdicts(Template(format_, frozenset(kinds(format_))), format_)
    hint = {True: "; for a template without a tool role set `model.episode.tool_role: user`"}
    refused = {
        each.kind: (each.refused or WRONG.format(name=name)) + hint.get("tool" in each.kind, "")
        for name, each in reversed(found.items())
        if each.outcome in STOPS
    }
    kind = kind_of(format_.messages(results("") if tools else user("")))
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
    return Template(format_, frozenset({*kinds(format_)} - {*refused}), refused)


def wrong_conversations(bridge: Template) -> int:
    """How many of the measured conversations go on with other tokens than the template's own.

    Those whose answers the bridge refuses are not counted.
    """
    found = verdicts(bridge, bridge.format)
    return sum(each.outcome == "wrong" for each in found.values())


def template_bridge(
    style: PromptStyle,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    *,
    tool_role: str = "tool",
    tools: bool = False,
    split_special_tokens: bool = True,
) -> Template:
    """The bridge of a run whose prompts are in the chat format, measured.

    Args:
        style: of the prompts, with the tools that the chat format shows.
        tokenizer: of the policy.
        end_ids: tokens that end its turns.
        tool_role: the role that the template is given for `tool`.
        tools: tools will answer; those that are shown do.
        split_special_tokens: special tokens in what is heard are read as plain text.

    Raises:
        ValueError: prompts are plain texts, or see `proved`.
    """
    if not isinstance(style, ChatStyle):
        raise ValueError(
            "episode.turn_format is template, but prompts are plain texts: say `data.chat: "
            "true`, or "
            "`model.episode.turn_format: inline`, where texts stand as they are."
        )
    chat = style.chat
    format_ = ChatFormat(tokenizer, chat, tuple(end_ids), tool_role, split_special_tokens)
    return proved(format_, tools=tools or bool(chat.tools))


# --- the template's own ---


def conversation(format_: ChatFormat, case: Case, calls: bool = False, other: str = "") -> Messages:
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


def own_tail(format_: ChatFormat, case: Case) -> list[int]:
    """The tokens of the template's own rendering from the end of the last turn on.

    Raises:
        ValueError: the template leaves out what is heard, or writes no end token.
    """
    tools = "tool" in kind_of(format_.messages(case.heard))
    problems = []
    for calls in (True, False) if tools else (False, True):
        try:
            return _tail(format_, case, calls)
        except TEMPLATE_ERRORS as error:
            problems.append(reason(error))
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _tail(format_: ChatFormat, case: Case, calls: bool) -> list[int]:
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


def difference(format_: ChatFormat, case: Case, heard: list[list[int]]) -> str:
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
