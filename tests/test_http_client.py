"""Requests with limits; the hostile responses are in the tests of their clients."""

import asyncio
import threading
import time

import httpx
import pytest

from litgrpo import http_client
from litgrpo.http_client import (
    ConnectionLost,
    MalformedReply,
    call_within,
    make_limits,
    parse_json,
    read_field,
)
from tests.support.hostile_server import LARGE, HostileServer, reply


def test_all_threads_share_one_event_loop():
    http_client._start_loop.cache_clear()
    together, found = threading.Barrier(32), []

    def ask():
        together.wait()
        found.append(http_client.event_loop())

    threads = [threading.Thread(target=ask) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("text", ["", "[" * 100_000, "NaN", "[Infinity]", "9" * 5000, "{'a': 1}"])
def test_what_is_no_json_is_malformed(text):
    with pytest.raises(MalformedReply):
        parse_json(text)


@pytest.mark.parametrize("value", [None, [], "id", 7, {}, {"id": True}, {"id": 7.0}, {"id": None}])
def test_a_field_of_another_type_is_malformed(value):
    with pytest.raises(MalformedReply, match="id"):
        read_field(value, "id", int)


@pytest.mark.parametrize("name", [each for each in LARGE if "header" not in each])
def test_a_client_of_another_library_reads_no_large_and_no_compressed_response(name):
    async def ask(url):
        async with httpx.AsyncClient(**make_limits(httpx, 1_000_000)) as client:
            return await client.get(url)

    with HostileServer(LARGE[name]) as server:
        with pytest.raises(httpx.HTTPError, match=r"compressed|more than 1,000,000 bytes"):
            asyncio.run(ask(server.url))
        assert b"accept-encoding: identity\r\n" in server.requests[0].lower()
    with HostileServer(lambda: reply({"a": 1})) as server:
        assert asyncio.run(ask(server.url)).json() == {"a": 1}


def test_a_call_of_a_client_without_limits_ends_in_time():
    released = threading.Event()
    start = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"within 0\.1 s"):
        call_within(0.1, released.wait)
    assert time.monotonic() - start < 5
    released.set()
    assert call_within(5.0, lambda: 3) == 3
    for error in (KeyError("a"), TimeoutError("its own")):
        with pytest.raises(type(error), match=r"a|its own"):
            call_within(5.0, lambda error=error: (_ for _ in ()).throw(error))
