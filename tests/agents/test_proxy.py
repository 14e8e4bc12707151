"""The server that answers agents: keys, pages, sizes, streams."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import ExitStack, suppress

import pytest

from litgrpo.agents import proxy as proxy_module
from litgrpo.agents.chat_api import MAX_DEPTH, ApiError, ChatReply, Choice
from litgrpo.agents.proxy import MAX_BODY, MAX_HEAD, AgentProxy
from tests.support.agents import post, user

ASKED = {"messages": [user("6*7?")]}


class Answers(threading.Thread):
    """Answers every call with the same choices until the server is closed."""

    def __init__(self, proxy):
        super().__init__(daemon=True)
        self.proxy, self.calls, self.closed = proxy, [], threading.Event()

    def run(self):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        while not self.closed.is_set():
            for each in self.proxy.take(timeout_s=0.02):
                self.calls.append(each)
                choices = [
                    Choice({"role": "assistant", "content": "42"}, "stop", 2, ["4", "2"], [-1, -2]),
                    Choice(message, "tool_calls", 3, ["a", "d", "d"], [-1, -2, -3]),
                ]
                each.answer(ChatReply(each.request, choices, prompt_tokens=4))


@pytest.fixture
def proxy():
    proxy = AgentProxy()
    answers = Answers(proxy)
    answers.start()
    proxy.answers = answers
    yield proxy
    answers.closed.set()
    answers.join()
    proxy.close()


def raw(proxy, *lines, body=b""):
    """Status of a request that is written by hand."""
    with socket.create_connection(proxy.server.server_address) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        return reply.status, json.loads(reply.read())


def test_it_listens_on_the_loopback_interface_only(proxy):
    assert proxy.server.server_address[0] == "127.0.0.1"
    assert proxy.base_url.startswith("http://127.0.0.1:")


def test_a_reply_has_the_fields_of_the_api(proxy):
    status, body = post(proxy.base_url, proxy.open(0), ASKED | {"model": "any", "logprobs": True})
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "any"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "42"}
    assert first["finish_reason"] == "stop"
    assert [each["logprob"] for each in first["logprobs"]["content"]] == [-1, -2]
    assert second["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert second["finish_reason"] == "tool_calls"


def test_keys_belong_to_rows_and_end_with_them(proxy):
    one, other = proxy.open(0), proxy.open(1)
    assert one != other
    for key, row in ((one, 0), (other, 1), (one, 0)):
        assert post(proxy.base_url, key, ASKED)[0] == 200
        assert proxy.answers.calls[-1].row == row
    proxy.end(0)
    assert post(proxy.base_url, one, ASKED)[0] == 410
    assert post(proxy.base_url, other, ASKED)[0] == 200
    proxy.reset()
    assert post(proxy.base_url, other, ASKED)[0] == 401
    assert post(proxy.base_url, one, ASKED)[0] == 401


@pytest.mark.parametrize("key", [None, "", "guess", "row-0", "\x7f"])
def test_calls_without_a_valid_key_are_rejected(proxy, key):
    proxy.open(0)
    status, body = post(proxy.base_url, key, ASKED)
    assert status == 401
    assert body["error"]["code"] == "invalid_api_key"
    assert not proxy.answers.calls


def test_other_schemes_and_pages_are_rejected(proxy):
    key = proxy.open(0)
    port = proxy.server.server_address[1]
    host, auth = f"Host: 127.0.0.1:{port}", f"Authorization: Bearer {key}"
    assert raw(proxy, "GET /v1/models HTTP/1.1", host, f"Authorization: Basic {key}")[0] == 401
    status, models = raw(proxy, "GET /v1/models HTTP/1.1", host, auth)
    assert status == 200
    assert [each["id"] for each in models["data"]] == ["policy"]
    assert raw(proxy, "GET /v1/models/policy HTTP/1.1", host, auth)[1]["id"] == "policy"
    assert raw(proxy, "GET /v1/models/other HTTP/1.1", host, auth)[0] == 404
    assert post(proxy.base_url, key, ASKED, "/responses")[0] == 404
    assert post(proxy.base_url, key, ASKED, "/../../etc/passwd")[0] == 404


def test_large_bodies_and_bodies_without_a_length_are_not_read(proxy):
    key = proxy.open(0)
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}")
    for length in (str(MAX_BODY + 1), "9" * 5000):
        assert raw(proxy, *lines, f"Content-Length: {length}")[0] == 413
    for bad in ("Content-Length: -1", "Content-Length: x", "Transfer-Encoding: chunked"):
        assert raw(proxy, *lines, bad)[0] == 411
    assert raw(proxy, *lines, "Content-Length: 3", body=b"{}}")[0] == 400
    assert not proxy.answers.calls


FUNCTION = {"name": "f"}


@pytest.mark.parametrize(
    "function",
    [
        FUNCTION | {"parameters": [1]},
        FUNCTION | {"parameters": "x"},
        FUNCTION | {"parameters": {"required": [["x"]]}},
        FUNCTION | {"description": 5},
    ],
)
def test_malformed_tools_are_rejected_with_a_reason(proxy, function):
    status, body = post(proxy.base_url, proxy.open(0), ASKED | {"tools": [{"function": function}]})
    assert status == 400
    assert "tools[0]" in body["error"]["message"]
    assert not proxy.answers.calls


def test_texts_of_a_request_have_no_halves_of_surrogate_pairs(proxy):
    tool = {"function": {"name": "f\ud800", "parameters": {"properties": {"\ud800": {}}}}}
    body = ASKED | {"tools": [tool], "stop": ["\ud800"], "model": "\ud800"}
    assert post(proxy.base_url, proxy.open(0), body)[0] == 200
    (call,) = proxy.answers.calls
    repr(call.request).encode()
    assert "\ud800" not in "".join([*call.request.stop, call.request.model])
    json.dumps(call.request.tools, ensure_ascii=False).encode()


def test_a_body_that_is_cut_off_is_rejected(proxy):
    body = json.dumps(ASKED).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {proxy.open(0)}\r\n"
    with socket.create_connection(proxy.server.server_address) as connection:
        connection.sendall(f"{head}Content-Length: {len(body) + 9}\r\n\r\n".encode() + body)
        connection.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 400
    assert not proxy.answers.calls


def test_a_connection_serves_several_requests_also_after_an_error(proxy):
    key = proxy.open(0)
    connection = http.client.HTTPConnection(*proxy.server.server_address)
    for body, expected in ((ASKED, 200), ({}, 400), (ASKED, 200)):
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        assert reply.status == expected
        reply.read()
        assert connection.sock is not None
    connection.close()


def test_a_stream_has_the_same_content_as_one_object(proxy):
    key = proxy.open(0)
    connection = http.client.HTTPConnection(*proxy.server.server_address)
    asked = ASKED | {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
    reply = connection.getresponse()
    assert reply.headers["Content-Type"] == "text/event-stream"
    lines = reply.read().decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert {each["object"] for each in events} == {"chat.completion.chunk"}
    assert len({each["id"] for each in events}) == 1
    choices = [choice for each in events for choice in each["choices"]]
    assert [each["index"] for each in choices] == [0, 0, 1, 1]
    assert choices[0]["delta"]["content"] == "42"
    assert choices[2]["delta"]["tool_calls"][0]["index"] == 0
    assert [each["finish_reason"] for each in choices] == [None, "stop", None, "tool_calls"]
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_calls_that_wait_when_a_row_ends_are_rejected():
    proxy = AgentProxy()
    try:
        key, found = proxy.open(3), []
        thread = threading.Thread(target=lambda: found.append(post(proxy.base_url, key, ASKED)))
        thread.start()
        (call,) = proxy.take(timeout_s=10.0)
        assert call.row == 3
        proxy.end(3)
        thread.join()
        assert found[0][0] == 410
        assert isinstance(call.reply.exception(), ApiError)
        assert proxy.take(timeout_s=0.0) == []
    finally:
        proxy.close()


POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


def is_closed(connection, within_s=5.0):
    """True if the server closes a connection within some time."""
    connection.settimeout(within_s)
    with suppress(ConnectionError):
        try:
            while connection.recv(65_536):
                pass
        except TimeoutError:
            return False
    return True


# A process with few descriptors that answers one agent; prints its processor time at the end.
CROWDED = """
import resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
from litgrpo.agents.chat_api import ChatReply, Choice
from litgrpo.agents.proxy import AgentProxy

