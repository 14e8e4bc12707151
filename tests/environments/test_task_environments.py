"""Environments by task: tools that only the rows of their task see, and clear errors."""

import pytest

from litgrpo.data import Chat
from litgrpo.data.rendering import build_prompt_format
from litgrpo.data.sources import SourceRow
from litgrpo.environments import TaskEnvironments, Tools
from litgrpo.environments.base import schemas_of, shown_tools_of
from litgrpo.environments.examples import NumberGame, calculate
from tests.support.chat_templates import spacing_tokenizer

SHOWS_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def environments():
    return TaskEnvironments({"sums": Tools([calculate]), "game": NumberGame(maximum=1)})


def test_each_row_is_played_by_its_task():
    played = environments()
    played.reset({"task": "game"}, seed=0)
    assert played.step("1").reward == 1.0
    assert played.reset({"task": "sums"}, seed=0) == ""
    assert not played.step(
        '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>'
    ).done
    assert played.reset({"task": "other"}, seed=0) == ""
    last = played.step("anything")
    assert (last.done, last.reward) == (True, None)


def test_prompts_show_the_tools_of_their_task():
    tokenizer = spacing_tokenizer(SHOWS_TOOLS)
    shown = build_prompt_format(None, Chat()).with_tools(shown_tools_of(environments()), tokenizer)
    rows = [SourceRow({"prompt": "?", "task": task}, "", 0) for task in ("sums", "game", "other")]
    assert shown.texts(rows, tokenizer) == ["[calculate]?", "?", "?"]
    assert [each["function"]["name"] for each in schemas_of(environments())] == ["calculate"]


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "task: environment"), ({"sums": 3}, "of task 'sums'"), ({"sums": "no.Such"}, "no")],
)
def test_what_is_no_environment_is_rejected(given, message):
    with pytest.raises(ValueError, match=message):
        TaskEnvironments(given)
