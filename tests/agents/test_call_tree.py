"""Which calls continue each other, and the chains that result."""

import itertools

from litgrpo.agents.call_tree import AgentCall, CallTree
from litgrpo.agents.chat_api import ChatRequest
from tests.support.agents import user


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def add(tree, messages, ids, text, tools=(), context=None):
    request = ChatRequest.read({"messages": messages, "tools": list(tools)})
    parent, added = tree.find(request)
    context = context or [*(parent.all_ids if parent else []), len(messages)]
    call = AgentCall(context, added, parent, limit=8, ids=ids, message=said(text), text=text)
    tree.add(request, call)
    return call


ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_only_the_whole_history_and_the_exact_reply_continue_a_call():
    tree, question = CallTree(), user("6*7?")
    first = add(tree, [question], [5, 2], "42")

    def parent(*messages, tools=()):
        request = ChatRequest.read({"messages": list(messages), "tools": list(tools)})
        return tree.find(request).parent

    assert parent(question, said("42"), user("Sure?")) is first
    assert parent(question, said([{"type": "text", "text": "42"}]), user("Sure?")) is first
    assert parent(question, said("42", name="x", audio=None), user("Sure?")) is first
    for others in (
        (question,),
        (question, said("43"), user("Sure?")),
        (question, said("42 "), user("Sure?")),
        (user("6*8?"), said("42"), user("Sure?")),
        ({"role": "system", "content": "Be brief."}, question, said("42"), user("Sure?")),
    ):
        assert parent(*others) is None
    assert parent(question, said("42"), user("Sure?"), tools=[ADD]) is None
    second = add(tree, [question, said("42"), user("Sure?")], [6, 2], "Yes.")
    longer = (question, said("42"), user("Sure?"), said("Yes."), user("Really?"))
    assert parent(*longer) is second
    assert tree.find(ChatRequest.read({"messages": list(longer)})).added == [user("Really?")]


def test_tool_calls_are_part_of_the_reply():
    tree, question = CallTree(), user("6*7?")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    request = ChatRequest.read({"messages": [question]})
    first = AgentCall([1], [question], None, limit=8, ids=[5], text="<call>")
    first.message = said("", tool_calls=[call])
    tree.add(request, first)
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    for message, expected in (
        (said(None, tool_calls=[call]), first),
        (said("", tool_calls=[call | {"id": "2"}]), None),
        (said(""), None),
    ):
        asked = ChatRequest.read({"messages": [question, message, result]})
        assert tree.find(asked).parent is expected
    assert tree.written(first.message) == "<call>"
    assert tree.written(said("other")) is None


def test_equal_texts_in_other_tokens_are_continued_in_the_same_way_in_any_order():
    question, found = user("6*7?"), set()
    for order in itertools.permutations(([5, 2], [4, 4, 2], [6, 2])):
        tree = CallTree()
        for ids in order:
            add(tree, [question], ids, "42", context=[1])
        asked = ChatRequest.read({"messages": [question, said("42"), user("Sure?")]})
        found.add(tuple(tree.find(asked).parent.ids))
    assert found == {(4, 4, 2)}


def test_chains_follow_the_larger_branch_and_do_not_depend_on_the_order():
    question = user("q")
    histories = {
        "left": [question, said("a"), user("left")],
        "more": [question, said("a"), user("left"), said("b"), user("more")],
        "right": [question, said("a"), user("right")],
        "other": [user("other")],
    }
    ids = {"left": [11], "more": [12], "right": [10], "other": [13]}
    texts = {"left": "b", "more": "c", "right": "d", "other": "e"}
    found = []
    for order in (("left", "more", "right", "other"), ("other", "right", "left", "more")):
        tree = CallTree()
        add(tree, [question], [9], "a")
        for name in order:
            add(tree, histories[name], ids[name], texts[name])
        found.append([[call.text for call in chain] for chain in tree.chains()])
    assert found[0] == found[1]
    assert found[0][0] == ["a", "b", "c"]
    assert sorted(found[0][1:]) == [["d"], ["e"]]
