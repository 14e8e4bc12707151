"""Agents that use the packages `openai` and `openai-agents`."""

from __future__ import annotations

import asyncio
import json

import openai

# Tests that need it are skipped without it; pytest imports this file in any case.
try:
    import agents
except ModuleNotFoundError:
    agents = None


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def with_tools(row, base_url, api_key):
    """A loop of tool calls by the client, with its own message objects as history."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        reply = client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], temperature=0.2, logprobs=True
        )
        message = reply.choices[0].message
        assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = multiply(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def with_streams(row, base_url, api_key):
    """The same by streams, whose parts are put together."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": row["prompt"]}]
    while True:
        with client.chat.completions.stream(
            model="policy", messages=messages, tools=[TOOL]
        ) as stream:
            stream.until_done()
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = multiply(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def in_parallel(row, base_url, api_key):
    """Three calls at once, one of them with two choices."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def ask(text, **options):
        messages = [{"role": "user", "content": text}]
        return await client.chat.completions.create(model="policy", messages=messages, **options)

    replies = await asyncio.gather(ask("a"), ask("b", n=2), ask("c"))
    assert [len(each.choices) for each in replies] == [1, 2, 1]
    try:
        await ask("d", max_tokens=0)
    except openai.BadRequestError as error:
        return {"reward": float("max_tokens" in str(error)), "completion": "done"}


def with_library(row, base_url, api_key):
    """The loop of openai-agents."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    agent = agents.Agent(
        name="calculator",
        instructions="Use the tool.",
        model=agents.OpenAIChatCompletionsModel("policy", client),
        tools=[agents.function_tool(multiply)],
    )
    return agents.Runner.run_sync(agent, row["prompt"]).final_output


def solve(row, base_url, api_key):
    """The agent that a row names."""
    return globals()[row["agent"]](row, base_url, api_key)
