"""Use a fresh TCPStore after a torchrun restart (works around pytorch/pytorch#135712).

torchrun's agent keeps one store for all restarts, with the addresses of the ranks of the previous
start. A rank that starts earlier than the others reads them and connects to a dead address, or to
another program on that port. The number of restarts differs between machines, so it cannot identify
a start; a store that answers can.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

KEY = "litgrpo/port"  # in the agent's store: port of the newest store of rank 0
SHARED = "TORCHELASTIC_USE_AGENT_STORE"
WAIT_S, TRY_S, PAUSE_S = 1800.0, 2.0, 0.2
_kept: list[TCPStore] = []  # a store ends with its object


def open_restart_store() -> None:
    """Connect the ranks of this torchrun start through a separate store.

    Rank 0 opens the store and publishes its port; the others connect once it answers. Afterwards
    the environment variables name rank 0 as the owner of the store, as without torchrun's shared
    store. Has no effect under other launchers, or when called again.

    Raises:
        TimeoutError: rank 0 did not open a store.
    """
    if os.environ.get(SHARED) != str(True):
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = TCPStore(host, port, is_master=False)
    if os.environ["RANK"] == "0":
        own = TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        _kept.append(own)
        agents.set(KEY, str(own.port))
        port = own.port
    else:
        port = _wait_for_port(agents, host)
    os.environ |= {"MASTER_PORT": str(port), SHARED: str(False)}


def _wait_for_port(agents: TCPStore, host: str) -> int:
    """Wait for the newest store to answer, and return its port."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            agents.wait([KEY], timedelta(seconds=TRY_S))
            port = int(agents.get(KEY))
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TRY_S))
        except (DistNetworkError, DistStoreError):  # of a previous start, or not open yet
            time.sleep(PAUSE_S)
        else:
            return port
    raise TimeoutError(f"Rank 0 did not open a store on {host} within {WAIT_S:.0f} s.")
