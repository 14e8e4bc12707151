"""Parsing calls in each format, including hostile texts."""

import json

import pytest

from litgrpo.environments.examples import calculate
from litgrpo.environments.tool import ToolResult, make_tool
from litgrpo.environments.tool_calls import (
    MAX_CALL_CHARS,
    HermesFormat,
    PythonFormat,
    TagFormat,
    ToolCall,
    after_thoughts,
    format_of,
)


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


CALCULATE, MULTIPLY = make_tool(calculate), make_tool(multiply)
ONE, TWO = {"calculate": CALCULATE}, {"calculate": CALCULATE, "multiply": MULTIPLY}
FORMATS = [HermesFormat(), TagFormat(), PythonFormat()]
BAD_JSON = [
    "",
    "{",
    '{"name": "f"} {}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": {"a": 1, "a": 2}}',
    '{"name": "f", "arguments": ' + "[" * 9_000,
    '{"name": "f", "arguments": {"a": ' + "9" * 5_000 + "}}",
]
NO_CALL = ["[]", "3", "null", '"f"', '{"name": 3}', '{"name": "f", "arguments": [1]}', "{}"]


def test_hermes_reads_every_call_of_a_turn_in_order():
    said = (
        "I will.\n<tool_call>\n"
        '{"name": "multiply", "arguments": {"a": 3, "b": [1, {"\\u00fc": null}]}}\n</tool_call>\n'
        'then <tool_call>{"name": "today"}</tool_call> bye'
    )
    first, second = HermesFormat().parse(said, TWO)
    assert first == ToolCall("multiply", {"a": 3, "b": [1, {"\u00fc": None}]})
    assert second == ToolCall("today", {})
    assert HermesFormat().parse("no call, only text", TWO) == []
    assert HermesFormat(tag="call").parse('<call>{"name": "f"}</call>', TWO) == [ToolCall("f")]


def test_a_call_whose_end_tag_ended_the_turn_is_read():
    assert HermesFormat().parse('<tool_call>{"name": "f"}', TWO) == [ToolCall("f")]
    assert TagFormat().parse("so <call>347*82", ONE) == [
        ToolCall("calculate", positional=("347*82",))
    ]


@pytest.mark.parametrize("text", BAD_JSON)
def test_what_is_not_json_is_a_call_that_is_wrong(text):
    (call,) = HermesFormat().parse(f"<tool_call>{text}</tool_call>", TWO)
    assert call.wrong == "the call is not JSON"


@pytest.mark.parametrize("text", NO_CALL)
def test_json_that_is_no_call_is_told_how_one_looks(text):
    (call,) = HermesFormat().parse(f"<tool_call>{text}</tool_call>", TWO)
    assert call.wrong == 'a call is {"name": ..., "arguments": {...}}'


def test_tags_hold_a_text_for_the_only_tool_or_a_call_by_name():
    assert TagFormat().parse("<call>347*82</call>", ONE)[0].positional == ("347*82",)
    assert TagFormat().parse("<call>calculate('1+1')</call>", ONE) == [
        ToolCall("calculate", positional=("1+1",))
    ]
    two = TagFormat().parse("<call>multiply(347, b=82)</call><call>347*82</call>", TWO)
    assert two[0] == ToolCall("multiply", {"b": 82}, (347,))
    assert two[1].wrong.endswith("write <call>name(arguments)</call>")
    assert TagFormat(shorthand=False).parse("<call>347*82</call>", ONE)[0].wrong
    # The only tool takes a number first, so a bare text is no call of it.
    assert TagFormat().parse("<call>3</call>", {"multiply": MULTIPLY})[0].wrong


def test_the_names_of_the_tags_can_be_chosen():
    calc = TagFormat(call_tag="calc", result_tag="out")
    assert calc.parse("<calc>1+1</calc><call>2</call>", ONE)[0].positional == ("1+1",)
    assert (
        calc.format_results([ToolResult("f", "2"), ToolResult("f", "3")])
        == "<out>2</out><out>3</out>"
    )
    assert calc.example(CALCULATE) == "<calc>expression</calc>"
    with pytest.raises(ValueError, match="call_tag is '<call>'; it must be a word"):
        TagFormat(call_tag="<call>")


