"""Turn formats of chat templates give the template's own tokens; seeded bugs are found."""

from dataclasses import dataclass

import pytest

from litgrpo.data.rendering import Chat, build_prompt_format
from litgrpo.rollout.chat_format import ChatFormat, collapse_roles
from litgrpo.rollout.template_checks import example_messages, find_mismatch
from litgrpo.rollout.turn_format import TemplateFormat, TurnFormat, build_template_format
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
ROLES = (
    *(("user",), ("user", "user")),
    *(("tool",), ("tool", "tool"), ("tool", "user"), ("tool", "tool", "user")),
)


def examples(format_: ChatFormat) -> list:
    """Messages of all roles that an observation may have."""
    if format_.tool_role == "user":
        results = [{"role": "tool", "content": "42"}, {"role": "tool", "content": "43"}]
        return [example_messages(("user",), "user"), results]
    return [example_messages(roles, "tool") for roles in ROLES]


def count_mismatches(made: TurnFormat, format_: ChatFormat) -> int:
    """Number of the examples that a turn format encodes otherwise than the template."""
    found = 0
    for messages in examples(format_):
        ids = made.encode(messages, turn_has_end=False)
        without_end = made.encode(messages, turn_has_end=True)
        found += bool(find_mismatch(format_, messages, ids)) or without_end != ids[1:]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_between_turns_equal_the_template(name):
    assert count_mismatches(TemplateFormat(FORMATS[name]), FORMATS[name]) == 0


def test_examples_have_the_roles_that_they_stand_for():
    for roles in ROLES:
        assert collapse_roles(example_messages(roles, "tool")) == roles


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
    correct = TemplateFormat(FORMATS[name])
    assert count_mismatches(bug(correct), FORMATS[name]) > 0


def test_a_turn_format_that_loses_a_token_raises_before_training_and_when_it_encodes():
    class Forgetful(TemplateFormat):
        def _encode_from_end(self, messages):
            end, _, *rest = super()._encode_from_end(messages)
            return [end, *rest]

    with raises_for("one turn", "model.episode.turn_format: inline"):
        Forgetful(FORMATS["qwen"]).check(tools=True)
    with raises_for("role user", "one turn"):
        Forgetful(FORMATS["qwen"]).encode("hi", turn_has_end=True)


# --- the start of a run ---


def test_a_template_without_a_tool_role_is_rejected_only_if_tools_answer():
    made = TemplateFormat(chat_format(GEMMA, "<end_of_turn>"))
    with raises_for("roles must alternate", "model.episode.tool_role: user"):
        made.check(tools=True)
    made.check(tools=False)
    assert made.encode("hi", turn_has_end=True)
    with raises_for("role tool", "model.episode.tool_role"):
        made.encode([{"role": "tool", "content": "42"}], turn_has_end=True)


@pytest.mark.parametrize(
    ("format_", "named"),
    [
        (chat_format(IMAGES), "images"),
        (chat_format(QWEN, "<|eot_id|>"), "stop_token_ids"),
        (chat_format(COUNTS), "a later turn"),
        (
            chat_format(QWEN.replace("\n{{ m.content }}\n</tool", "\n</tool")),
            "leaves out messages",
        ),
    ],
)
def test_a_template_that_cannot_be_exact_raises_one_line(format_, named):
    with raises_for(named, "model.episode.turn_format: inline") as raised:
        TemplateFormat(format_).check(tools=True)
    assert "\n" not in str(raised.value)


def test_roles_that_are_exact_in_one_turn_only_are_rejected_at_their_first_use():
    several = QWEN.replace(
        "{{ '\n' }}<tool", "{{ '\n' if loop.index0 < 3 or messages|length < 6 else '!' }}<tool"
    )
    made = TemplateFormat(chat_format(several))
    with raises_for("role tool, tool", "a later turn"):
        made.encode([{"role": "tool", "content": str(n)} for n in range(3)], turn_has_end=True)


def test_a_tokenizer_that_prepends_a_space_matches_the_whole_conversation():
    class EncodesTheRestAlone(SeededBug):
        def encode(self, observation, turn_has_end):
            end, *rest = self.correct.encode(observation, turn_has_end=False)
            alone = self.chat_format.encode(self.chat_format.tokenizer.decode(rest))
            return alone if turn_has_end else [end, *alone]

    tokenizer = spacing_tokenizer(NEXT_ROLE)
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"]))
    format_ = ChatFormat(tokenizer, Chat(), ends)
    assert count_mismatches(TemplateFormat(format_), format_) == 0
    assert count_mismatches(EncodesTheRestAlone(TemplateFormat(format_)), format_) > 0


def test_a_changed_history_is_logged_once(caplog):
    with caplog.at_level("INFO", logger="litgrpo"):
        TemplateFormat(FORMATS["forgets"]).check(tools=False)
        TemplateFormat(FORMATS["qwen"]).check(tools=False)
    (line,) = [record.message for record in caplog.records]
    assert "writes 'I say 17<|im_end|>" in line  # without the thought
    assert "generated '<think>" in line


def test_texts_that_a_template_trims_and_calls_that_it_takes_apart_are_logged(caplog):
    apart = QWEN.replace(
        "{% if m.role == 'tool' %}",
        "{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}",
        1,
    )
    for format_, said in (
        (FORMATS["llama"], "generated ' I say 17"),
        (chat_format(apart), "it takes calls only apart from the text"),
    ):
        caplog.clear()
        with caplog.at_level("INFO", logger="litgrpo"):
            TemplateFormat(format_).check(tools=format_ is not FORMATS["llama"])
        (line,) = [record.message for record in caplog.records]
        assert said in line


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
