"""A request to a host that is gone ends long before its time limit."""

import asyncio
import time
from contextlib import closing
from socket import create_server

import httpx2
import pytest

from litgrpo import http
from litgrpo.http import LimitedClient, describe_error, make_direct_transport
from tests.hosts.network import connect_hosts

PORT = 5000


@pytest.mark.parametrize("returns", [True, False], ids=["and returns", "for good"])
def test_a_request_ends_if_its_host_vanishes(returns, monkeypatch):
    monkeypatch.setattr(http, "PROBE_S", 1)
    monkeypatch.setattr(http, "MAX_PROBES", 1)
    with connect_hosts(2) as network:
        here, there = network.hosts
        server = there.run(lambda: create_server((there.address, PORT)))

        def lose_host():
            taken, _ = server.accept()
            while not taken.recv(4096).endswith(b"\r\n\r\n"):
                pass
            time.sleep(0.2)  # the request is acknowledged, so nothing is sent again
            network.power_off(there)
            network.cut = set() if returns else network.cut
            taken.close()

        async def ask():
            async with LimitedClient(9, 300.0, transport=make_direct_transport()) as client:
                lost = asyncio.to_thread(lose_host)
                request = client.get(f"http://{there.address}:{PORT}/")
                results = await asyncio.gather(lost, request, return_exceptions=True)
            return results[1]

        with closing(server):
            error = here.run(lambda: asyncio.run(ask()))
    assert isinstance(error, httpx2.TransportError)
    assert not isinstance(error, httpx2.TimeoutException)
    if not returns:
        assert "Connection timed out" in describe_error(error)
