"""Processes that torchrun starts again meet each other, and not those that were killed."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from litgrpo.distributed import restarts
from litgrpo.distributed.restarts import KEY, SHARED, meet_anew


@pytest.fixture
def agents(monkeypatch):
    """The store of torchrun's agent, and what it tells its workers."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), SHARED: "True", "RANK": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(restarts, "TRY_S", 0.3)
    return store


def test_a_store_of_a_start_that_has_ended_is_passed_over(agents):
    gone = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gone.set("0", "an address of the dead")
    agents.set(KEY, str(gone.port))
    del gone
    with ThreadPoolExecutor(1) as other:
        port = other.submit(restarts._answering, agents, "127.0.0.1")
        meet_anew()
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
    meet_anew()  # once is enough
    assert dict(os.environ) == before


def test_a_first_process_that_never_comes_is_named(agents, monkeypatch):
    monkeypatch.setattr(restarts, "WAIT_S", 0.5)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TimeoutError, match=r"no store on 127\.0\.0\.1"):
        meet_anew()


def test_other_launchers_share_no_store(monkeypatch):
    monkeypatch.delenv(SHARED, raising=False)
    before = dict(os.environ)
    meet_anew()
    assert dict(os.environ) == before
