"""A filter of system calls that a sandbox does without, as the kernel reads it (classic BPF)."""

from __future__ import annotations

import struct

# (AUDIT_ARCH, {call: number}) by `platform.machine()`. What is refused lets a process look into
# others, keeps memory that no limit counts, or opens parts of the kernel that Python does not need.
MACHINES = {
    "x86_64": (
        0xC000003E,
        {
            **{"shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "mount": 165},
            **{"unshare": 272, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311},
            **{"add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298},
            **{"memfd_create": 319, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425},
            **{"pidfd_getfd": 438, "memfd_secret": 447},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"shmget": 194, "semget": 190, "msgget": 186, "ptrace": 117, "mount": 40},
            **{"unshare": 97, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271},
            **{"add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241},
            **{"memfd_create": 279, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425},
            **{"pidfd_getfd": 438, "memfd_secret": 447},
        },
    ),
}
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: EPERM
OTHER_TABLE = 0x40000000  # numbers from here on are x32's, a second name for each call


def program(machine: str) -> bytes:
    """The filter for a machine, whose other calls are allowed.

    Args:
        machine: as `platform.machine()` names it.

    Raises:
        KeyError: its calls are not known here.
    """
    arch, calls = MACHINES[machine]
    numbers = sorted(calls.values())
    lines = [
        (LOAD, 0, 0, 4),  # the architecture of the call
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # its number
        (AT_LEAST, len(numbers) + 1, 0, OTHER_TABLE),
        *((EQUAL, len(numbers) - n, 0, number) for n, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
