"""Filter of system calls that sandboxed code may not make (classic BPF for seccomp)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from errno import EAFNOSUPPORT, ENOSYS, EPERM

# (AUDIT_ARCH, column in the table of calls) by `platform.machine()`.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# {call: (number on x86_64, number on aarch64)}; None: the machine does not have the call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # New namespaces give all capabilities inside them, and mounts in them have no size limit.
    **{"unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41)},
    **{"mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"statmount": (457, 457), "listmount": (458, 458)},
    # These open files by number, past the mounts.
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    # Other processes.
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"process_madvise": (440, 440), "process_mrelease": (448, 448)},
    **{"pidfd_getfd": (438, 438), "kcmp": (312, 272)},
    # Memory that belongs to no process, so that the check of total memory would not see it.
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "remap_file_pages": (216, 234)},
    **{"vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77), "io_setup": (206, 0)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
    **{"landlock_create_ruleset": (444, 444), "seccomp": (317, 277)},
    # Placement of memory on NUMA nodes affects the whole machine.
    **{"mbind": (237, 235), "set_mempolicy": (238, 237), "set_mempolicy_home_node": (450, 450)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # Kernel code that Python does not need and that has had many vulnerabilities.
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217)},
    **{"request_key": (249, 218), "personality": (135, 92), "modify_ldt": (154, None)},
    **{"uselib": (134, None), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42)},
    # Administration; needs capabilities that the code does not have.
    **{"kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105)},
    **{"finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60)},
    **{"quotactl_fd": (443, 443), "syslog": (103, 116), "sethostname": (170, 161)},
    **{"setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171)},
    **{"clock_adjtime": (305, 266), "vhangup": (153, 58)},
}
# The arguments of clone3 lie in memory, which a filter cannot read. If the kernel does not have the
# call, libc uses clone, whose flags the filter reads.
MISSING = {"clone3": (435, 435)}
NEWEST = 462  # newest call that the tables above know (mseal); the kernel seems to have no newer
OTHER_TABLE = 0x40000000  # x32 calls start here: each call has a second number

LOAD, AND_IS_SET, EQUAL, AT_LEAST, RETURN = 0x20, 0x45, 0x15, 0x35, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # ERROR + errno: the call fails

CLONE_NEW = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
F_SETPIPE_SZ, PR_SET_SECCOMP, AF_UNIX = 1031, 22, 1

# (call, its numbers, errno, conditions): the call fails if each condition (index of an argument,
# comparison, operand, expected result) holds.
Condition = tuple[int, int, int, bool]
ARGUMENTS: tuple[tuple[str, tuple[int, int], int, Sequence[Condition]], ...] = (
    ("clone", (56, 220), EPERM, [(0, AND_IS_SET, CLONE_NEW, True)]),
    # A shared anonymous mapping keeps all its memory until its last page is unmapped: one page of
    # address space can hold any amount, and no process shows it.
    (
        "mmap",
        (9, 222),
        EPERM,
        [(3, AND_IS_SET, MAP_ANONYMOUS, True), (3, AND_IS_SET, MAP_SHARED, True)],
    ),
    ("mmap", (9, 222), EPERM, [(3, AND_IS_SET, MAP_HUGETLB, True)]),
    ("fcntl", (72, 25), EPERM, [(1, EQUAL, F_SETPIPE_SZ, True)]),
    ("prctl", (157, 167), EPERM, [(0, EQUAL, PR_SET_SECCOMP, True)]),
    ("prlimit64", (302, 261), EPERM, [(0, EQUAL, 0, False)]),  # limits of other processes
    # asyncio and multiprocessing need AF_UNIX. It reaches only sockets of the same sandbox. Some
    # other families are not bound to a network namespace (AF_VSOCK).
    ("socket", (41, 198), EAFNOSUPPORT, [(0, EQUAL, AF_UNIX, False)]),
    ("socketpair", (53, 199), EAFNOSUPPORT, [(0, EQUAL, AF_UNIX, False)]),
)

Line = tuple[int, int, int, int]  # operation, lines to skip if true, if false, operand
LOAD_NUMBER: Line = (LOAD, 0, 0, 0)
LOAD_ARCH: Line = (LOAD, 0, 0, 4)


def program(machine: str) -> bytes:
    """Return the filter for a machine in `MACHINES`; calls that are not listed are allowed."""
    arch, column = MACHINES[machine]
    lines = [
        # A 64-bit process can also make 32-bit calls, whose numbers mean other calls: kill it.
        *(LOAD_ARCH, (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), LOAD_NUMBER),
        *((AT_LEAST, 0, 1, OTHER_TABLE), (RETURN, 0, 0, ERROR + EPERM)),
        *((AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, ERROR + ENOSYS)),
    ]
    for calls, errno in ((DENIED, EPERM), (MISSING, ENOSYS)):
        for numbers in calls.values():
            number = numbers[column]
            lines += [] if number is None else _fail(number, errno, [])
    for _, numbers_of_both, errno, conditions in ARGUMENTS:
        lines += _fail(numbers_of_both[column], errno, conditions)
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _fail(number: int, errno: int, conditions: Sequence[Condition]) -> list[Line]:
    """Return the lines that let a call fail; they expect and leave its number in the register."""
    tests: list[Line] = []
    for done, (argument, comparison, operand, expected) in enumerate(conditions):
        skip = 2 * (len(conditions) - done) - 1  # to the last line
        branch = (0, skip) if expected else (skip, 0)
        # Only the low half of the 8 bytes: the kernel ignores the other for these arguments.
        tests += [(LOAD, 0, 0, 16 + 8 * argument), (comparison, *branch, operand)]
    body = [*tests, (RETURN, 0, 0, ERROR + errno), *([LOAD_NUMBER] if conditions else [])]
    return [(EQUAL, 0, len(body), number), *body]
