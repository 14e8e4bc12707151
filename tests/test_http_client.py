"""Requests with limits; the hostile responses are in the tests of their clients."""

import threading

import pytest

from litgrpo import http_client
from litgrpo.http_client import MalformedReply, parse_json, read_field


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
