"""Filter of system calls that sandboxed code may not make (classic BPF for seccomp)."""

from __future__ import annotations

import struct

# (AUDIT_ARCH, {call: number}) by `platform.machine()`. The listed calls inspect other processes
# (ptrace, process_vm_*, pidfd_getfd), allocate memory that no limit counts (shmget, memfd_*), leave
# the namespaces (unshare, setns, mount), or reach kernel code that Python does not need and that
# has had many vulnerabilities (bpf, io_uring, userfaultfd, keyctl).
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
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # DENY: the call fails with EPERM
OTHER_TABLE = 0x40000000  # x32 calls start here: each call has a second number, also denied


def program(machine: str) -> bytes:
    """Return the filter for a machine; calls that are not listed are allowed.

    Args:
        machine: name from `platform.machine()`.

    Raises:
        KeyError: the machine is not in `MACHINES`.
    """
    arch, calls = MACHINES[machine]
    numbers = sorted(calls.values())
    # Each line: operation, lines to skip if true, lines to skip if false, operand.
    lines = [
        # A 64-bit process can also make 32-bit calls, whose numbers mean other calls: kill it.
        (LOAD, 0, 0, 4),  # architecture of the call
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # number of the call
        (AT_LEAST, len(numbers) + 1, 0, OTHER_TABLE),
        *((EQUAL, len(numbers) - n, 0, number) for n, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, DENY),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
