"""Processes that torchrun starts again meet each other, and not those that were killed."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from litgrpo.distributed import restarts
from litgrpo.distributed.restarts import KEY, SHARED, open_restart_store


@pytest.fixture
def agents(monkeypatch):
    """The store of torchrun's agent, and the environment variables of its workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        SHARED: "True",
        "RANK": "0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(restarts, "TRY_S", 0.3)
    return store


def test_the_store_of_a_previous_start_is_skipped(agents):
    previous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    previous.set("0", "an address of a previous start")
    agents.set(KEY, str(previous.port))
    del previous
    with ThreadPoolExecutor(1) as other:
        port = other.submit(restarts._wait_for_port, agents, "127.0.0.1")
        open_restart_store()
        assert str(port.result(30)) == os.environ["MASTER_PORT"] != str(agents.port)
    # As torch opens it: the first process has the store, the others are its clients.
    here = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    first = TCPStore(*here, is_master=True, multi_tenant=True, wait_for_workers=False)
    first.set("1", "new")
    second = TCPStore(*here, is_master=False)
    assert second.get("1") == b"new"
    assert not second.check(["0"])
    assert os.environ[SHARED] == "False"
    before = dict(os.environ)
    open_restart_store()  # once is enough
    assert dict(os.environ) == before


def test_a_missing_rank_0_raises_after_the_time_limit(agents, monkeypatch):
    monkeypatch.setattr(restarts, "WAIT_S", 0.5)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TimeoutError, match=r"store on 127\.0\.0\.1"):
        open_restart_store()


def test_other_launchers_keep_their_variables(monkeypatch):
    monkeypatch.delenv(SHARED, raising=False)
    before = dict(os.environ)
    open_restart_store()
    assert dict(os.environ) == before
