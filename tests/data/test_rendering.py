"""Prompt texts and ids: template, chat format, one begin token, length limit."""

import pytest

from litgrpo import PairData, PromptData
from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import (
    Chat,
    ChatPromptFormat,
    LengthLimit,
    PromptDropped,
    TextTemplate,
    build_prompt_format,
)
from litgrpo.data.sources import read_rows
from litgrpo.data.tokenization import load_tokenizer, require_pad_and_eos
from tests.support.models import byte_tokenizer

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
    style = build_prompt_format(template, chat)
    return style.texts(read_rows(rows), tokenizer or chat_tokenizer())


def test_a_template_sees_every_field_and_keeps_its_last_newline():
    rows = [{"prompt": "1+1?", "level": 3}]
    assert texts(rows, "Level {{ level }}: {{ prompt }}\n") == ["Level 3: 1+1?\n"]
    assert texts([{"q": "1+1?"}], "{{ q }}") == ["1+1?"]


def test_the_chat_format_asks_for_an_answer():
    assert texts(["hi"], chat=Chat()) == ["<bos>[user]hi[assistant]"]
    asked = texts(["hi"], "Say {{ prompt }}", Chat(system="be kind", template_kwargs={"mood": "!"}))
    assert asked == ["<bos>[system]be kind[user]Say hi[assistant]!"]


def test_a_prompt_can_be_a_list_of_messages():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "c"})
    rows = [{"prompt": messages}]
    assert texts(rows, chat=Chat()) == ["<bos>[user]a[assistant]b[user]c[assistant]"]
    assert list(build_prompt_format(None, Chat()).plain_texts(read_rows(rows))) == ["a\nb\nc"]
    with pytest.raises(ValueError, match=r"row 1, field 'prompt': .*needs `chat: true`"):
        texts(rows)
    with pytest.raises(ValueError, match="row 1: the prompt is empty"):
        texts([{"prompt": []}], chat=Chat())


@pytest.mark.filterwarnings("ignore:there are prompts that write the begin token")
@pytest.mark.parametrize("chat", [False, Chat()])
def test_there_is_one_begin_token_whoever_writes_it(chat):
    style, tokenizer = build_prompt_format(None, chat), chat_tokenizer()
    for text in ("hi", "<bos>hi") if chat is False else ("hi",):
        (ids,) = style.encode(style.texts(read_rows([text]), tokenizer), tokenizer)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1


def test_a_doubled_begin_token_is_one_warning():
    style, tokenizer = build_prompt_format(None, False), chat_tokenizer()
    said = r"prompts that write the begin token \('<bos>'\), which the tokenizer adds"
    with pytest.warns(UserWarning, match=said) as warned:
        style.encode(["<bos>a", "b", "<bos>c"], tokenizer)
    assert len(warned) == 1


def test_a_chat_format_without_begin_token_gets_none():
    style, tokenizer = (
        build_prompt_format(None, Chat()),
        chat_tokenizer("{{ messages[0].content }}"),
    )
    assert style.encode(style.texts(read_rows(["a"]), tokenizer), tokenizer) == [
        tokenizer.convert_tokens_to_ids(["a"])
    ]


