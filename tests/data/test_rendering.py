"""Prompt texts and ids: template, chat format, one begin token, length limit."""

import pytest

from litgrpo.data.rendering import (
    Chat,
    ChatStyle,
    LengthLimit,
    Template,
    checked,
    load_tokenizer,
    prompt_style,
)
from litgrpo.data.sources import read
from tests.conftest import byte_tokenizer

CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood | default('') }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def chat_tokenizer(template=CHAT_TEMPLATE):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def texts(rows, template=None, chat=False, tokenizer=None):
    style = prompt_style(template, chat)
    return style.texts(read(rows), tokenizer or chat_tokenizer())


def test_a_template_sees_every_field_and_keeps_its_last_newline():
    rows = [{"prompt": "1+1?", "level": 3}]
    assert texts(rows, "Level {{ level }}: {{ prompt }}\n") == ["Level 3: 1+1?\n"]
    assert texts([{"q": "1+1?"}], "{{ q }}") == ["1+1?"]


def test_the_chat_format_asks_for_an_answer():
    assert texts(["hi"], chat=Chat()) == ["<bos>[user]hi[assistant]"]
    asked = texts(["hi"], "Say {{ prompt }}", Chat(system="be kind", kwargs={"mood": "!"}))
    assert asked == ["<bos>[system]be kind[user]Say hi[assistant]!"]


def test_a_prompt_can_be_a_list_of_messages():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": messages}]
    assert texts(rows, chat=Chat()) == ["<bos>[user]a[assistant]b[assistant]"]
    assert list(prompt_style(None, Chat()).plain(read(rows))) == ["a\nb"]
    with pytest.raises(ValueError, match=r"row 1, field 'prompt': .*needs `chat: true`"):
        texts(rows)
    with pytest.raises(ValueError, match="row 1: the prompt is empty"):
        texts([{"prompt": []}], chat=Chat())


@pytest.mark.filterwarnings("ignore:1 of 1 prompts write the begin token")
@pytest.mark.parametrize("chat", [False, Chat()])
def test_there_is_one_begin_token_whoever_writes_it(chat):
    style, tokenizer = prompt_style(None, chat), chat_tokenizer()
    for text in ("hi", "<bos>hi") if chat is False else ("hi",):
        (ids,) = style.encode(style.texts(read([text]), tokenizer), tokenizer)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_a_doubled_begin_token_is_one_warning():
    style, tokenizer = prompt_style(None, False), chat_tokenizer()
    said = r"2 of 3 prompts write the begin token \('<bos>'\) that the tokenizer adds"
    with pytest.warns(UserWarning, match=said) as warned:
        style.encode(["<bos>a", "b", "<bos>c"], tokenizer)
    assert len(warned) == 1


def test_a_chat_format_without_begin_token_gets_none():
    style, tokenizer = (
        prompt_style(None, Chat()),
        chat_tokenizer("{{ messages[0].content }}"),
    )
    assert style.encode(style.texts(read(["a"]), tokenizer), tokenizer) == [
        tokenizer.convert_tokens_to_ids(["a"])
    ]


def test_a_tokenizer_that_adds_no_begin_token_gets_none():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    assert prompt_style(None, False).encode(["a"], tokenizer) == [
        tokenizer.convert_tokens_to_ids(["a"])
    ]


@pytest.mark.parametrize(
    ("rows", "template", "said"),
    [
        (["a", " \n"], None, "row 2: the prompt is empty"),
        ([{"prompt": 3}], None, r"row 1, field 'prompt': 3 \(not text\)"),
        ([{"prompt": None}], None, "row 1, field 'prompt': None"),
        (
            ["a"],
            "{{ question }}",
            r"row 1: template: 'question' is undefined \(the row has: prompt",
        ),
        (["a"], "{% if false %}{{ prompt }}{% endif %}", "row 1: the prompt is empty"),
    ],
)
def test_a_row_that_gives_no_prompt_is_named(rows, template, said):
    with pytest.raises(ValueError, match=said):
        texts(rows, template)


def test_a_template_that_is_not_jinja_is_refused():
    with pytest.raises(ValueError, match="template of prompt, line 2: "):
        Template("prompt", "a\n{{ b").check()


def test_the_conversation_is_what_is_asked_without_the_chat_format():
    style = ChatStyle(Template("prompt", "Say {{ prompt }}"), chat=Chat(system="be kind"))
    said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Say hi"}]
    assert style.conversations(read(["hi"])) == [said]


def test_chat_needs_a_chat_template():
    with pytest.raises(ValueError, match="no chat template; use `template`"):
        texts(["a"], chat=Chat(), tokenizer=byte_tokenizer())


def test_a_chat_template_without_system_messages_is_explained():
    with pytest.raises(ValueError, match="says: no system; a model without system messages"):
        texts(["a"], chat=Chat(system="s"), tokenizer=chat_tokenizer(NO_SYSTEM + "x"))


def test_chat_is_true_false_or_settings():
    assert not isinstance(prompt_style(None, False), ChatStyle)
    assert prompt_style(None, True).chat == Chat()
    assert prompt_style(None, Chat("s")).chat == Chat("s")


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_a_tokenizer_without_pad_or_eos_token_is_refused(name):
    tokenizer = byte_tokenizer()
    setattr(tokenizer, f"{name}_token", None)
    with pytest.raises(ValueError, match=f"has no {name} token; set tokenizer.{name}_token"):
        checked(tokenizer)


def test_a_named_tokenizer_is_loaded(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).eos_token_id == 2
    with pytest.raises(ValueError, match=r"data tokenizer '.*nothing' cannot be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_too_long_rows_are_dropped_and_counted_in_one_warning():
    rows = read(["a", "bb", "ccc"])
    with pytest.warns(
        UserWarning, match=r"2 of 3 .*max_len=1 .*longest 3, .*row 3\): dropped"
    ) as w:
        assert LengthLimit("max_len", 1, "drop").kept([1, 2, 3], rows, "train") == [0]
    assert len(w) == 1
    assert LengthLimit("max_len", 3, "drop").kept([1, 2, 3], rows, "train") == [0, 1, 2]


def test_too_long_rows_are_kept_to_be_truncated_or_stop_as_asked():
    rows = read(["a", "bb"])
    with pytest.warns(UserWarning, match="1 of 2 .*: truncated"):
        assert LengthLimit("max_len", 1, "truncate").kept([1, 2], rows, "train") == [0, 1]
    with pytest.raises(ValueError, match=r"1 of 2 .*raise max_len or say"):
        LengthLimit("max_len", 1, "error").kept([1, 2], rows, "train")
    with pytest.raises(ValueError, match=r"2 of 2 .*none is left"):
        LengthLimit("max_len", 1, "drop").kept([2, 2], rows, "train")


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="overlong is 'cut'; it must be one of: drop, truncate"):
        LengthLimit("max_len", 1, "cut")
    with pytest.raises(ValueError, match="max_len is 0"):
        LengthLimit("max_len", 0, "drop")
