"""Run Python code in bubblewrap: no network, only Python's own files, limited resources.

bubblewrap puts the code into new Linux namespaces. `inside.py` is the first program in it: it sets
the kernel's limits, drops root, and executes the code. A system call filter closes what namespaces
leave open. `running.py` watches what the kernel cannot limit: total memory, output, and time.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from litgrpo.workers.sandbox.running import RunningSandbox, SandboxLimits, SandboxResult
from litgrpo.workers.sandbox.system_calls import MACHINES, program
from litgrpo.workers.sandbox.usage import find_first, memory_of

INSIDE = Path(__file__).with_name("inside.py")
MIB = 1 << 20
TRIAL_S = 20.0  # seconds for the first start, on a busy machine
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
INSTALL = "install it (`apt install bubblewrap`, `dnf install bubblewrap`)"
NAMESPACES = (
    "bubblewrap cannot start here (%s): allow user namespaces"
    " (`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu"
    " `sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in Docker"
    " `--security-opt seccomp=unconfined`)"
)
UNCOUNTED = (
    "the memory of a sandbox cannot be read from /proc; this needs a kernel with"
    " CONFIG_PROC_CHILDREN, and the right to read /proc/PID/root of own processes"
)
SETUID = (
    "this bubblewrap is setuid root, which limits its options: remove the bit (`chmod u-s`) and"
    " allow user namespaces"
)
# Files of /proc that code may read; the others describe the kernel and the whole machine.
READABLE_PROC = ("cpuinfo", "meminfo", "stat")
# RLIMIT_NPROC counts all processes of a user. Each sandbox that root starts gets another user id,
# so that concurrent sandboxes do not use up each other's limit.
FIRST_USER, USERS = 40_000, 20_000
_numbers = count(os.getpid() * 101)


def available() -> bool:
    """Return True if code can run in a sandbox on this machine."""
    return unavailable_reason() == ""


@cache
def unavailable_reason() -> str:
    """Return the reason why no sandbox is available and how to fix it; "" if one is."""
    if shutil.which("bwrap") is None:
        return f"there is no bubblewrap: {INSTALL}"
    if platform.machine() not in MACHINES:
        supported = ", ".join(MACHINES)
        return f"system calls of {platform.machine()} cannot be filtered, only those of {supported}"
    # Only a real start shows whether the kernel allows the namespaces.
    trial, counted = _try_start()
    if trial.output == "42\n" and trial.code == 0:
        return "" if counted else UNCOUNTED
    last_line = (trial.output.strip().splitlines() or [f"exit code {trial.code}"])[-1]
    if "setuid" in last_line:
        return SETUID
    if "--size" in last_line or "--perms" in last_line:
        return f"this bubblewrap is older than 0.7: {INSTALL} in a newer version"
    return NAMESPACES % last_line


def _try_start() -> tuple[SandboxResult, bool]:
    """Run a program; return its result, and True if its memory could be read meanwhile."""
    ours, theirs = socket.socketpair()
    code = "import socket\nline = socket.socket(fileno=end)\n"
    code += "line.send(b'started')\nline.recv(1)\nprint(6 * 7)"
    with ours:
        with theirs:
            limits, end = SandboxLimits(seconds=TRIAL_S), theirs.fileno()
            running = _start(code, limits, {"end": end}, [end])
        ours.settimeout(TRIAL_S)
        with suppress(TimeoutError):
            ours.recv(7)  # at the end of the program, if it cannot start
        first = find_first(running.process.pid)
        counted = first is not None and memory_of(first) is not None
    return running.wait(), counted


def start(
    code: str,
    limits: SandboxLimits | None = None,
    *,
    names: Mapping[str, Any] | None = None,
    descriptors: Sequence[int] = (),
) -> RunningSandbox:
    """Start Python code in a new sandbox.

    Args:
        code: Python program.
        limits: resource limits.
        names: global variables of the program, as JSON values.
        descriptors: file descriptors that the program inherits.

    Raises:
        ValueError: no sandbox is available, with the fix.
    """
    reason = unavailable_reason()
    if reason:
        raise ValueError(f"Could not start a sandbox: {reason}")
    return _start(code, limits or SandboxLimits(), names or {}, descriptors)


def run(
    code: str, limits: SandboxLimits | None = None, *, names: Mapping[str, Any] | None = None
) -> SandboxResult:
    r"""Run Python code in a new sandbox and wait for it; arguments as in `start`.

    Example:
        >>> run("print(6 * 7)").output if available() else "42\n"
        '42\n'
    """
    return start(code, limits, names=names).wait()


def _start(
    code: str, limits: SandboxLimits, names: Mapping[str, Any], descriptors: Sequence[int]
) -> RunningSandbox:
    is_root = os.geteuid() == 0
    user = FIRST_USER + next(_numbers) % USERS if is_root else 0
    payload = {
        "code": code,
        "limits": limits.of_a_process(),
        "user": user,
        "names": dict(names),
    }
    # bubblewrap reads the filter from a descriptor; an unlinked file needs no cleaning up.
    with tempfile.TemporaryFile() as calls:
        calls.write(program(platform.machine()))
        calls.seek(0)
        command = [
            *("bwrap", *_rights(is_root), *_folders(limits)),
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
    # By stdin: command lines are limited in length, and other users can read them.
    with suppress(BrokenPipeError):  # it exited at once; its output has the reason
        process.stdin.write(json.dumps(payload).encode())
    with suppress(BrokenPipeError):
        process.stdin.close()
    return running


def _rights(is_root: bool) -> list[str]:
    """Return the options for new namespaces and dropped capabilities."""
    # ipc: no shared memory with other processes. pid: other processes cannot be seen or killed, and
    # the kernel kills all processes of the sandbox with its first. net: no interface, not even the
    # machine's loopback. uts: the host name is hidden. user: no capability outside the sandbox.
    # Root's sandboxes have no user namespace, because RLIMIT_NPROC does not apply to root, even in
    # one. `inside.py` switches to an unused user id before any of the code runs, which needs SETUID
    # and SETGID.
    namespaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    namespaces += ["--hostname", "sandbox"]
    user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if not is_root:
        user = ["--unshare-user", *(["--disable-userns"] if "--disable-userns" in _help() else [])]
    # A new session: the code cannot type into the terminal that started the run (TIOCSTI).
    return [*namespaces, "--unshare-cgroup-try", *user, "--die-with-parent", "--new-session"]


def _folders(limits: SandboxLimits) -> list[str]:
    """Return the mounts: Python and system libraries read-only, small /tmp and /dev/shm."""
    size = ["--size", str(limits.disk_mib * MIB), "--perms", "1777", "--tmpfs"]
    # bubblewrap's own /dev has more devices. /dev/zero is left out: mapping it is an uncounted
    # way to shared memory.
    words = [*size, "/tmp", "--perms", "0755", "--tmpfs", "/dev", *size, "/dev/shm"]
    for name in ("null", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    words += ["--symlink", "/proc/self/fd", "/dev/fd", "--proc", "/proc", *_hidden_proc()]
    # After /tmp and /dev/shm, because Python may lie below them. bubblewrap creates parent folders
    # with mode 0700. Code that root starts runs as another user, which could not enter them.
    libraries = os.path.join(sys.base_prefix, "lib")
    parents = dict.fromkeys(
        str(parent)
        for path in (*SYSTEM, libraries, _python())
        for parent in reversed(Path(path).parents[:-1])
    )
    words += [word for path in parents for word in ("--perms", "0755", "--dir", path)]
    words += [word for path in SYSTEM for word in ("--ro-bind-try", path, path)]
    words += ["--ro-bind", libraries, libraries, "--ro-bind", _python(), _python()]
    # Installed packages lie below Python's library. An empty tmpfs hides them.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    hidden = [os.path.join(libraries, version, "site-packages"), "/usr/lib/python3/dist-packages"]
    hidden = [path for path in hidden if os.path.isdir(path)]
    words += [word for path in hidden for word in ("--tmpfs", path)]
    # A tmpfs without a size limit is made read-only, also that of the root, which comes last.
    closed = (*hidden, "/dev", "/")
    return [
        *words,
        *(word for path in closed for word in ("--remount-ro", path)),
        "--chdir",
        "/tmp",
    ]


@cache
def _hidden_proc() -> list[str]:
    """Return the mounts over the parts of /proc that describe the kernel and the whole machine."""
    # bubblewrap's first process is not held to the limits. An ordinary user's code could write into
    # its memory, which belongs to the same user.
    words = ["--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    for path in sorted(Path("/proc").iterdir()):
        if path.is_symlink() or path.name.isdigit() or path.name in READABLE_PROC:
            continue
        if not path.stat().st_mode & stat.S_IROTH:  # only root's; each mount delays the start
            continue
        if path.is_dir():
            words += ["--perms", "0555", "--tmpfs", str(path), "--remount-ro", str(path)]
        else:
            words += ["--ro-bind", os.devnull, str(path)]
    return words


@cache
def _help() -> str:
    """Return bubblewrap's list of options, which differ between versions."""
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout


@cache
def _python() -> str:
    """Return the interpreter with links resolved; a venv's link points outside the mounts."""
    return os.path.realpath(sys.executable)
