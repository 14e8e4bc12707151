"""Conversations to imitate: what is learned are the assistant's turns with their end marks."""

from dataclasses import replace

import pytest
import torch
from transformers import AddedToken

from litgrpo.data.pairs import PairFormat, tokenize_pairs
from litgrpo.data.rendering import Chat, LengthLimit, TextTemplate, build_prompt_format
from litgrpo.data.sources import read_rows
from tests.support.models import byte_tokenizer
from tests.support.raises import raises_for

# As ChatML, with the end token as the mark of a turn's end.
FORMAT = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
LAST_ONLY = FORMAT.replace("{{ m.content }}", "{{ m.content if loop.last else '-' }}")
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ok"},
]


def pairs_of(
    row,
    *,
    turns="all",
    chat=True,
    form=FORMAT,
    limit=99,
    completion=None,
    tokenizer=None,
    encoder_decoder=False,
):
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = form
    style = replace(build_prompt_format(None, chat), encoder_decoder=encoder_decoder)
    pairs = tokenize_pairs(
        read_rows([row]),
        "train",
        pair_format=PairFormat(style, TextTemplate("completion", completion), turns),
        limit=LengthLimit("max_length", limit, "truncate"),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )
    batch = pairs[[0]]
    ids, mask = batch.input_ids[0], batch.loss_mask[0]
    edges = torch.diff(mask.int(), prepend=torch.tensor([0])).ne(0).cumsum(0)
    learned = [tokenizer.decode(ids[edges == n]) for n in range(1, int(edges.max()) + 1, 2)]
    return tokenizer.decode(ids), learned


def test_all_turns_of_the_assistant_are_learned_with_their_end_marks():
    whole, learned = pairs_of({"messages": TALK})
    assert whole == "u:hi<eos>\na:yo<eos>\nu:bye<eos>\na:ok<eos>"
    assert learned == ["yo<eos>", "ok<eos>"]


def test_only_the_last_turn_is_learned_where_that_is_asked():
    whole, learned = pairs_of({"messages": TALK}, turns="last")
    assert whole == "u:hi<eos>\na:yo<eos>\nu:bye<eos>\na:ok<eos>"
    assert learned == ["ok<eos>"]


def test_what_follows_the_last_answer_is_left_out():
    assert pairs_of({"messages": TALK[:3]})[0] == "u:hi<eos>\na:yo<eos>"


def test_prompt_and_completion_may_be_messages():
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert pairs_of(row)[1] == ["yo<eos>", "ok<eos>"]
    assert pairs_of({"prompt": "hi", "completion": TALK[1:2]})[1] == ["yo<eos>"]


def test_a_template_says_what_the_completion_is_instead_of_its_messages():
    row = {"prompt": "hi", "completion": TALK[1:2], "solution": "8"}
    whole, learned = pairs_of(row, completion="it is {{ solution }}")
    assert whole == "u:hi<eos>\na:it is 8<eos>"
    assert learned == ["it is 8<eos>"]


def test_a_system_message_stands_in_front():
    whole, _ = pairs_of({"messages": TALK[:2]}, chat=Chat(system="be brief"))
    assert whole == "s:be brief<eos>\nu:hi<eos>\na:yo<eos>"


def test_a_turn_without_a_mark_ends_with_the_end_token():
    whole, learned = pairs_of({"messages": TALK[:2]}, form=FORMAT.replace("<eos>", ""))
    assert (whole, learned) == ("u:hi\na:yo<eos>", ["yo<eos>"])


def test_a_conversation_that_is_cut_off_learns_what_is_left():
    with pytest.warns(UserWarning, match="truncated"):
        _, learned = pairs_of({"messages": TALK}, limit=9)
    assert learned == ["y"]


def test_a_chat_template_that_changes_earlier_turns_needs_train_on_turns_last():
    with raises_for("row 1", "train_on_turns: last"):
        pairs_of({"messages": TALK}, form=LAST_ONLY)


# GLM's: the mark of the next role ends a turn.
NEXT_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL = {"role": "tool", "content": "7"}


