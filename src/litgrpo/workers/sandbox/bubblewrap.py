"""Python in bubblewrap: no network, no files but Python's own, limits of everything."""

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
LOOK_S = 0.05  # between two looks at the memory of all processes
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
INSTALL = "install it (`apt install bubblewrap`, `dnf install bubblewrap`)"
NAMESPACES = (
    "bubblewrap cannot start here (%s): allow user namespaces"
    " (`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu"
    " `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in Docker"
    " `--security-opt seccomp=unconfined`)"
)
# User ids of root's sandboxes, each its own, so that the kernel counts processes for each alone.
FIRST_USER, USERS = 40_000, 20_000
_numbers = count(os.getpid() * 101)


@dataclass(frozen=True)
class SandboxLimits:
    """What code in a sandbox may use.

    Args:
        seconds: on the clock, start included (about 0.05 s).
        memory_mib: of all its processes together, and of the address space of each.
        processes: and threads, that may exist at once.
        output_chars: that it may print; more ends it.
        disk_mib: of its folder /tmp.
    """

    seconds: float = 5.0
    memory_mib: int = 512
    processes: int = 16
    output_chars: int = 100_000
    disk_mib: int = 16

    def __post_init__(self) -> None:
        """Refuse limits under which nothing runs."""
        above("seconds", self.seconds, 0)
        at_least("memory_mib", self.memory_mib, 64)
        at_least("processes", self.processes, 1)
        at_least("output_chars", self.output_chars, 1)
        at_least("disk_mib", self.disk_mib, 1)

    def of_a_process(self) -> dict[str, int]:
        """The kernel's limits, by their names in `resource`."""
        return {
            "RLIMIT_AS": self.memory_mib * MIB,
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.disk_mib * MIB,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }


@dataclass(frozen=True)
class SandboxResult:
    """How code in a sandbox ended.

    Args:
        code: exit code; negative, or 128 and more, where a signal ended it.
        output: what it printed, stdout and stderr as they came, at most `output_chars`.
        ended: the limit that ended it: `seconds`, `memory_mib` or `output_chars`; "" for none.
    """

    code: int
    output: str
    ended: str = ""


@dataclass
class RunningSandbox:
    """Code that runs; `wait` for it or `kill` it.

    Args:
        process: bubblewrap itself; when it dies, the kernel ends all in it.
        limits: what ends it.
        began: seconds on the clock of `time.monotonic`.
    """

    process: subprocess.Popen[bytes]
    limits: SandboxLimits
    began: float = field(default_factory=time.monotonic)

    def wait(self) -> SandboxResult:
        """Until it ends, or a limit ends it; no process of it is left then."""
        printed, ended = bytearray(), ""
        pipe = self.process.stdout
        assert pipe is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(pipe, selectors.EVENT_READ)
                while not ended:
                    piece = os.read(pipe.fileno(), 65_536) if ready.select(LOOK_S) else None
                    if piece == b"":
                        break
                    printed += piece or b""
                    ended = self._exceeded(len(printed))
            left = self.began + self.limits.seconds - time.monotonic()
            ended = ended or self._ends_within(max(left, LOOK_S))
        finally:
            self.kill()
        text = printed[: self.limits.output_chars].decode("utf-8", "replace")
        return SandboxResult(self.process.returncode, text, ended)

    def _exceeded(self, printed: int) -> str:
        """The name of a limit that is exceeded; "" for none."""
        over = {
            "output_chars": printed > self.limits.output_chars,
            "seconds": time.monotonic() - self.began > self.limits.seconds,
            "memory_mib": memory_of(self.process.pid) > self.limits.memory_mib * MIB,
        }
        return next((name for name, is_over in over.items() if is_over), "")

    def _ends_within(self, seconds: float) -> str:
        """Wait for code that closed its output; "seconds" if it takes too long."""
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
        """End it with all its processes; nothing happens where it has ended."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def memory_of(pid: int) -> int:
    """Bytes in memory of a process's descendants; those that end meanwhile count nothing."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
            for task in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{task}/children").read_text()
                waiting += map(int, children.split())
        except OSError:
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def available() -> bool:
    """Whether code can be run in a sandbox here."""
    return unavailable_reason() == ""


