"""Requests with limits; the hostile responses are in the tests of their clients."""

import asyncio
import threading
import time

import httpx2
import pytest
from pydantic import BaseModel

from litgrpo.http import (
    ConnectionLost,
    LimitedClient,
    MalformedReply,
    call_within,
    parse_json,
    read_reply,
)
from tests.support.hostile_server import LARGE, HostileServer, reply


@pytest.mark.parametrize("text", ["", "[" * 100_000, "NaN", "[Infinity]", "9" * 5000, "{'a': 1}"])
def test_what_is_no_json_is_malformed(text):
    with pytest.raises(MalformedReply):
        parse_json(text)


class Numbered(BaseModel):
    id: int


@pytest.mark.parametrize(
    "value", ["null", "[]", '"id"', "7", "{}", '{"id": true}', '{"id": 7.0}', '{"id": "7"}']
)
def test_a_field_of_another_type_is_malformed(value):
    assert read_reply('{"id": 7, "other": null}', Numbered).id == 7
    with pytest.raises(MalformedReply, match=r"id|response"):
        read_reply(value, Numbered)


def test_the_text_of_an_error_holds_no_control_characters_of_a_server():
    class Named(BaseModel):
        ids: dict[str, int]

    with pytest.raises(MalformedReply) as caught:
        read_reply(b'{"ids": {"\\u001b[2J\\n": "\\u202e"}}', Named)
    assert not {"\x1b", "\n", "\u202e"}.intersection(str(caught.value))


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", [each for each in LARGE if "header" not in each])
def test_no_large_and_no_compressed_response_is_read(name, streams):
    async def ask(url):
        async with LimitedClient(1_000_000) as client:
            if not streams:
                return await client.get(url)
            async with client.stream("GET", url) as response:
                return [part async for part in response.aiter_bytes()]

    with HostileServer(LARGE[name]) as server:
        with pytest.raises(httpx2.DecodingError, match=r"compressed|more than 1,000,000 bytes"):
            asyncio.run(ask(server.url))
        assert b"accept-encoding: identity\r\n" in server.requests[0].lower()


def test_a_request_may_have_its_own_limit():
    async def ask(url, **extensions):
        async with LimitedClient(5) as client:
            return (await client.get(url, extensions=extensions)).json()

    with HostileServer(lambda: reply({"a": 1})) as server:
        assert asyncio.run(ask(server.url, max_bytes=8)) == {"a": 1}
        with pytest.raises(httpx2.DecodingError, match="more than 5 bytes"):
            asyncio.run(ask(server.url))


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