def test_python_reads_a_list_of_calls_with_literals():
    said = '[multiply(a=3, b=-4), pkg.find("x", [1, (2, {"k": None})]), now()]'
    assert PythonFormat().parse(said, TWO) == [
        ToolCall("multiply", {"a": 3, "b": -4}),
        ToolCall("pkg.find", {}, ("x", [1, [2, {"k": None}]])),
        ToolCall("now"),
    ]
    assert PythonFormat().parse(f"Let me see:\n```python\n{said}\n```\n", TWO)[2] == ToolCall("now")
    assert PythonFormat().parse("```tool_code\nmultiply(3)\n```", TWO) == [
        ToolCall("multiply", {}, (3,))
    ]


@pytest.mark.parametrize("said", ["[1, 2]", "[]", "multiply(3)", "```python\nprint(3)\n```", ""])
def test_an_answer_that_looks_a_little_like_python_is_no_call(said):
    assert PythonFormat().parse(said, TWO) == []


@pytest.mark.parametrize(
    "said",
    [
        "[f(x)]",
        "[f(1 + 1)]",
        "[f(__import__('os').system('true'))]",
        "[f(a=1, a=2)]",
        "[f(b'x')]",
        "[f({1, 2})]",
        "[f(1e999)]",
        "[f(1j)]",
        "[f()(1)]",
        "[f(1), 2]",
        "[f(1)], [g(2)]",
        "[f('\x00')]",
        "[f(" + "9" * 5_000 + ")]",
        "[f(" + "[" * 5_000 + "]" * 5_000 + ")]",
        "[f(" + "-" * 15_000 + "1)]",
        "[f(" + "1+" * 9_000 + "1)]",
        "[f(x for x in y)]",
        "[f('\ud800",
    ],
)
def test_what_is_no_literal_is_not_evaluated_and_is_wrong(said):
    (call,) = PythonFormat().parse(said, TWO)
    assert call.wrong.startswith("the call is not plain Python")


def test_a_warning_of_python_about_what_was_said_is_not_shown(recwarn):
    assert PythonFormat().parse(r"[f('\d'), f(1is 1)]", TWO)[0].wrong
    assert not recwarn.list


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize(
    "text",
    [
        *BAD_JSON,
        *NO_CALL,
        "\ud800",
        "\x00",
        "<tool_call>" * 90_000,
        "</tool_call>" * 90_000,
        "<call>" * 160_000,
        "`" * 1_000_000,
        "```\n" * 250_000,
        "```" + "a" * 1_000_000,
        "[" * 1_000_000,
        "[f(" * 300_000,
        "[" + "a" * 1_000_000,
        "[f" + " " * 1_000_000,
        "</think>" * 100_000,
        "<call>calculate" + " " * 1_000_000 + "</call>",
        "[f('" + "x" * 1_000_000 + "')]",
        '<tool_call>{"name": "f", "arguments": {"x": "' + "x" * 1_000_000 + '"}}</tool_call>',
    ],
    ids=range(len(BAD_JSON + NO_CALL) + 16),
)
def test_no_text_raises(form, text):
    # A million characters: quadratic time would not end within the time limit of the suite.
    for said in (text, f"<tool_call>{text}", f"<call>{text}</call>", f"```\n{text}\n```"):
        for call in form.parse(after_thoughts(said), TWO):
            assert call.wrong or call.name or call.positional


def test_a_call_that_is_too_long_is_wrong():
    (call,) = HermesFormat().parse(
        f"<tool_call>{json.dumps('x' * MAX_CALL_CHARS)}</tool_call>", TWO
    )
    assert call.wrong == "a call has at most 20000 characters"


def test_what_is_only_thought_is_no_call():
    assert after_thoughts("<think><call>1</call></think>2</think> <call>3</call>") == (
        " <call>3</call>"
    )