@cache
def unavailable_reason() -> str:
    """Why there is no sandbox here, and what to do, in one sentence; "" where there is one."""
    if shutil.which("bwrap") is None:
        return f"there is no bubblewrap: {INSTALL}"
    if platform.machine() not in MACHINES:
        known = ", ".join(MACHINES)
        return f"system calls of {platform.machine()} cannot be filtered, only those of {known}"
    tried = _started("print(6 * 7)", SandboxLimits(seconds=20.0)).wait()
    if tried.output == "42\n" and tried.code == 0:
        return ""
    last = (tried.output.strip().splitlines() or [f"exit code {tried.code}"])[-1]
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
    """Start Python code in a sandbox of its own.

    Args:
        code: a Python program.
        limits: what it may use.
        names: variables of it, as JSON can hold them.
        files: {path below /tmp: text}, written before it starts.
        packages: folders of installed packages that it may read and import; none by default.
        descriptors: files of this process that it gets under the same numbers.

    Raises:
        ValueError: there is no sandbox here; says what to do.
    """
    reason = unavailable_reason()
    if reason:
        raise ValueError(f"code runs in a sandbox only, and {reason}")
    given = {"names": dict(names or {}), "files": dict(files or {})}
    return _started(
        code, limits or SandboxLimits(), **given, packages=packages, descriptors=descriptors
    )


def run(code: str, limits: SandboxLimits | None = None, **given: Any) -> SandboxResult:
    r"""Run Python code in a sandbox of its own and wait for it; arguments as of `start`.

    Example:
        >>> run("print(6 * 7)").output if available() else "42\n"
        '42\n'
    """
    return start(code, limits, **given).wait()


def _started(
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
    with tempfile.TemporaryFile() as calls:
        calls.write(program(platform.machine()))
        calls.seek(0)
        command = [
            *("bwrap", *_rights(is_root), *_folders(limits, packages)),
            *("--seccomp", str(calls.fileno()), "--clearenv", "--setenv", "PATH", "/usr/bin"),
            *("--setenv", "HOME", "/tmp", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"),
            *("--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1"),
            *(_python(), "-I", "-u", "-c", INSIDE.read_text(encoding="utf-8")),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(calls.fileno(), *descriptors),
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
    running = RunningSandbox(process, limits)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(payload).encode())
        process.stdin.close()
    except BrokenPipeError:  # it ended at once; what it said is in its output
        process.stdin = None
    return running


def _rights(is_root: bool) -> list[str]:
    """Namespaces of its own for everything.

    Root's sandboxes do without a user namespace: in one, root would still be root for the kernel's
    count of processes. They give up root for a user id of their own instead, first of all.
    """
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    user = user if is_root else ["--unshare-user"]
    return [*apart, "--unshare-cgroup-try", *user, "--die-with-parent", "--new-session"]


def _folders(limits: SandboxLimits, packages: Sequence[str]) -> list[str]:
    """Python and the system's libraries to read, a small /tmp to write, nothing else."""
    size = str(limits.disk_mib * MIB)
    libraries = os.path.join(sys.base_prefix, "lib")
    # bubblewrap makes folders above others for their owner only; root's code is another user.
    above_them = dict.fromkeys(
        str(parent)
        for path in (*SYSTEM, libraries, _python(), *packages)
        for parent in reversed(Path(path).parents[:-1])
    )
    words = [word for path in above_them for word in ("--perms", "0755", "--dir", path)]
    words += [word for path in SYSTEM for word in ("--ro-bind-try", path, path)]
    words += ["--ro-bind", libraries, libraries, "--ro-bind", _python(), _python()]
    # What is installed is not Python's: hidden, but for what was asked for.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    hidden = [os.path.join(libraries, version, "site-packages"), "/usr/lib/python3/dist-packages"]
    words += [word for path in hidden if os.path.isdir(path) for word in ("--tmpfs", path)]
    words += [word for path in packages for word in ("--ro-bind", path, path)]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--perms", "1777"]
    words += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", size, "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return [*words, "--remount-ro", "/"]


@cache
def _python() -> str:
    """The interpreter itself, without links and virtual environments."""
    return os.path.realpath(sys.executable)
