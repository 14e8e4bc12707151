"""Hosts of a private network on this machine: network namespaces and a switch in plain Python.

Each host is a separate network namespace, with a TUN device as its only link. A thread of the
test passes IP packets between them, unless the test has cut a link. It needs no name in /run/netns:
a namespace ends with its last process.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")
TUN = "/dev/net/tun"
LINK = "link0"
# <sched.h>; <linux/if_tun.h>: TUNSETIFF, and IFF_TUN | IFF_NO_PI (IP packets, no header before it).
CLONE_NEWNET, TUNSETIFF, IP_ONLY = 0x40000000, 0x400454CA, 0x1001
MTU = 1500


class Host:
    """A network namespace, which the one thread of this object has entered.

    Args:
        number: from 1; the last byte of its address.

    Attributes:
        address: IPv4 address of its link.
        link: the TUN device; reading it takes a packet that the host sends.
    """

    def __init__(self, number: int) -> None:
        self.number, self.address = number, f"10.77.0.{number}"
        self._started: list[subprocess.Popen[bytes]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"host-{number}")
        try:
            self.link = self.run(self._enter)
        except BaseException:
            self._thread.shutdown()
            raise
        self._namespace = self.run(lambda: os.stat("/proc/thread-self/ns/net"))

    def _enter(self) -> int:
        """Give this thread a separate network, which processes that it starts share."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "network namespace")
        link = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(link, TUNSETIFF, struct.pack("16sH22x", LINK.encode(), IP_ONLY))
            for words in (
                f"addr add {self.address}/24 dev {LINK}",
                f"link set {LINK} mtu {MTU} up",
                "link set lo up",
            ):
                subprocess.run(["ip", *words.split()], check=True, capture_output=True)
        except BaseException:
            os.close(link)
            raise
        return link

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function in this host's network, where its sockets and processes stay."""
        return self._thread.submit(function).result()

    def set_option(self, name: str, value: int) -> None:
        """Do what `sysctl -w name=value` does, for this host alone."""
        path = Path("/proc/sys", *name.split("."))
        self.run(lambda: path.write_text(str(value)))

    def start(self, command: list[str], output: Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on this host, which writes to the end of a file."""
        with output.open("ab") as file:
            process = self.run(
                lambda: subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    **options,
                )
            )
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """Processes of this host."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if os.path.samestat((path / "ns/net").stat(), self._namespace):
                    found.append(int(path.name))
        return found

    def signal(self, signum: int) -> None:
        """Send a signal to all processes of this host."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def kill(self) -> None:
        """Kill every process of this host; also those that are started meanwhile."""
        while any(_is_running(pid) for pid in self.pids()):
            self.signal(signal.SIGKILL)
            time.sleep(0.05)
        for process in self._started:
            process.wait()

    def close(self) -> None:
        """Kill what runs here, and give the network back."""
        self.kill()
        os.close(self.link)
        self._thread.shutdown()


def _is_running(pid: int) -> bool:
    """Return False for a process that has ended and is not reaped yet, too."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Network:
    """A switch that connects hosts, each by one link.

    Args:
        hosts: the hosts.

    Attributes:
        cut: addresses of hosts whose links pass nothing.
        packets: number of packets that were passed on.
    """

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts, self.cut, self.packets = hosts, set[str](), 0
        self._lost: list[Host] = []
        self._ended = threading.Event()
        self._links = {socket.inet_aton(host.address): host.link for host in hosts}
        self._thread = threading.Thread(target=self._forward, name="switch", daemon=True)

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for host in (*self.hosts, *self._lost):
            host.close()

    def power_off(self, host: Host) -> Host:
        """End a host and its link without a last packet; return the one that can replace it.

        The kernel closes the connections of killed processes; here its packets are never read.
        """
        self.cut = {host.address}
        new = Host(host.number)
        self._lost.append(host)
        self.hosts[self.hosts.index(host)] = new
        self._links[socket.inet_aton(host.address)] = new.link
        host.kill()
        return new

    def _forward(self) -> None:
        """Pass packets on until the network ends."""
        while not self._ended.is_set():
            ready, _, _ = select.select([*self._links.values()], [], [], 0.05)
            for link in ready:
                with suppress(BlockingIOError):
                    while True:
                        self._deliver(os.read(link, MTU))

    def _deliver(self, packet: bytes) -> None:
        """Write a packet to the link of its target, unless a link on its way is cut."""
        source, target = packet[12:16], packet[16:20]
        if packet[0] >> 4 != 4 or source not in self._links or target not in self._links:
            return  # IPv6 and multicast
        if not self.cut & {socket.inet_ntoa(source), socket.inet_ntoa(target)}:
            self.packets += 1
            os.write(self._links[target], packet)


@contextmanager
def connect_hosts(count: int) -> Iterator[Network]:
    """Hosts in one network; nothing of them is left afterwards.

    Skips the test, with the reason, where this is not allowed.
    """
    hosts = list[Host]()
    try:
        for number in range(count):
            hosts.append(Host(number + 1))
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        for host in hosts:
            host.close()
        pytest.skip(f"network namespaces with TUN devices (root, Linux): {error}")
    with Network(hosts) as network:
        yield network
