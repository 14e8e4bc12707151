"""Turn formats of chat templates give the template's own tokens; seeded bugs are found."""

from dataclasses import dataclass

import pytest

from litgrpo.data.rendering import Chat, build_prompt_format
from litgrpo.rollout.template_probes import (
    MERGES,
    PROBES,
    build_template_format,
    count_mismatches,
    describe_history_change,
    list_probe_roles,
    run_probes,
    verify_template,
)
from litgrpo.rollout.turn_format import ChatFormat, TemplateFormat, TurnFormat
from tests.support.chat_templates import (
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
from tests.support.raises import raises_for

TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {}}}]
FORMATS = {
    "qwen": chat_format(QWEN),
    "qwen, tools": chat_format(QWEN, chat=Chat(tools=TOOLS)),
    "forgets": chat_format(FORGETS),
    "llama": chat_format(LLAMA, "<|eot_id|>"),
    "gemma": chat_format(GEMMA, "<end_of_turn>", tool_role="user"),
    "next role": chat_format(NEXT_ROLE, "<|user|>", "<|tool|>"),
}


def outcomes(made: TurnFormat, format_: ChatFormat) -> dict[str, str]:
    return {name: each.outcome for name, each in run_probes(made, format_).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_between_turns_equal_the_template(name):
    format_ = FORMATS[name]
    found = run_probes(TemplateFormat(format_, frozenset(list_probe_roles(format_))), format_)
    assert {each.outcome for each in found.values()} <= {"exact", "tail exact"}
    assert len(found) == len(PROBES) >= 5


def test_changes_of_earlier_messages_are_described():
    ways = {
        name: {each.history_change for each in run_probes(build_format(format_), format_).values()}
        for name, format_ in FORMATS.items()
    }
    assert "drops earlier thoughts" in ways["forgets"]
    assert "drops earlier thoughts" not in ways["qwen"]
    assert "trims texts" in ways["llama"]
    assert MERGES in ways["qwen"]
    assert ways["qwen"] <= {"", MERGES}


def test_a_conversation_without_merged_boundaries_equals_the_template_in_every_token():
    format_ = FORMATS["qwen"]
    case = PROBES["user"]
    made = build_format(format_)
    observations = [made.encode(each, turn_has_end=False) for _, each in case.turns]
    assert describe_history_change(format_, case, observations) in ("", MERGES)
    assert outcomes(build_format(format_), format_)["tool"] == "exact"


def build_format(format_: ChatFormat) -> TemplateFormat:
    return TemplateFormat(format_, frozenset(list_probe_roles(format_)))


# --- seeded bugs: each was found in another trainer ---


@dataclass(frozen=True)
class SeededBug(TurnFormat):
    """A turn format with a bug."""

    correct: TemplateFormat

    @property
    def chat_format(self) -> ChatFormat:
        return self.correct.chat_format


class DropsTheLineBreak(SeededBug):
    """B10: the line break after the end token is lost between turns."""

    def encode(self, observation, turn_has_end):
        end, *rest = self.correct.encode(observation, turn_has_end=False)
        line = self.chat_format.encode("\n")
        rest = rest[len(line) :] if rest[: len(line)] == line else rest
        return rest if turn_has_end else [end, *rest]


class CountsEncodedHistory(SeededBug):
    """B1: the reply is encoded again, and its length cuts the conversation."""

    reply = "\nno"

    def encode(self, observation, turn_has_end):
        format_ = self.chat_format
        prompt = [{"role": "user", "content": "?"}]
        asked = format_.render(prompt)
        talk = [
            *prompt,
            {"role": "assistant", "content": self.reply},
            *format_.to_messages(observation),
        ]
        sampled = format_.encode(asked) + format_.encode(self.reply)
        return format_.encode(format_.render(talk))[len(sampled) + turn_has_end :]


class CountsThoughts(CountsEncodedHistory):
    """B9: the same with a template that drops the thoughts that were counted."""

    reply = "<think>\nhm\n</think>\n\nNo."


class CutsAtTheEarlierEnd(SeededBug):
    """B11: the row is cut at the end token before the last one."""

    def encode(self, observation, turn_has_end):
        ids = self.correct.encode(observation, turn_has_end=False)
        last = [n for n, token in enumerate(ids) if token in self.chat_format.end_ids]
        earlier = last[-2:-1] or last  # the end token before the last one
        return ids[earlier[0] + turn_has_end :]


class RepeatsTheEndToken(SeededBug):
    """The end token that was sampled is added again."""

    def encode(self, observation, turn_has_end):
        return self.correct.encode(observation, turn_has_end=False)


@pytest.mark.parametrize(
    ("bug", "name"),
    [
        (DropsTheLineBreak, "qwen"),
        (CountsEncodedHistory, "qwen"),
        (CountsThoughts, "forgets"),
        (CutsAtTheEarlierEnd, "llama"),
        (RepeatsTheEndToken, "gemma"),
    ],
)
def test_seeded_bugs_are_found(bug, name):
    format_ = FORMATS[name]
    assert "mismatch" not in outcomes(build_format(format_), format_).values()
    assert "mismatch" in outcomes(bug(build_format(format_)), format_).values()


def test_mismatches_are_counted_and_rejected_conversations_are_not():
    class Forgetful(TemplateFormat):
        def encode(self, observation, turn_has_end):
            return super().encode(observation, turn_has_end)[:-1]

    assert count_mismatches(verify_template(FORMATS["qwen"], tools=True)) == 0
    rejecting = verify_template(chat_format(GEMMA, "<end_of_turn>"), tools=False)
    assert count_mismatches(rejecting) == 0
    correct = build_format(FORMATS["qwen"])
    assert count_mismatches(Forgetful(correct.chat_format, correct.verified)) == len(PROBES)


# --- the start of a run ---


def test_a_template_without_a_tool_role_is_rejected_only_if_tools_answer():
    format_ = chat_format(GEMMA, "<end_of_turn>")
    with raises_for("roles must alternate", "model.episode.tool_role: user"):
        verify_template(format_, tools=True)
    made = verify_template(format_, tools=False)
    assert made.encode("hi", turn_has_end=True)
    with raises_for("role tool", "model.episode.tool_role"):
        made.encode([{"role": "tool", "content": "42"}], turn_has_end=True)


@pytest.mark.parametrize(
    ("format_", "named"),
    [
        (chat_format(IMAGES), "images"),
        (chat_format(QWEN, "<|eot_id|>"), "stop_token_ids"),
        (chat_format(COUNTS), "'tool, second turn'"),
        (
            chat_format(QWEN.replace("\n{{ m.content }}\n</tool", "\n</tool")),
            "leaves out messages",
        ),
    ],
)
def test_a_template_that_cannot_be_exact_raises_one_line(format_, named):
    with raises_for(named, "model.episode.turn_format: inline") as raised:
        verify_template(format_, tools=True)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_prepends_a_space_matches_the_whole_conversation():
    class EncodesTheRestAlone(SeededBug):
        def encode(self, observation, turn_has_end):
            end, *rest = self.correct.encode(observation, turn_has_end=False)
            alone = self.chat_format.encode(self.chat_format.tokenizer.decode(rest))
            return alone if turn_has_end else [end, *alone]

    tokenizer = spacing_tokenizer(NEXT_ROLE)
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"]))
    format_ = ChatFormat(tokenizer, Chat(), ends)
    assert set(outcomes(build_format(format_), format_).values()) <= {"exact", "tail exact"}
    assert "mismatch" in outcomes(EncodesTheRestAlone(build_format(format_)), format_).values()


def test_a_changed_history_is_logged_once(caplog):
    with caplog.at_level("INFO", logger="litgrpo"):
        verify_template(FORMATS["forgets"], tools=False)
    (line,) = [record.message for record in caplog.records]
    assert "it drops earlier thoughts (conversation 'user, thought')." in line
    assert "merges" not in line  # those are the tokens that were sampled


def test_the_template_format_requires_prompts_in_a_chat_format():
    tokenizer = merging_tokenizer(QWEN)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    with raises_for("model.episode.turn_format", "data.chat: true"):
        build_template_format(build_prompt_format(None, False), tokenizer, ends)
    style = build_prompt_format(None, Chat(tools=TOOLS))
    assert build_template_format(style, tokenizer, ends).chat_format.split_special_tokens
    made = build_template_format(style, tokenizer, ends, split_special_tokens=False)
    assert not made.chat_format.split_special_tokens
    assert made.chat_format.chat.tools == TOOLS
    gemma = chat_format(GEMMA, "<end_of_turn>")
    chats = build_prompt_format(None, True)
    with raises_for("tool_role: user"):
        build_template_format(chats, gemma.tokenizer, gemma.end_ids, tools=True)
