"""Measure the memory of a sandbox: that of all its processes, files and sockets."""

from __future__ import annotations

import os
import re
from contextlib import suppress

FOLDERS = ("tmp", "dev/shm")  # writable; their files lie in memory
INODE = 2_048  # bytes of kernel memory of an empty file: inode, directory entry and long name
SOCKET = 425_984  # bytes that a socket can hold: twice the kernel's default limit `wmem_max`
# Lines of /proc/PID/status, in KiB. The kernel escapes line breaks in the name of a process.
COUNTED = re.compile(rb"^(?:RssAnon|VmPTE|VmSwap):\s*(\d+)", re.MULTILINE)


def find_first(pid: int) -> int | None:
    """Return bubblewrap's first process inside the sandbox; None until it has started."""
    try:
        children = _read(f"/proc/{pid}/task/{pid}/children").split()
    except OSError:
        return None
    return int(children[0]) if children else None


def memory_of(first: int) -> int | None:
    """Return the bytes of memory that a sandbox uses; None before and after its life."""
    # RLIMIT_AS limits each process alone: with 16 processes the code could use 16 times the memory.
    # Pages of programs and libraries are not counted: they are shared with the whole machine.
    # The code cannot end `first`, whose /proc lists every process of the sandbox, also orphans.
    root = f"/proc/{first}/root"
    try:
        # Until bubblewrap has set up the sandbox, its root is this machine's.
        if os.stat(f"{root}/").st_dev == os.stat("/").st_dev:
            return None
        total = sum(_size_of(f"{root}/{folder}") for folder in FOLDERS)
        total += _number_of_sockets(first) * SOCKET
        processes = [pid for pid in os.listdir(f"{root}/proc") if pid.isdigit()]
    except OSError:
        return None
    for pid in processes:
        with suppress(OSError):  # it exited in the meantime
            total += _memory_of_process(f"{root}/proc/{pid}")
    return total


def _memory_of_process(folder: str) -> int:
    sizes = COUNTED.findall(_read(f"{folder}/status"))
    if not sizes:
        # The first thread has exited; the others show the memory that they shared with it.
        for thread in os.listdir(f"{folder}/task"):
            sizes = sizes or COUNTED.findall(_read(f"{folder}/task/{thread}/status"))
    return sum(map(int, sizes)) * 1024


def _size_of(folder: str) -> int:
    """Return the memory of a tmpfs; bubblewrap cannot limit the number of its files."""
    status = os.statvfs(folder)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return used + (status.f_files - status.f_ffree) * INODE


def _number_of_sockets(first: int) -> int:
    words = _read(f"/proc/{first}/net/sockstat").split()
    return int(words[words.index(b"used") + 1])


def _read(path: str) -> bytes:
    # Not `open`: its buffers take longer than the kernel, and this runs every LOOK_S.
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 65_536)
    finally:
        os.close(file)
