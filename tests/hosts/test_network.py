"""The test network does what the tests over it rely on."""

import socket
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.hosts.network import Host, connect_hosts

PORT = 5000


def listen(host: Host) -> socket.socket:
    return host.run(lambda: socket.create_server((host.address, PORT)))


def connect(host: Host, target: Host, timeout_s: float = 30.0) -> socket.socket:
    return host.run(lambda: socket.create_connection((target.address, PORT), timeout_s))


def accept(server: socket.socket) -> str:
    """Address of the next host that connects."""
    taken, (address, _) = server.accept()
    taken.close()
    return address


def test_bytes_arrive_whole_over_a_slow_link_with_loss():
    sent = bytes(range(256)) * 400
    with connect_hosts(2, delay_ms=5, loss=0.05, bytes_per_s=1e6, seed=1) as network:
        first, second = network.hosts
        began = time.monotonic()
        with closing(listen(first)) as server, closing(connect(second, first)) as client:
            taken, _ = server.accept()
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            with closing(taken), taken.makefile("rb") as file:
                assert file.read() == sent
        # 100 kB at 1 MB/s; a slow machine takes longer and never less.
        assert time.monotonic() - began > 0.1
    assert network.packets["lost"] > 0


def test_a_cut_link_passes_nothing_and_heals():
    with connect_hosts(3) as network:
        first, second, third = network.hosts
        with closing(listen(first)) as server:
            network.cut = {second.address}
            with pytest.raises(TimeoutError):
                connect(second, first, timeout_s=0.2)
            connect(third, first).close()
            assert accept(server) == third.address
            network.cut = set()
            connect(second, first).close()
            assert accept(server) == second.address


def test_a_killed_host_has_no_processes_and_others_keep_theirs(tmp_path):
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with connect_hosts(2) as network:
        first, second = network.hosts
        processes = [host.start(sleep, tmp_path / "output") for host in network.hosts]
        assert [host.pids() for host in network.hosts] == [[each.pid] for each in processes]
        first.kill()
        assert processes[0].wait(30) == -9
        assert processes[1].poll() is None
        assert second.pids() == [processes[1].pid]
    assert processes[1].wait(30) == -9


def test_hosts_do_not_see_the_machine():
    with connect_hosts(1) as network, closing(socket.create_server(("127.0.0.1", 0))) as outside:
        port = outside.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            network.hosts[0].run(lambda: socket.create_connection(("127.0.0.1", port), 5))
        links = network.hosts[0].run(lambda: Path("/proc/thread-self/net/dev").read_text())
        assert links.count(":") == 2  # lo and the link
