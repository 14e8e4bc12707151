"""Run Python code in bubblewrap: no network, only Python's own files, limited resources.

bubblewrap puts the code into new Linux namespaces. `inside.py` is the first program in it: it sets
the kernel's limits, drops root, and executes the code. A system call filter closes what namespaces
leave open. This process watches what the kernel cannot limit: total memory, output, and time.
"""

from __future__ import annotations

import json
import os
import platform
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from litgrpo.arguments import above, at_least
from litgrpo.workers.sandbox.system_calls import MACHINES, program

INSIDE = Path(__file__).with_name("inside.py")
MIB = 1 << 20
LOOK_S = 0.05  # interval between two checks of total memory and time
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
INSTALL = "install it (`apt install bubblewrap`, `dnf install bubblewrap`)"
NAMESPACES = (
    "bubblewrap cannot start here (%s): allow user namespaces"
    " (`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu"
    " `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in Docker"
    " `--security-opt seccomp=unconfined`)"
)
# RLIMIT_NPROC counts all processes of a user. Each sandbox that root starts gets another user id,
# so that concurrent sandboxes do not use up each other's limit.
FIRST_USER, USERS = 40_000, 20_000
_numbers = count(os.getpid() * 101)


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of code in a sandbox.

    Args:
        seconds: wall-clock time, including the start (about 0.05 s).
        memory_mib: memory of all its processes together, and address space of each.
        processes: maximal number of concurrent processes and threads.
        output_chars: maximal output; code that prints more is killed.
        disk_mib: size of its folder /tmp.

    Example:
        >>> SandboxLimits(seconds=2.0, memory_mib=128).of_a_process()["RLIMIT_CPU"]
        3
    """

    seconds: float = 5.0
    memory_mib: int = 512
    processes: int = 16
    output_chars: int = 100_000
    disk_mib: int = 16

    def __post_init__(self) -> None:
        """Reject limits under which Python cannot start."""
        above("seconds", self.seconds, 0)
        at_least("memory_mib", self.memory_mib, 64)
        at_least("processes", self.processes, 1)
        at_least("output_chars", self.output_chars, 1)
        at_least("disk_mib", self.disk_mib, 1)

    def of_a_process(self) -> dict[str, int]:
        """Return the kernel limits of each process, by their names in the module `resource`."""
        return {
            # One allocation fails at once; the total is checked from outside every LOOK_S.
            "RLIMIT_AS": self.memory_mib * MIB,
            # Second line of defence: holds if this process cannot kill the sandbox in time.
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_NPROC": self.processes,  # fork bombs
            "RLIMIT_FSIZE": self.disk_mib * MIB,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,  # a crash must not write a core file
            # Kernel memory that neither RLIMIT_AS nor the check of total memory counts.
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class SandboxResult:
    """Result of code in a sandbox.

    Args:
        code: exit code; negative, or at least 128, after a signal.
        output: stdout and stderr in order, at most `output_chars` characters.
        exceeded: limit that it exceeded: `seconds`, `memory_mib` or `output_chars`; "" for none.

    Example:
        >>> SandboxResult(code=-9, output="", exceeded="seconds").exceeded
        'seconds'
    """

    code: int
    output: str
    exceeded: str = ""


@dataclass
class RunningSandbox:
    """Running sandbox, to `wait` for or to `kill`.

    Args:
        process: bubblewrap; when it dies, the kernel kills every process in the sandbox.
        limits: limits after which it is killed.
        began: start time by `time.monotonic`.

    Example::

        running = start("print(6 * 7)")
        running.wait().output.strip()  # "42"
    """

    process: subprocess.Popen[bytes]
    limits: SandboxLimits
    began: float = field(default_factory=time.monotonic)

    def wait(self) -> SandboxResult:
        """Wait until the code exits or exceeds a limit; no process of it is left."""
        printed, exceeded = bytearray(), ""
        pipe = self.process.stdout
        assert pipe is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(pipe, selectors.EVENT_READ)
                while not exceeded:
                    # Not `communicate`: it would keep unlimited output in this process's memory.
                    piece = os.read(pipe.fileno(), 65_536) if ready.select(LOOK_S) else None
                    if piece == b"":
                        break
                    printed += piece or b""
                    exceeded = self._find_exceeded(len(printed))
            # Closed output does not mean that the code has exited.
            remaining_s = self.began + self.limits.seconds - time.monotonic()
            exceeded = exceeded or self._wait_for_exit(max(remaining_s, LOOK_S))
        finally:
            self.kill()
        text = printed[: self.limits.output_chars].decode("utf-8", "replace")
        return SandboxResult(self.process.returncode, text, exceeded)

    def _find_exceeded(self, printed: int) -> str:
        """Return the name of an exceeded limit, or ""."""
        over = {
            "output_chars": printed > self.limits.output_chars,
            "seconds": time.monotonic() - self.began > self.limits.seconds,
            "memory_mib": memory_of(self.process.pid) > self.limits.memory_mib * MIB,
        }
        return next((name for name, is_over in over.items() if is_over), "")

    def _wait_for_exit(self, seconds: float) -> str:
        """Wait for code that closed its output; return the limit that it exceeds, or ""."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                self.process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if memory_of(self.process.pid) > self.limits.memory_mib * MIB:
                    return "memory_mib"
            else:
                return ""
        return "seconds"

    def kill(self) -> None:
        """Kill all its processes; does nothing after they have exited."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process and its descendants.

    RLIMIT_AS limits each process alone: with 16 processes the code could use 16 times the memory.
    """
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
            for task in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{task}/children").read_text()
                waiting += map(int, children.split())
        except OSError:  # it exited in the meantime
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def available() -> bool:
    """Return True if code can run in a sandbox on this machine."""
    return unavailable_reason() == ""