def test_answers_are_messages_or_a_text_in_tags():
    answers = [ToolResult("multiply", "6"), ToolResult("unknown", "error: no", failed=True)]
    assert HermesFormat().format_results(answers) == [
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "tool", "name": "unknown", "content": "error: no"},
    ]
    assert PythonFormat().format_results(answers) == HermesFormat().format_results(answers)
    assert TagFormat().format_results(answers) == "<res>6</res><res>error: no</res>"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("tool", [CALCULATE, MULTIPLY], ids=lambda tool: tool.name)
def test_the_example_that_a_model_is_shown_is_a_call(form, tool):
    shown = form.example(tool).replace("...", "1").replace("(a, b)", "(1, 2)")
    (call,) = form.parse(shown, {tool.name: tool})
    assert (call.name, call.wrong) == (tool.name, "")
    assert len(call.arguments) + len(call.positional) == len(tool.parameters)


def test_a_format_that_is_not_known_is_refused():
    assert format_of("tags") == TagFormat()
    assert format_of(TagFormat(call_tag="c")) == TagFormat(call_tag="c")
    with pytest.raises(ValueError, match="call_format is 'xml'"):
        format_of("xml")


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
        '{"function": {"name": "f", "parameters": {"a": 1}}}',
    ],
)
def test_arguments_have_the_names_of_several_model_families(call):
    assert HermesFormat().parse(f"<tool_call>{call}</tool_call>", TWO) == [ToolCall("f", {"a": 1})]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        ('{"name": "f", "arguments": {}, "parameters": {"a": 1}}', "both arguments and parameters"),
        ('{"name": "f", "arguments": "a"}', "the arguments are not JSON"),
        ('{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}', "the arguments are not JSON"),
        ('{"name": "f", "parameters": 3}', "a call is"),
        ('{"name": "f", "arguments": "3"}', "a call is"),
        ('{"function": "f", "parameters": {}}', "a call is"),
    ],
)
def test_arguments_that_cannot_be_read_are_never_dropped(call, wrong):
    (found,) = HermesFormat().parse(f"<tool_call>{call}</tool_call>", TWO)
    assert wrong in found.wrong


def test_null_arguments_are_none():
    assert HermesFormat().parse('<tool_call>{"name": "f", "arguments": null}', TWO) == [
        ToolCall("f")
    ]


def test_a_call_ends_at_its_first_closing_tag():
    first, second = TagFormat().parse("<call>f('</call>')</call><call>g()</call>", TWO)
    assert first.wrong
    assert second == ToolCall("g")


def test_calls_in_thoughts_are_not_made():
    said = "<think><call>f(1)</call></think> no <call>f(2)</call></think><call>f(3)</call>"
    assert TagFormat().parse_turn(said, TWO) == [ToolCall("f", positional=(3,))]
    malformed = '<tool_call>{"name": </tool_call> <tool_call>{"name": "f"}</tool_call>'
    first, second = HermesFormat().parse(malformed, TWO)
    assert (first.wrong, second) == ("the call is not JSON", ToolCall("f"))


@pytest.mark.parametrize("form", FORMATS)
def test_the_number_of_tags_bounds_the_work(form):
    for said in (
        "</think>" * 20_000,
        "<call>" * 20_000,
        "<call>f(" + "</call>" * 20_000,
        "<call></call>" * 9_000,
    ):
        for text in (said, said.replace("call>", "tool_call>")):
            assert len(form.parse_turn(text, TWO)) < 20_001


def today() -> str:
    """Return the date."""
    return "2026-01-01"


@pytest.mark.parametrize("call_format", ["hermes", "tags", "python"])
@pytest.mark.parametrize("others", [(), (MULTIPLY,)])
def test_a_tool_without_parameters_can_be_called_in_every_format(call_format, others):
    format_ = format_of(call_format)
    tools = {tool.name: tool for tool in (make_tool(today), *others)}
    assert [call.name for call in format_.parse_turn(format_.example(tools["today"]), tools)] == [
        "today"
    ]