def test_a_tokenizer_that_adds_no_begin_token_gets_none():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    assert build_prompt_format(None, False).encode(["a"], tokenizer) == [
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
    with pytest.raises(ValueError, match="template, line 2: "):
        TextTemplate("prompt", "a\n{{ b")


@pytest.mark.parametrize(
    "written",
    [
        "Q: {prompt}",  # of Python's format
        "Q: $prompt",
        "Q: %(prompt)s",
        "Q:",
        "{% raw %}{{ prompt }}{% endraw %}",
        "{# {{ prompt }} #}Q:",
        "{% for n in range(3) %}{{ n }}{% endfor %}",
        "Level {{ level }}: {prompt}",
        "Level {{ level }}: $prompt",
        "Level {{ level }}: <prompt>",
    ],
)
def test_a_template_that_reads_no_field_is_refused(written):
    for chat in (False, True):
        with pytest.raises(ValueError, match=r"^template is .* write `\{\{ prompt \}\}`"):
            build_prompt_format(written, chat)
    with pytest.raises(ValueError, match=r"^reference_template is .* write `\{\{ prompt \}\}`"):
        build_prompt_format(None, False, reference_template=written)
    written = written.replace("prompt", "completion")
    with pytest.raises(ValueError, match=r"^completion_template is .*`\{\{ completion \}\}`"):
        PairData(["a"], completion_template=written)


def test_a_template_may_read_any_field_and_a_system_message_none():
    assert texts([{"a": 1, "b": 2}], "{{ a }}+{{ b }} in \\boxed{answer}") == [
        "1+2 in \\boxed{answer}"
    ]
    build_prompt_format("{{ prompt }}", Chat(system="Put it into {answer}."))
    build_prompt_format(None, False, reference_template="It is {{ answer }}.")


@pytest.mark.parametrize(
    "name",
    [
        *("tools", "messages", "conversation", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "padding", "return_dict", "return_tensors"),
        *("tokenizer", "strftime_now"),
    ],
)
def test_an_argument_that_is_set_elsewhere_is_refused_among_those_of_the_template(name):
    with pytest.raises(
        ValueError, match=rf"^data\.chat\.template_kwargs contains '{name}'.*; (leave|set) "
    ):
        Chat(template_kwargs={"enable_thinking": False, name: None})


@pytest.mark.parametrize("drawn", ["['a', 'b'] | random", "lipsum()"])
def test_a_template_cannot_draw_random_text(drawn):
    with pytest.raises(ValueError, match=drawn.split()[-1].removesuffix("()")):
        texts(["a"], f"{{{{ prompt }}}}{{{{ {drawn} }}}}")


def test_the_conversation_is_what_is_asked_without_the_chat_format():
    style = ChatPromptFormat(
        TextTemplate("prompt", "Say {{ prompt }}"), chat=Chat(system="be kind")
    )
    said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Say hi"}]
    assert style.reward_columns(read_rows(["hi"])) == {"conversation": [said]}


def test_chat_needs_a_chat_template():
    with pytest.raises(ValueError, match="no chat template; set chat to false"):
        texts(["a"], chat=Chat(), tokenizer=byte_tokenizer())


def test_a_chat_template_without_system_messages_is_explained():
    with pytest.raises(ValueError, match=r"chat template.*system"):
        texts(["a"], chat=Chat(system="s"), tokenizer=chat_tokenizer(NO_SYSTEM + "x"))


def test_chat_is_true_false_or_settings():
    assert not isinstance(build_prompt_format(None, False), ChatPromptFormat)
    assert build_prompt_format(None, True).chat == Chat()
    assert build_prompt_format(None, Chat("s")).chat == Chat("s")


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_a_tokenizer_without_pad_or_eos_token_is_refused(name):
    tokenizer = byte_tokenizer()
    setattr(tokenizer, f"{name}_token", None)
    with pytest.raises(ValueError, match=f"has no {name} token; set tokenizer.{name}_token"):
        require_pad_and_eos(tokenizer)


def test_a_named_tokenizer_is_loaded(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).eos_token_id == 2
    with pytest.raises(ValueError, match=r"data tokenizer '.*nothing' could not be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_too_long_rows_are_dropped_and_counted_in_one_warning():
    rows = read_rows(["a", "bb", "ccc"])
    with pytest.warns(
        UserWarning, match=r"2 of 3 .*max_length=1 .*longest 3, .*row 3\): dropped"
    ) as w:
        assert LengthLimit("max_length", 1, "drop").select([1, 2, 3], rows, "train") == [0]
    assert len(w) == 1
    assert LengthLimit("max_length", 3, "drop").select([1, 2, 3], rows, "train") == [0, 1, 2]


def test_too_long_rows_are_kept_to_be_truncated_or_stop_as_asked():
    rows = read_rows(["a", "bb"])
    with pytest.warns(UserWarning, match="1 of 2 .*: truncated"):
        assert LengthLimit("max_length", 1, "truncate").select([1, 2], rows, "train") == [0, 1]
    with pytest.raises(ValueError, match=r"1 of 2 .*raise max_length or set"):
        LengthLimit("max_length", 1, "error").select([1, 2], rows, "train")
    with pytest.raises(ValueError, match=r"2 of 2 .*none is left"):
        LengthLimit("max_length", 1, "drop").select([2, 2], rows, "train")


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="long_prompts is 'truncate'; it must be one of: drop, er"):
        PromptData(["a"], long_prompts="truncate")
    with pytest.raises(
        ValueError, match="long_examples is 'cut'; it must be one of: drop, truncat"
    ):
        PairData([{"prompt": "a", "completion": "b"}], long_examples="cut")
    with pytest.raises(ValueError, match="max_length is 0"):
        LengthLimit("max_length", 0, "drop")


SHOWS_TOOLS = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}" + CHAT_TEMPLATE
DOUBLE = {"type": "function", "function": {"name": "double", "parameters": {}}}


def encode_first_row(
    rows, added, *, chat=True, limit=99, overlong="error", split=False, split_added=True, **changes
):
    """Encode the first row with the text that an environment adds to it."""
    tokenizer = chat_tokenizer(changes.get("template", CHAT_TEMPLATE))
    data = PromptData(
        rows,
        chat=chat,
        max_prompt_length=limit,
        long_prompts=overlong,
        split_special_tokens=split,
    )
    prompts = PromptSet(
        read_rows(rows),
        "train",
        prompt_format=data.prompt_format,
        limit=LengthLimit("max_length", limit, "drop"),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )[[*range(len(rows))]]
    data.final_format = data.prompt_format, tokenizer
    ids = data.encode_opening(prompts, 0, added, split_added)
    return tokenizer.decode(ids), ids, prompts


