"""Messages of other shapes, prompts that contain their answer, system messages."""

import json

import pytest

from litgrpo.data.messages import read_messages
from litgrpo.data.pairs import PairFormat, tokenize_pairs
from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import Chat, LengthLimit, TextTemplate, build_prompt_format
from litgrpo.data.sources import read_rows
from tests.support.models import byte_tokenizer
from tests.support.raises import raises_for

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function | tojson }}){% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = [{"role": "user", "content": "1+1?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "x"}}}
SHAPES = {
    "plain": ASKED,
    "a tuple": tuple(ASKED),
    "a message alone": ASKED[0],
    "sharegpt": [{"from": "human", "value": "1+1?"}],
    "langchain": [{"role": "human", "content": "1+1?"}],
    "a capital": [{"role": "User", "content": "1+1?"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}],
    "several parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}],
        }
    ],
    "parts of arrow": [
        {"role": "user", "content": [{"type": "text", "text": "1+1?", "image_url": None}]}
    ],
    "null fields": [{"role": "user", "content": "1+1?", "tool_calls": None, "name": None}],
    "columns": {"role": ["user"], "content": ["1+1?"]},
    "json": json.dumps(ASKED),
}
BROKEN = {
    "no role": ([{"content": "a"}], "message 1: has no role"),
    "an empty role": ([{"role": " ", "content": "a"}], "message 1: has no role"),
    "a role of another type": ([{"role": 3, "content": "a"}], "message 1: has no role"),
    "no content": ([*ASKED, {"role": "user"}], "message 2: has no content"),
    "null content": ([{"role": "user", "content": None}], "message 1: has no content"),
    "a number": ([{"role": "user", "content": 5}], "message 1: content is 5 (an int)"),
    "texts": (["1+1?"], "messages are ['1+1?']; expected"),
    "a list of lists": ([["user", "1+1?"]], "messages are"),
    "a text among messages": ([*ASKED, "more"], "messages are"),
    "content of texts": ([{"role": "user", "content": ["a"]}], "message 1: content is ['a']"),
    "a part with a number": (
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "message 1: content has a part of type 'text' ({'type': 'text', 'text': 5})",
    ),
    "no parts": ([{"role": "user", "content": []}], "message 1: content is []"),
    "an image": (
        [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
        "message 1: content has a part of type 'image'",
    ),
    "text and image": (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {}}],
            }
        ],
        "part of type 'image_url'",
    ),
}


def prompts_of(rows, chat=True, columns=None):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return PromptSet(
        read_rows(rows),
        "train",
        prompt_format=build_prompt_format(None, chat),
        limit=LengthLimit("max_prompt_length", 999, "drop"),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )


def text_of_pair(row, chat=True):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    pairs = tokenize_pairs(
        read_rows([row]),
        "train",
        pair_format=PairFormat(build_prompt_format(None, chat), TextTemplate("completion")),
        limit=LengthLimit("max_length", 999, "drop"),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )
    return tokenizer.decode(pairs.ids[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_of_natural_shapes_give_the_same_prompt_and_the_same_conversation(shape):
    given = SHAPES[shape]
    prompts = prompts_of([{"prompt": given}])
    assert prompts.texts == ["user:1+1?<eos>\nassistant:"]
    assert prompts.columns["conversation"] == [ASKED]
    answer = [{"from": "gpt", "value": "2"}]
    if isinstance(given, list):
        text = text_of_pair({"messages": [*given, *answer]})
        assert text == "user:1+1?<eos>\nassistant:2<eos>"
    text = text_of_pair({"prompt": given, "completion": answer})
    assert text == "user:1+1?<eos>\nassistant:2<eos>"


@pytest.mark.parametrize("shape", BROKEN)
def test_messages_of_other_shapes_are_one_sentence_with_the_row(tmp_path, shape):
    given, problem = BROKEN[shape]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps({"prompt": given}) + "\n")
    with raises_for(f"{path}, line 2", problem):
        prompts_of(str(path))
    with raises_for("row 1", problem):
        text_of_pair({"messages": given})


def test_a_message_that_only_calls_a_tool_needs_no_content():
    result = {"role": "tool", "content": "2"}
    for call in (
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ):
        (text,) = prompts_of([{"prompt": [*ASKED, call, result]}]).texts
        assert 'assistant:({"name": "add", "arguments": {"a": "x"}})<eos>\ntool:2<eos>' in text


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "2"},
        {"role": "Assistant", "content": "2"},
        {"role": "model", "content": "2"},
        {"from": "gpt", "value": "2"},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "tool_calls": [CALL]},
    ],
)
def test_a_prompt_that_ends_with_the_assistants_message_is_an_error(answer):
    with raises_for("row 2", "ends with a message of the assistant", "continue_final_message"):
        prompts_of([{"prompt": ASKED}, {"prompt": [*ASKED, answer]}])