@cache
def unavailable_reason() -> str:
    """Return the reason why no sandbox is available and how to fix it; "" if one is."""
    if shutil.which("bwrap") is None:
        return f"there is no bubblewrap: {INSTALL}"
    if platform.machine() not in MACHINES:
        known = ", ".join(MACHINES)
        return f"system calls of {platform.machine()} cannot be filtered, only those of {known}"
    # Only a real start shows whether the kernel allows the namespaces.
    trial = _start("print(6 * 7)", SandboxLimits(seconds=20.0)).wait()
    if trial.output == "42\n" and trial.code == 0:
        return ""
    last = (trial.output.strip().splitlines() or [f"exit code {trial.code}"])[-1]
    if "--size" in last or "--perms" in last:
        return f"this bubblewrap is older than 0.7: {INSTALL} in a newer version"
    return NAMESPACES % last


def start(
    code: str,
    limits: SandboxLimits | None = None,
    *,
    names: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    packages: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> RunningSandbox:
    """Start Python code in a new sandbox.

    Args:
        code: Python program.
        limits: resource limits.
        names: global variables of the program, as JSON values.
        files: {path below /tmp: text}, written before the program starts.
        packages: folders of installed packages that it may import; none by default.
        descriptors: file descriptors that the program inherits.

    Raises:
        ValueError: no sandbox is available, with the fix.
    """
    reason = unavailable_reason()
    if reason:
        raise ValueError(f"Could not start a sandbox: {reason}")
    given = {"names": dict(names or {}), "files": dict(files or {})}
    return _start(
        code, limits or SandboxLimits(), **given, packages=packages, descriptors=descriptors
    )


def run(code: str, limits: SandboxLimits | None = None, **given: Any) -> SandboxResult:
    r"""Run Python code in a new sandbox and wait for it; arguments as in `start`.

    Example:
        >>> run("print(6 * 7)").output if available() else "42\n"
        '42\n'
    """
    return start(code, limits, **given).wait()


def _start(
    code: str,
    limits: SandboxLimits,
    names: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    packages: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> RunningSandbox:
    is_root = os.geteuid() == 0
    user = FIRST_USER + next(_numbers) % USERS if is_root else 0
    payload = {
        "code": code,
        "limits": limits.of_a_process(),
        "user": user,
        "names": names or {},
        "files": files or {},
        "packages": list(packages),
    }
    # bubblewrap reads the filter from a descriptor; an unlinked file needs no cleaning up.
    with tempfile.TemporaryFile() as calls:
        calls.write(program(platform.machine()))
        calls.seek(0)
        command = [
            *("bwrap", *_rights(is_root), *_folders(limits, packages)),
            *("--seccomp", str(calls.fileno()), "--clearenv", "--setenv", "PATH", "/usr/bin"),
            *("--setenv", "HOME", "/tmp", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"),
            *("--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1"),
            # -I ignores PYTHON* variables and the current folder, which the code can write.
            *(_python(), "-I", "-u", "-c", INSIDE.read_text(encoding="utf-8")),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(calls.fileno(), *descriptors),
            # The parent's environment may hold secrets; /proc/1/environ would show them.
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
    running = RunningSandbox(process, limits)
    assert process.stdin is not None
    try:  # by stdin: command lines are limited in length, and other users can read them
        process.stdin.write(json.dumps(payload).encode())
        process.stdin.close()
    except BrokenPipeError:  # it exited at once; its output has the reason
        process.stdin = None
    return running


def _rights(is_root: bool) -> list[str]:
    """Return the options for new namespaces and dropped capabilities.

    ipc: no shared memory with other processes. pid: other processes cannot be seen or killed, and
    the kernel kills all processes of the sandbox with its first. net: no interface, not even the
    machine's loopback. uts: the host name is hidden. user: no capability outside the sandbox.

    Root's sandboxes have no user namespace, because RLIMIT_NPROC does not apply to root, even in
    one. `inside.py` switches to an unused user id before any of the code runs, which needs SETUID
    and SETGID.
    """
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    user = user if is_root else ["--unshare-user"]
    # A new session: the code cannot type into the terminal that started the run (TIOCSTI).
    return [*namespaces, "--unshare-cgroup-try", *user, "--die-with-parent", "--new-session"]


def _folders(limits: SandboxLimits, packages: Sequence[str]) -> list[str]:
    """Return the mounts: Python and system libraries read-only, small /tmp and /dev/shm."""
    size = str(limits.disk_mib * MIB)
    libraries = os.path.join(sys.base_prefix, "lib")
    # bubblewrap creates parent folders with mode 0700. Code that root starts runs as another user,
    # which could not enter them.
    parents = dict.fromkeys(
        str(parent)
        for path in (*SYSTEM, libraries, _python(), *packages)
        for parent in reversed(Path(path).parents[:-1])
    )
    words = [word for path in parents for word in ("--perms", "0755", "--dir", path)]
    words += [word for path in SYSTEM for word in ("--ro-bind-try", path, path)]
    words += ["--ro-bind", libraries, libraries, "--ro-bind", _python(), _python()]
    # Installed packages lie below Python's library. An empty tmpfs hides them; requested ones are
    # mounted over it.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    hidden = [os.path.join(libraries, version, "site-packages"), "/usr/lib/python3/dist-packages"]
    words += [word for path in hidden if os.path.isdir(path) for word in ("--tmpfs", path)]
    words += [word for path in packages for word in ("--ro-bind", path, path)]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--perms", "1777"]
    words += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # The root itself is a tmpfs without a size limit, so it is made read-only last.
    return [*words, "--remount-ro", "/"]


@cache
def _python() -> str:
    """Return the interpreter with links resolved; a venv's link points outside the mounts."""
    return os.path.realpath(sys.executable)