@pytest.mark.parametrize(
    ("messages", "spans"),
    [
        (TALK, ["yo<|user|>", "ok<eos>"]),
        ([*TALK[:2], TOOL, TALK[3]], ["yo<|tool|>", "ok<eos>"]),
        ([*TALK, TALK[0]], ["yo<|user|>", "ok<|user|>"]),
        ([TALK[0], TALK[1], TALK[3]], ["yo<|assistant|>ok<eos>"]),
        ([TALK[0], TALK[1] | {"content": "yo<eos>"}, *TALK[2:]], ["yo<eos>", "ok<eos>"]),
    ],
)
def test_the_mark_of_the_next_role_ends_a_turn_that_the_template_leaves_open(messages, spans):
    tokenizer = byte_tokenizer()
    marks = [f"<|{role}|>" for role in ("user", "assistant", "tool")]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks])
    for form in (NEXT_ROLE, NEXT_ROLE.replace("{{ m.content }}", "{{ m.content }}\n")):
        gap = "\n" if form != NEXT_ROLE else ""
        whole, learned = pairs_of({"messages": messages}, form=form, tokenizer=tokenizer)
        assert learned == [span.replace("<|", f"{gap}<|") for span in spans]
        # A mark is there once: the next turn does not repeat it.
        assert whole.count("<|assistant|>") == sum(m["role"] == "assistant" for m in messages)


def test_an_inner_turn_that_nothing_ends_is_an_error_and_the_last_one_gets_the_end_token():
    plain = FORMAT.replace("<eos>", "")
    with raises_for("row 1", "message 2", "train_on_turns: last"):
        pairs_of({"messages": TALK}, form=plain)
    assert pairs_of({"messages": TALK}, form=plain, turns="last")[1] == ["ok<eos>"]
    with raises_for("row 1", "message 2"):
        pairs_of(
            {"messages": [TALK[0], {"role": "assistant", "tool_calls": [{}]}, *TALK[1:]]},
            form=plain,
        )


def test_a_mark_of_plain_text_ends_a_turn():
    form = FORMAT.replace("<eos>", " ###")
    assert pairs_of({"messages": TALK}, form=form)[1] == ["yo ###", "ok ###<eos>"]


@pytest.mark.parametrize(
    "form", [FORMAT, FORMAT.replace("{{ m.role[0] }}", "{{ messages[-2].role }}")]
)
def test_a_conversation_that_begins_with_the_assistant_names_the_row_and_the_remedy(form):
    for row in ({"messages": TALK[1:]}, {"messages": TALK[1:2]}, {"messages": [TALK[1], *TALK]}):
        with raises_for("row 1", "begins with a message of the assistant", "weight: 0"):
            pairs_of(row, form=form)


def test_a_greeting_is_kept_without_training_on_it_or_answers_a_system_message():
    greeting = TALK[1] | {"weight": 0}
    whole, learned = pairs_of({"messages": [greeting, *TALK[2:]]})
    assert (whole, learned) == ("a:yo<eos>\nu:bye<eos>\na:ok<eos>", ["ok<eos>"])
    _, learned = pairs_of({"messages": TALK[1:]}, chat=Chat(system="be brief"))
    assert learned == ["yo<eos>", "ok<eos>"]
    assert pairs_of({"messages": TALK[1:]}, turns="last")[1] == ["ok<eos>"]


def test_an_error_of_the_template_names_the_row_and_gives_no_other_advice():
    alternate = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    with raises_for("row 1", "user first") as error:
        pairs_of({"messages": [TALK[1] | {"weight": 0}, *TALK]}, form=alternate + FORMAT)
    assert "system" not in str(error.value)


SKIPS = [
    *({name: 0} for name in ("weight", "loss", "loss_mask", "loss_scale", "loss_weight")),
    *({name: False} for name in ("train", "training", "train_on", "train_on_turn", "trainable")),
    {"weight": 0.0},
    {"masked": True},
    {"masked": True, "weight": 0},
]


@pytest.mark.parametrize("mark", SKIPS, ids=str)
def test_a_turn_that_is_marked_as_not_to_be_trained_on_is_read_and_not_learned(mark):
    talk = [TALK[0], TALK[1] | mark, *TALK[2:]]
    for row in ({"messages": talk}, {"prompt": talk[:3], "completion": talk[3:]}):
        whole, learned = pairs_of(row)
        assert (whole, learned) == ("u:hi<eos>\na:yo<eos>\nu:bye<eos>\na:ok<eos>", ["ok<eos>"])
    # The last turn, in ShareGPT's fields; what is behind the last answer is left out.
    last = {"from": "gpt", "value": "ok"} | mark
    for turns in ("all", "last"):
        assert pairs_of({"messages": [*TALK[:3], last]}, turns=turns)[1] == ["yo<eos>"]
    with raises_for("row 1", "nothing to learn"):
        pairs_of({"messages": [TALK[0], last]})


