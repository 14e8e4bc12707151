"""The bridge is the template's own: bugs that others had are planted, and found."""

from dataclasses import dataclass

import pytest

from litgrpo.data.rendering import Chat, prompt_style
from litgrpo.rollout.turn_format import (
    CASES,
    Bridge,
    ChatFormat,
    Template,
    difference,
    kinds,
    proved,
    template_bridge,
    verdicts,
    wrong_conversations,
)
from tests.rollout.chat_templates import (
    COUNTS,
    FORGETS,
    GEMMA,
    IMAGES,
    LLAMA,
    NEXT_ROLE,
    QWEN,
    chat_format,
    merging_tokenizer,
    spacing_tokenizer,
)

TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {}}}]
FORMATS = {
    "qwen": chat_format(QWEN),
    "qwen, tools": chat_format(QWEN, chat=Chat(tools=TOOLS)),
    "forgets": chat_format(FORGETS),
    "llama": chat_format(LLAMA, "<|eot_id|>"),
    "gemma": chat_format(GEMMA, "<end_of_turn>", tool_role="user"),
    "next role": chat_format(NEXT_ROLE, "<|user|>", "<|tool|>"),
}


def outcomes(made: Bridge, format_: ChatFormat) -> dict[str, str]:
    return {name: each.outcome for name, each in verdicts(made, format_).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_what_stands_between_turns_is_the_template_s_own(name):
    format_ = FORMATS[name]
    found = verdicts(Template(format_, frozenset(kinds(format_))), format_)
    assert {each.outcome for each in found.values()} <= {"exact", "tail exact"}
    assert len(found) == len(CASES) >= 5


def test_how_a_template_writes_history_anew_is_named():
    ways = {
        name: {each.differs for each in verdicts(bridge_of(format_), format_).values()}
        for name, format_ in FORMATS.items()
    }
    assert "drops earlier thoughts" in ways["forgets"]
    assert "drops earlier thoughts" not in ways["qwen"]
    assert "trims texts" in ways["llama"]
    assert "merges tokens where a prompt meets a reply" in ways["qwen"]
    assert ways["qwen"] <= {"", "merges tokens where a prompt meets a reply"}


def test_a_history_without_seams_is_the_same_in_every_token():
    format_ = FORMATS["qwen"]
    case = CASES["user"]
    heard = [bridge_of(format_).ids(said, ended=False) for _, said in case.turns]
    assert difference(format_, case, heard) in ("", "merges tokens where a prompt meets a reply")
    assert outcomes(bridge_of(format_), format_)["tool"] == "exact"


def bridge_of(format_: ChatFormat) -> Template:
    return Template(format_, frozenset(kinds(format_)))


# --- what went wrong elsewhere ---


@dataclass(frozen=True)
class Planted(Bridge):
    """A bridge with a bug."""

    right: Template

    @property
    def format(self) -> ChatFormat:
        return self.right.format


class LosesTheLineBreak(Planted):
    """B10: the line break after the end token is lost between turns."""

    def ids(self, said, ended):
        end, *rest = self.right.ids(said, ended=False)
        line = self.format.encode("\n")
        rest = rest[len(line) :] if rest[: len(line)] == line else rest
        return rest if ended else [end, *rest]


class CountsEncodedHistory(Planted):
    """B1: what was said is encoded again, and its length cuts the conversation."""

    said = "\nno"

    def ids(self, said, ended):
        format_ = self.format
        prompt = [{"role": "user", "content": "?"}]
        asked = format_.text(prompt)
        talk = [*prompt, {"role": "assistant", "content": self.said}, *format_.messages(said)]
        sampled = format_.encode(asked) + format_.encode(self.said)
        return format_.encode(format_.text(talk))[len(sampled) + ended :]


class CountsThoughts(CountsEncodedHistory):
    """B9: the same where the template drops the thoughts that were counted."""

    said = "<think>\nhm\n</think>\n\nNo."


class MatchesTheShorterPrefix(Planted):
    """B11: of two places where a turn may have ended, the wrong one is taken."""

    def ids(self, said, ended):
        ids = self.right.ids(said, ended=False)
        last = [n for n, token in enumerate(ids) if token in self.format.end_ids]
        earlier = last[-2:-1] or last  # the end token before the last one
        return ids[earlier[0] + ended :]


class SaysTheEndTwice(Planted):
    """The end token that was sampled comes again."""

    def ids(self, said, ended):
        return self.right.ids(said, ended=False)


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        (LosesTheLineBreak, "qwen"),
        (CountsEncodedHistory, "qwen"),
        (CountsThoughts, "forgets"),
        (MatchesTheShorterPrefix, "llama"),
        (SaysTheEndTwice, "gemma"),
    ],
)
def test_a_planted_bug_is_found(planted, name):
    format_ = FORMATS[name]
    assert "wrong" not in outcomes(bridge_of(format_), format_).values()
    assert "wrong" in outcomes(planted(bridge_of(format_)), format_).values()