proxy = AgentProxy()

def answer():
    while True:
        for call in proxy.take(0.05):
            choice = Choice({"role": "assistant", "content": "42"}, "stop", 1)
            call.answer(ChatReply(call.request, [choice], 1))

threading.Thread(target=answer, daemon=True).start()
print(proxy.base_url, proxy.open(0), flush=True)
for _ in sys.stdin:
    print(time.process_time(), flush=True)
"""


def test_idle_connections_keep_no_agent_out_and_cost_no_processor_time():
    descriptors = 128
    words = [sys.executable, "-c", CROWDED, str(descriptors)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as server, ExitStack() as stack:

        def seconds():
            server.stdin.write("\n")
            server.stdin.flush()
            return float(server.stdout.readline())

        url, key = server.stdout.readline().split()
        host, port = url.split("/")[2].split(":")
        for begin in (b"", b"POST /v1", POST.encode()):
            for _ in range(descriptors):
                idle = stack.enter_context(socket.create_connection((host, int(port))))
                with suppress(ConnectionError):
                    idle.sendall(begin)
            assert post(url, key, ASKED)[0] == 200
        before = seconds()
        time.sleep(1.0)
        assert seconds() - before < 0.3
        for _ in range(3):
            assert post(url, key, ASKED)[0] == 200
        server.stdin.close()


def test_a_body_without_a_key_is_not_kept(proxy):
    body, count = b" " * (MAX_BODY - 1), 12
    tracemalloc.start()
    try:
        with ExitStack() as stack:
            for key in ("", "Authorization: Bearer guess\r\n") * (count // 2):
                connection = socket.create_connection(proxy.server.server_address)
                stack.enter_context(connection)
                connection.sendall(f"{POST}{key}Content-Length: {MAX_BODY}\r\n\r\n".encode())
                connection.sendall(body)
            assert post(proxy.base_url, proxy.open(0), ASKED)[0] == 200
            assert tracemalloc.get_traced_memory()[1] < MAX_BODY
    finally:
        tracemalloc.stop()
    assert post(proxy.base_url, "guess", ASKED | {"user": "x" * 3_000_000})[0] == 401


def test_headers_that_are_slow_or_long_are_cut_off(proxy, monkeypatch):
    monkeypatch.setattr(proxy_module, "KEY_S", 0.5)
    key, address = proxy.open(0), proxy.server.server_address
    with ExitStack() as stack:
        connect = lambda: stack.enter_context(socket.create_connection(address))  # noqa: E731
        silent, slow, long, body = connect(), connect(), connect(), connect()
        start = time.monotonic()
        body.sendall(f"{POST}Content-Length: 9\r\n\r\n".encode())  # no key, and no body
        with suppress(ConnectionError):
            long.sendall(POST.encode() + b"X: " + b"x" * 2 * MAX_HEAD)
        assert is_closed(long, 0.4)
        with suppress(ConnectionError):
            while time.monotonic() - start < 3:
                slow.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - start < 2
        assert is_closed(silent, 1.0)
        assert is_closed(body, 1.0)
    # A connection that has sent a key stays.
    connection = http.client.HTTPConnection(*address)
    for _ in range(2):
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(ASKED), headers)
        assert connection.getresponse().read()
        time.sleep(0.8)
        assert connection.sock is not None
    connection.close()


def test_a_request_that_is_nested_deeply_is_rejected_with_a_reason(proxy):
    key, nested = proxy.open(0), None
    for depth in range(600):
        nested = [nested] if depth % 2 else {"a": nested}
        if depth + 2 in (MAX_DEPTH, MAX_DEPTH + 1, 490, 600):
            good = depth + 2 <= MAX_DEPTH
            status, body = post(proxy.base_url, key, ASKED | {"extra": nested})
            assert status == (200 if good else 400)
            assert good or "nested" in body["error"]["message"]
    assert len(proxy.answers.calls) == 1