def test_a_completion_without_chat_format_obeys_the_marks():
    row = {"prompt": "hi", "completion": [TALK[1] | {"weight": 0}, TOOL, TALK[3]]}
    assert pairs_of(row, chat=False) == ("<bos>hiyo7ok<eos>", ["ok<eos>"])
    both = {"prompt": "hi", "completion": [TALK[1], TOOL, TALK[3]]}
    assert pairs_of(both, chat=False)[1] == ["yo", "ok<eos>"]
    assert pairs_of(both, chat=False, turns="last")[1] == ["ok<eos>"]
    with raises_for("row 1", "last message", "trained"):
        pairs_of({"prompt": "hi", "completion": [TALK[1], TALK[3] | {"train": False}]}, chat=False)


def test_marks_that_say_train_change_nothing():
    marks = ({"weight": 0}, {"weight": 1}, {"loss": False}, {"masked": False, "train": True})
    talk = [each | mark for each, mark in zip(TALK, marks, strict=True)]
    assert pairs_of({"messages": talk}) == pairs_of({"messages": TALK})


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ({"weight": 0.5}, ("weight is 0.5", "0 or 1")),
        ({"train": "false"}, ("train is 'false'", "0 or 1")),
        ({"weight": 1, "train": False}, ("contradict",)),
        ({"mask": True}, ("'mask'", "weight: 0")),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
            ("'train_detail'",),
        ),
        ({"skip": 1}, ("'skip'",)),
        ({"images": ["a.png"]}, ("'images'",)),
        ({"content": [{"type": "text", "text": "yo", "train": False}]}, ("'train'", "weight: 0")),
        ({"content": [{"text": "yo", "masked": True}]}, ("'masked'", "weight: 0")),
        ({"metadata": {"weight": 0}}, ("metadata", "weight")),
    ],
    ids=str,
)
def test_fields_of_a_message_that_may_change_its_meaning_are_rejected(field, keys):
    talk = [TALK[0], TALK[1] | field]
    with raises_for("row 1", *keys):
        pairs_of({"messages": talk})
    with raises_for("row 1", *keys):
        pairs_of({"prompt": "hi", "completion": talk[1:]}, chat=False)


def test_a_user_cannot_be_trained_and_a_mask_of_the_whole_row_is_rejected():
    with raises_for("row 1", "message 1", "'user'"):
        pairs_of({"messages": [TALK[0] | {"train": True}, TALK[1]]})
    with raises_for("row 1", "loss_mask", "weight: 0"):
        pairs_of({"messages": TALK, "loss_mask": [0, 1, 0, 0]})


def test_fields_that_change_nothing_or_that_the_template_reads_are_accepted():
    fields = {"name": "Ann", "id": 3, "reasoning_content": "", "timestamp": "now", "images": []}
    assert pairs_of({"messages": [each | fields for each in TALK]}) == pairs_of({"messages": TALK})
    form = FORMAT.replace("{{ m.content }}", "{{ m.content }}{{ m.mood }}")
    talk = [TALK[0], TALK[1] | {"mood": "!"}]
    assert pairs_of({"messages": talk}, form=form)[1] == ["yo!<eos>"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": [*TALK[:2], TOOL, TALK[3]]},
        {"prompt": "hi", "completion": [TALK[1], TOOL, TALK[3]]},
    ],
)
def test_several_answers_of_an_encoder_decoder_model_are_rejected(row):
    chat = "messages" in row
    with raises_for("row 1", "encoder-decoder"):
        pairs_of(row, encoder_decoder=True, chat=chat)
    if chat:
        assert pairs_of(row, encoder_decoder=True, turns="last")[1] == ["ok<eos>"]


def test_a_text_is_no_conversation():
    with raises_for("row 1", "messages", "hi"):
        pairs_of({"messages": "hi"})