def test_the_beginning_of_an_answer_is_continued_if_the_recipe_sets_it():
    begun = [*ASKED, {"role": "assistant", "content": "The answer is "}]
    chat = Chat(continue_final_message=True)
    prompts = prompts_of([{"prompt": begun}, {"prompt": ASKED}], chat=chat)
    assert prompts.texts == ["user:1+1?<eos>\nassistant:The answer is ", prompts.texts[1]]
    assert prompts.texts[1] == "user:1+1?<eos>\nassistant:"


def test_a_system_message_of_the_data_replaces_that_of_the_recipe(caplog):
    own = [{"role": "system", "content": "own"}, *ASKED]
    rows = [{"prompt": own}, {"prompt": ASKED}]
    texts = prompts_of(rows, chat=Chat(system="recipe")).texts
    assert texts == [
        "system:own<eos>\nuser:1+1?<eos>\nassistant:",
        "system:recipe<eos>\nuser:1+1?<eos>\nassistant:",
    ]
    assert (
        "train: 1 of 2 rows have a system message, which replaces data.chat.system" in caplog.text
    )
    answer = {"role": "assistant", "content": "2"}
    text = text_of_pair({"messages": [*own, answer]}, chat=Chat(system="recipe"))
    assert text == "system:own<eos>\nuser:1+1?<eos>\nassistant:2<eos>"


def test_a_field_of_a_prompts_message_that_nothing_reads_is_an_error():
    talk = [*ASKED, {"role": "assistant", "content": "2", "weight": 0}, *ASKED]
    (text,) = prompts_of([{"prompt": talk}]).texts
    assert text == "user:1+1?<eos>\nassistant:2<eos>\nuser:1+1?<eos>\nassistant:"
    for field in ({"hidden": True}, {"images": ["a.png"]}):
        with raises_for("row 2", "'user' ('1+1?')", next(iter(field))):
            prompts_of([{"prompt": ASKED}, {"prompt": [ASKED[0] | field]}])
    with raises_for("row 1", "message 2", "weight is 2"):
        prompts_of([{"prompt": [ASKED[0], {"role": "assistant", "content": "2", "weight": 2}]}])


def test_the_errors_of_a_chat_template_name_the_row():
    tokenizer = byte_tokenizer()
    for body in ("{{ messages[0].content + 1 }}", "{{ raise_exception('') }}", "{{ m.n.o }}"):
        tokenizer.chat_template = body
        with raises_for("row 1", "chat template failed"):
            build_prompt_format(None, True).texts(read_rows([{"prompt": ASKED}]), tokenizer)


def test_null_arguments_of_arrow_files_are_left_out(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    other = {"type": "function", "function": {"name": "mul", "arguments": {"b": "y"}}}
    rows = [
        {"prompt": [*ASKED, {"role": "assistant", "tool_calls": [call]}, *ASKED], "meta": {"x": n}}
        for n, call in enumerate([CALL, other])
    ]
    rows[1]["meta"] = {"y": 2}
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    expected = prompts_of(str(lines)).texts
    frame = table.to_pandas()
    for source in (
        str(tmp_path / "a.parquet"),
        str(tmp_path / "saved"),
        table,
        table.to_iterable_dataset(),
        frame,
        table.with_format("arrow")[:],
    ):
        assert prompts_of(source).texts == expected
    # Only messages change: a null of another column can have a meaning.
    assert read_rows(table)[0].values["meta"] == {"x": 0, "y": None}


def test_a_null_that_a_json_file_writes_is_an_argument():
    given = [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": None}}}]}]
    (message,) = read_messages(given, "a.jsonl, line 1")
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": None}
