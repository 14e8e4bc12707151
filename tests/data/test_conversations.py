"""Conversations to imitate: what is learned are the assistant's turns with their end marks."""

import pytest
import torch

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


def pairs_of(row, *, turns="all", chat=True, form=FORMAT, limit=99, completion=None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = form
    pairs = tokenize_pairs(
        read_rows([row]),
        "train",
        pair_format=PairFormat(
            build_prompt_format(None, chat), TextTemplate("completion", completion), turns
        ),
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


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"messages": TALK[:1]}, ("row 1", "assistant")),
        ({"messages": "hi"}, ("row 1", "messages", "hi")),
        ({"messages": [{"role": "user"}]}, ("row 1", "message 1", "content")),
    ],
)
def test_rows_that_are_not_conversations_are_rejected(row, keys):
    with raises_for(*keys):
        pairs_of(row)