def test_wrong_conversations_are_counted_and_refused_ones_are_not():
    class Forgetful(Template):
        def ids(self, said, ended):
            return super().ids(said, ended)[:-1]

    assert wrong_conversations(proved(FORMATS["qwen"], tools=True)) == 0
    refusing = proved(chat_format(GEMMA, "<end_of_turn>"), tools=False)
    assert wrong_conversations(refusing) == 0
    right = bridge_of(FORMATS["qwen"])
    assert wrong_conversations(Forgetful(right.format, right.exact)) == len(CASES)


# --- the start of a run ---


def test_a_template_without_a_tool_role_is_refused_for_tools_alone():
    format_ = chat_format(GEMMA, "<end_of_turn>")
    with pytest.raises(ValueError, match=r"roles must alternate.*tool_role: user"):
        proved(format_, tools=True)
    made = proved(format_, tools=False)
    assert made.ids("hi", ended=True)
    with pytest.raises(
        ValueError, match=r"role tool between turns: the chat template says.*tool_role"
    ):
        made.ids([{"role": "tool", "content": "42"}], ended=True)


@pytest.mark.parametrize(
    ("format_", "why"),
    [
        (chat_format(IMAGES), "made for images"),
        (chat_format(QWEN, "<|eot_id|>"), "stop_token_ids"),
        (chat_format(COUNTS), "in a longer conversation .*'tool, second turn'"),
        (
            chat_format(QWEN.replace("\n{{ m.content }}\n</tool", "\n</tool")),
            "leaves out what mess",
        ),
    ],
)
def test_what_cannot_be_exact_stops_a_run_in_one_sentence(format_, why):
    with pytest.raises(ValueError, match=why) as refused:
        proved(format_, tools=True)
    assert "\n" not in str(refused.value)
    assert "turn_format: inline" in str(refused.value)


def test_a_tokenizer_that_puts_a_space_in_front_of_every_text_is_read_as_in_a_conversation():
    class EncodesTheRestAlone(Planted):
        def ids(self, said, ended):
            end, *rest = self.right.ids(said, ended=False)
            alone = self.format.encode(self.format.tokenizer.decode(rest))
            return alone if ended else [end, *alone]

    tokenizer = spacing_tokenizer(NEXT_ROLE)
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"]))
    format_ = ChatFormat(tokenizer, Chat(), ends)
    assert set(outcomes(bridge_of(format_), format_).values()) <= {"exact", "tail exact"}
    assert "wrong" in outcomes(EncodesTheRestAlone(bridge_of(format_)), format_).values()


def test_a_history_that_would_be_written_anew_is_told_once(caplog):
    with caplog.at_level("INFO", logger="litgrpo"):
        proved(FORMATS["forgets"], tools=False)
    (line,) = [record.message for record in caplog.records]
    assert "it drops earlier thoughts (conversation 'user, thought'). Rows" in line
    assert "merges" not in line  # those are the tokens that were sampled


def test_prompts_in_plain_text_have_no_turns_in_a_chat_format():
    tokenizer = merging_tokenizer(QWEN)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    with pytest.raises(
        ValueError, match=r"`data.chat: true`, or `model.episode.turn_format: inline`"
    ):
        template_bridge(prompt_style(None, False), tokenizer, ends)
    style = prompt_style(None, Chat(tools=TOOLS))
    assert template_bridge(style, tokenizer, ends).format.split_special_tokens
    made = template_bridge(style, tokenizer, ends, split_special_tokens=False)
    assert not made.format.split_special_tokens
    assert made.format.chat.tools == TOOLS
    gemma = chat_format(GEMMA, "<end_of_turn>")
    chats = prompt_style(None, True)
    with pytest.raises(ValueError, match="tool_role: user"):
        template_bridge(chats, gemma.tokenizer, gemma.end_ids, tools=True)
