"""Where processes that torchrun started again meet: not among the addresses of the dead.

torchrun's agent keeps one store for all restarts, and in it the addresses under which the processes
of the last start could be reached. A process that starts a moment before the others reads those and
connects to nobody, or to whoever has the port now (pytorch/pytorch#135712). How often torchrun has
restarted differs between machines, so it names no start; a store that answers does.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

KEY = "litgrpo/port"  # in the agent's store: of the first process's newest store
SHARED = "TORCHELASTIC_USE_AGENT_STORE"
WAIT_S, TRY_S, PAUSE_S = 1800.0, 2.0, 0.2
_kept: list[TCPStore] = []  # a store ends with its object


def meet_anew() -> None:
    """Let this start of torchrun's processes meet in a store of its own.

    The first process opens it and says where; the others take it once it answers. Afterwards the
    variables say that the first process has the store, as without torchrun's sharing. Nothing
    happens under any other launcher, or when called again.

    Raises:
        TimeoutError: the first process has not come.
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
        port = _answering(agents, host)
    os.environ |= {"MASTER_PORT": str(port), SHARED: str(False)}


def _answering(agents: TCPStore, host: str) -> int:
    """The port of the newest store, when it answers."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            agents.wait([KEY], timedelta(seconds=TRY_S))
            port = int(agents.get(KEY))
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=TRY_S))
        except (DistNetworkError, DistStoreError):  # it is of a start that has ended, or to come
            time.sleep(PAUSE_S)
        else:
            return port
    raise TimeoutError(f"The first process has opened no store on {host} for {WAIT_S:.0f} s.")