def test_what_an_environment_adds_stands_at_the_end_of_the_last_user_message():
    said, _, prompts = encode_first_row(["guess", "longer prompt"], " 1-15.")
    assert said == "<bos>[user]guess 1-15.[assistant]"
    asked = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert encode_first_row([{"prompt": asked}], "!")[0] == "<bos>[user]a![system]b[assistant]"
    asked[1] = {"role": "assistant", "content": "b"}
    continued = Chat(continue_final_message=True)
    found = encode_first_row([{"prompt": asked}], "!", chat=continued)[0]
    assert found == "<bos>[user]a![assistant]b"
    assert prompts.columns["conversation"][0][-1]["content"] == "guess"  # is not changed


def test_messages_that_an_environment_adds_follow_the_prompt():
    added = [{"role": "tool", "content": "42"}]
    assert encode_first_row(["six"], added)[0] == "<bos>[user]six[tool]42[assistant]"
    with pytest.raises(ValueError, match=r"the environment begins with \[17\]; expected"):
        encode_first_row(["six"], [17])
    system = [{"prompt": [{"role": "system", "content": "s"}]}]
    with pytest.raises(ValueError, match="last user message, and the prompt has none"):
        encode_first_row(system, "text")


def test_a_plain_prompt_takes_a_text_at_its_end_and_no_messages():
    assert encode_first_row(["six"], " 42", chat=False)[0] == "<bos>six 42"
    with pytest.raises(ValueError, match=r"begins with messages .*`chat: true` of the data"):
        encode_first_row(["six"], [{"role": "user", "content": "42"}], chat=False)


def test_nothing_added_leaves_the_tokens_of_the_batch():
    for nothing in ("", []):
        _, ids, prompts = encode_first_row(["six", "longer than six"], nothing)
        assert ids == prompts.prompt_ids[0][prompts.prompt_mask[0]].tolist()


def test_what_is_too_long_with_the_addition_is_treated_as_when_it_was_loaded():
    long = {"chat": False, "limit": 8}
    with pytest.raises(ValueError, match=r"10 tokens.*max_prompt_length"):
        encode_first_row(["six"], " 42456", **long)
    with pytest.raises(PromptDropped, match="10 tokens"):
        encode_first_row(["six"], " 42456", overlong="drop", **long)


@pytest.mark.parametrize("chat", [True, False])
def test_special_tokens_in_what_is_added_are_plain_text_unless_a_key_allows_them(chat):
    eos = chat_tokenizer().eos_token
    for split, split_added, number in ((False, False, 1), (False, True, 0), (True, True, 0)):
        named = {"split": split, "split_added": split_added, "chat": chat}
        said, ids, _ = encode_first_row(["six"], f"{eos}!", **named)
        assert said == (f"<bos>[user]six{eos}![assistant]" if chat else f"<bos>six{eos}!")
        assert ids.count(chat_tokenizer().eos_token_id) == number


def test_special_tokens_of_a_prompt_stay_where_those_of_the_environment_are_plain_text():
    eos = chat_tokenizer().eos_token
    for chat in (True, False):
        _, ids, _ = encode_first_row([f"six{eos}"], f" {eos}", chat=chat)
        assert ids.count(chat_tokenizer().eos_token_id) == 1
    added = [{"role": "tool", "content": f"{eos}[system]"}]
    said, ids, _ = encode_first_row(["six"], added)
    assert said == f"<bos>[user]six[tool]{eos}[system][assistant]"
    assert eos not in chat_tokenizer().convert_ids_to_tokens(ids)


def test_tools_are_shown_by_a_template_that_shows_them():
    tokenizer, given = chat_tokenizer(SHOWS_TOOLS), {"type": "function", "function": {"name": "g"}}
    style = build_prompt_format(None, Chat(tools=[given])).with_tools([DOUBLE], tokenizer)
    assert style.texts(read_rows(["hi"]), tokenizer) == ["(g)(double)<bos>[user]hi[assistant]"]
    assert build_prompt_format(None, True).with_tools([], tokenizer) == build_prompt_format(
        None, True
    )


@pytest.mark.parametrize(
    ("chat", "why"), [(True, "chat template ignores tools"), (False, "prompts are plain texts")]
)
def test_tools_that_the_model_cannot_see_are_named_once(chat, why):
    said = rf"{why}.*\(double\); `list_tools_in_prompt: true` of litgrpo.environments.Tools"
    with pytest.warns(UserWarning, match=said) as warned:
        style = build_prompt_format(None, chat).with_tools([DOUBLE], chat_tokenizer())
    assert len(warned) == 1
    assert style.texts(read_rows(["hi"]), chat_tokenizer())
