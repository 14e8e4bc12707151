"""Requests of agents: what is rejected, at which place, and what templates get."""

import pytest

from litgrpo.agents.chat_api import MAX_CHOICES, MAX_STOPS, ApiError, ChatRequest
from tests.support.agents import user


def calling(**function):
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


def declaring(**parameters):
    return {"tools": [{"function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [user("a"), {}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"]}]}, "messages[0].role"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role"),
        ({"messages": [user(5)]}, "messages[0].content"),
        ({"messages": [user(False)]}, "messages[0].content"),
        ({"messages": [user([{"type": "image_url"}])]}, "messages[0].content"),
        ({"messages": [user([{"type": "text", "text": None}])]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        (calling(), "messages[0].tool_calls[0].function.name"),
        (calling(name="f", arguments={}), "messages[0].tool_calls[0].function.arguments"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        (declaring(properties=[]), "tools[0].function.parameters.properties"),
        (declaring(properties={"a": 5}), "tools[0].function.parameters.properties.a"),
        (declaring(required=["z"]), "tools[0].function.parameters"),
        (declaring(required="ab"), "tools[0].function.parameters.required"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"modalities": ["audio"]}, "only text"),
    ],
)
def test_the_place_of_a_mistake_is_named(given, place):
    with pytest.raises(ApiError) as caught:
        ChatRequest.read({"messages": [user("a")]} | given)
    assert caught.value.status == 400
    assert caught.value.message.startswith((f"{place}:", f"{place} is"))
    assert "\n" not in caught.value.message


def test_templates_get_plain_messages_and_tools_in_the_order_of_the_request():
    function = {"strict": True, "name": "f", "parameters": {"required": [], "properties": {}}}
    call = {"id": None, "type": "other", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    texts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [
        {"role": "developer", "content": texts, "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "user", "tool_calls": None},
    ]
    given = {"tools": [{"function": function}], "n": None, "temperature": 0.3, "seed": None}
    request = ChatRequest.read({"messages": messages, "max_tokens": 7, "stop": "x"} | given)
    plain = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert request.messages == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [plain]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "user", "content": ""},
    ]
    (tool,) = request.tools
    assert list(tool["function"]) == ["strict", "name", "parameters", "description"]
    assert list(tool["function"]["parameters"]) == ["type", "properties", "required"]
    assert (request.num_choices, request.max_tokens, request.stop) == (1, 7, ("x",))
    assert request.ignored == {"temperature": 0.3}
