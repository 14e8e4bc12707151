"""Limits of a sandbox, and the thread that holds a running one to them."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from litgrpo.arguments import above, at_least
from litgrpo.workers.sandbox.usage import find_first, memory_of
from litgrpo.workers.server import descendants, kill

MIB = 1 << 20
LOOK_S = 0.05  # interval between two checks of total memory and time
TAIL_CHARS = 1_000  # kept end of an output that is cut off: it names the error
UTF8 = 4  # maximal bytes of a character


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of code in a sandbox.

    Args:
        seconds: wall-clock time, including the start (about 0.05 s).
        memory_mib: memory of all its processes, files and sockets together, and address space of
            each process.
        processes: maximal number of concurrent processes and threads.
        output_chars: kept output; code may print more, which is dropped.
        disk_mib: size of its folder /tmp, and of /dev/shm.

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
        # Python cannot start under lower ones.
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
            # A crash must not write a core file. At 0, the kernel would still start the machine's
            # crash handler; 1 prevents both (fs/coredump.c).
            "RLIMIT_CORE": 1,
            # Kernel memory that neither RLIMIT_AS nor the check of total memory counts.
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 256,  # each timer reserves one
            "RLIMIT_RTPRIO": 0,
        }


@dataclass(frozen=True)
class SandboxResult:
    """Result of code in a sandbox.

    Args:
        code: exit code; negative, or at least 128, after a signal.
        output: stdout and stderr in order, the first `output_chars` characters.
        exceeded: limit for which it was killed: `seconds` or `memory_mib`; "" for none.
        tail: the last 1,000 characters of an output that was cut off, else "".

    Example:
        >>> SandboxResult(code=-9, output="", exceeded="seconds").exceeded
        'seconds'
    """

    code: int
    output: str
    exceeded: str = ""
    tail: str = ""


class RunningSandbox:
    """Running sandbox, to `wait` for or to `kill`.

    A thread reads its output, so that printing never blocks the code, and kills it when it exceeds
    a limit, whether or not anyone waits for it.

    Args:
        process: bubblewrap; when it dies, the kernel kills every process in the sandbox.
        limits: limits after which it is killed.

    Example::

        running = start("print(6 * 7)")
        running.wait().output.strip()  # "42"
    """

    def __init__(self, process: subprocess.Popen[bytes], limits: SandboxLimits) -> None:
        self.process, self.limits = process, limits
        self._until = time.monotonic() + limits.seconds
        self._first: int | None = None
        self._result: Future[SandboxResult] = Future()
        Thread(target=self._watch, name="sandbox", daemon=True).start()

    def wait(self) -> SandboxResult:
        """Wait until the code exits or exceeds a limit; no process of it is left."""
        return self._result.result()

    def kill(self) -> None:
        """Kill all its processes; does nothing after they have exited."""
        self._kill_processes()
        self.wait()

    def _kill_processes(self) -> None:
        if self.process.poll() is not None:
            return
        # The kernel kills what bubblewrap has started only once bubblewrap has asked for it. Before
        # that its first process would stay behind; stopped, bubblewrap starts no further one.
        self.process.send_signal(signal.SIGSTOP)
        for pid in [*descendants(self.process.pid), self.process.pid]:
            kill(pid)

    def _watch(self) -> None:
        try:
            self._result.set_result(self._hold_to_limits())
        except BaseException as error:  # for the thread that waits
            self._result.set_exception(error)

    def _hold_to_limits(self) -> SandboxResult:
        head, tail, exceeded = bytearray(), b"", ""
        pipe = self.process.stdout
        assert pipe is not None
        max_bytes = self.limits.output_chars * UTF8
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(pipe, selectors.EVENT_READ)
                look = 0.0
                while not exceeded:
                    piece = os.read(pipe.fileno(), 65_536) if ready.select(LOOK_S) else None
                    if piece == b"":
                        break
                    if piece:  # what is not kept is read too: a full pipe would stop the code
                        head += piece[: max_bytes - len(head)]
                        tail = (tail + piece)[-TAIL_CHARS * UTF8 :]
                    if time.monotonic() >= look:
                        exceeded = self._find_exceeded()
                        look = time.monotonic() + LOOK_S
            # Closed output does not mean that the code has exited.
            while not exceeded and not self._has_exited():
                exceeded = self._find_exceeded()
        finally:
            self._kill_processes()
            self.process.wait()
            pipe.close()
        output, end = head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")
        is_cut = len(head) == max_bytes or len(output) > self.limits.output_chars
        return SandboxResult(
            self.process.returncode,
            output[: self.limits.output_chars],
            exceeded,
            end[-TAIL_CHARS:] if is_cut else "",
        )

    def _has_exited(self) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LOOK_S)
        return self.process.poll() is not None

    def _find_exceeded(self) -> str:
        """Return the name of an exceeded limit, or ""."""
        if time.monotonic() > self._until:
            return "seconds"
        if self._first is None:
            self._first = find_first(self.process.pid)
        memory = None if self._first is None else memory_of(self._first)
        return "memory_mib" if (memory or 0) > self.limits.memory_mib * MIB else ""
