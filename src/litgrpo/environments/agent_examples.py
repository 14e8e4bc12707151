"""Example agent of a recipe: it calls a calculator through the client of the OpenAI API."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import openai

from litgrpo.environments.examples import calculate

MAX_REPLIES = 3
CALL_COST = 0.1
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute a value from numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "(347 + 5) * 82"}},
                "required": ["expression"],
            },
        },
    }
]


@lru_cache
def _client(base_url: str) -> Any:
    """Return a client whose connections are used again for the next rows of the process."""
    return openai.OpenAI(base_url=base_url, api_key="of the row", max_retries=0)


def solve(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer an arithmetic problem with a calculator as tool; each call costs 0.1.

    Args:
        row: `prompt` is the problem.
        base_url: of the API.
        api_key: of the row.
    """
    client = _client(base_url).with_options(api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    num_calls, text = 0, ""
    for _ in range(MAX_REPLIES):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        text = message.content or ""
        messages.append(message)
        for call in message.tool_calls or ():
            num_calls += 1
            result = run_calculator(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return {"completion": text, "reward": 0.0 - CALL_COST * num_calls}


def run_calculator(arguments: dict[str, Any]) -> str:
    """Return what the calculator says, `error` for malformed expressions."""
    try:
        return calculate(str(arguments["expression"]))
    except (ValueError, KeyError):
        return "error"
