"""Agents for tests: plain HTTP, few imports, so that worker processes start quickly."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from litgrpo.environments.agent_examples import TOOLS, run_calculator


def post(base_url, key, body, path="/chat/completions"):
    """Status and JSON of a request; `body` is JSON or bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{base_url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def user(text):
    return {"role": "user", "content": text}


class Client:
    """Keeps a conversation; raises if a request is rejected."""

    def __init__(self, base_url, api_key):
        self.base_url, self.key, self.messages = base_url, api_key, []

    def create(self, messages, **options):
        status, body = post(self.base_url, self.key, {"messages": messages, **options})
        if status != 200:
            raise RuntimeError(body["error"]["message"])
        return body

    def ask(self, text, **options):
        self.messages.append(user(text))
        message = self.create(self.messages, **options)["choices"][0]["message"]
        self.messages.append(message)
        return message["content"]


def texts_of(replies):
    """Texts of all replies, sorted."""
    found = [choice["message"]["content"] for body in replies for choice in body["choices"]]
    return " ".join(sorted(found))


def once(row, base_url, api_key):
    """One call with the prompt; the reward is the length of the reply."""
    return len(Client(base_url, api_key).ask(row["prompt"])) / 10


def send_rejected(row, base_url, api_key):
    """Calls that are rejected after tokenizing, without end."""
    while True:
        post(base_url, api_key, {"messages": [user("x" * 9_000)]})


def wordy(row, base_url, api_key):
    """One call with 30 characters."""
    return float(len(Client(base_url, api_key).ask("x" * 30)) > 0)


def talk(row, base_url, api_key):
    """Three turns of one conversation."""
    client = Client(base_url, api_key)
    replies = [client.ask(text) for text in (row["prompt"], " and?", " so?")]
    return {"reward": len("".join(replies)) / 10, "completion": replies[-1]}


def calculate(row, base_url, api_key):
    """A loop with the calculator as a tool; its calls may be malformed or absent."""
    client, messages = Client(base_url, api_key), [user(row["prompt"])]
    for _ in range(3):
        reply = client.create(messages, tools=TOOLS)["choices"][0]["message"]
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        for call in calls:
            result = run_calculator(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not calls:
            break
    return {"completion": reply["content"] or "", "reward": 0.0}


def branch(row, base_url, api_key):
    """A conversation, a sub-agent, two continuations of the first reply, an edited history."""
    client = Client(base_url, api_key)
    first = client.ask(row["prompt"])
    helper = Client(base_url, api_key).ask("help", max_tokens=3)
    history = list(client.messages)
    client.ask("left")
    client.ask("more")
    client.create([*history, user("right")])
    edited = [history[0], {"role": "assistant", "content": f"{first}!"}, user("left")]
    client.create(edited)
    return float(len(helper))


def parallel(row, base_url, api_key):
    """Calls in parallel after a common beginning; two are equal, one has two choices."""
    client = Client(base_url, api_key)
    client.ask(row["prompt"])
    asked = [
        ({"messages": [*client.messages, user(text)]} | more)
        for text, more in (("a", {}), ("b", {"n": 2}), ("c", {}), ("c", {}), ("d", {}))
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        order = sorted(range(len(asked)), key=lambda n: os.urandom(1))
        replies = list(pool.map(lambda n: client.create(**asked[n]), order))
    # Which of parallel replies is the last one is not defined, so the agent returns an answer.
    return {"reward": float(len(replies)), "completion": texts_of(replies)}


async def later(row, base_url, api_key):
    """An async agent."""
    await asyncio.sleep(0)
    return once(row, base_url, api_key)


def silent(row, base_url, api_key):
    """No call at all."""
    return 0.5


def uneven(row, base_url, api_key):
    """The agents of a group begin differently, and some make no call."""
    return [silent, once, talk][ord(api_key[-1]) % 3](row, base_url, api_key)


def flood(row, base_url, api_key):
    """A thousand calls, also after errors."""
    kinds = {post(base_url, api_key, {"messages": [user(str(n))]})[0] for n in range(1000)}
    return float(len(kinds))


def insist(row, base_url, api_key):
    """Calls until it is rejected, and fails of that."""
    client = Client(base_url, api_key)
    while True:
        client.ask("on")


def hang(row, base_url, api_key):
    """Makes a call, then nothing."""
    once(row, base_url, api_key)
    time.sleep(600)


def crash(row, base_url, api_key):
    """Makes a call, then ends its process."""
    once(row, base_url, api_key)
    os._exit(3)


def raises(row, base_url, api_key):
    """Makes a call, then raises."""
    once(row, base_url, api_key)
    raise RuntimeError("no luck")


def leaves(row, base_url, api_key):
    """Returns while a call is on its way."""
    asked = {"messages": [user("later")]}
    threading.Thread(target=post, args=(base_url, api_key, asked), daemon=True).start()
    return 1.0


def send_malformed(row, base_url, api_key):
    """Requests that are rejected, and one that is not; the reward counts statuses of 400."""
    valid = {"messages": [user("a")]}
    bad = [
        *(b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[]", b"null"),
        *({}, {"messages": []}, {"messages": "a"}, {"messages": [3]}),
        *({"messages": [{"role": "king", "content": "a"}]}, {"messages": [user(3)]}),
        {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]},
        *(valid | {"n": 0}, valid | {"n": 1000}, valid | {"max_tokens": 0}),
        *(valid | {"max_tokens": "9"}, valid | {"stop": 3}, valid | {"stop": [""]}),
        *(valid | {"tools": 3}, valid | {"tools": [{"type": "function"}]}),
        *(
            valid | {"functions": []},
            valid | {"top_logprobs": 3},
            valid | {"modalities": ["audio"]},
        ),
    ]
    rejected = [post(base_url, api_key, body) for body in bad]
    assert all("message" in body["error"] for _, body in rejected)
    once(row, base_url, api_key)
    return float(sum(status == 400 for status, _ in rejected) == len(bad))


def play(row, base_url, api_key):
    """The agent that a row names; one pool serves many tests."""
    return globals()[row["agent"]](row, base_url, api_key)
