"""Let OpenMP threads sleep instead of spin while other processes use the CPU.

A thread that waits for others at the end of a parallel loop spins for about 3 ms before it sleeps
(libgomp's default). That is fastest as long as all threads have a core. If another process has one
of the cores, threads spin for the one that is not scheduled, at each of thousands of small loops
per iteration, and an iteration can take twenty times as long.

libgomp spins only briefly if there are more threads in its teams than cores
(`gomp_throttled_spin_count_var` in libgomp's env.c, read by `do_spin` in config/linux/wait.h).
`CpuContention` brings that about during contention by teams that do nothing. Numbers of
threads per operation, and so results, do not change.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch

from litgrpo.distributed.messages import rank_zero_info

POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # set by a user who has decided
STAT = Path("/proc/stat")
INTERVAL_S = 0.5
GRAIN_SIZE = 2**15  # at least as many elements as torch gives to one thread
MARGIN = 0.2  # cores; more than what short-lived processes and the kernel use


class CpuContention:
    """Watches the CPU use of other processes, and shortens the spinning of OpenMP threads.

    Does nothing with one thread, without Linux's /proc/stat, or if the user chose a policy by
    `OMP_WAIT_POLICY` or `GOMP_SPINCOUNT`.

    Example:
        >>> contention = CpuContention()
        >>> contention.start()
        >>> contention.stop()
    """

    def __init__(self) -> None:
        # None unless it watches, since an event and a thread cannot be copied with the module.
        self._stopped: threading.Event | None = None
        self._watcher: threading.Thread | None = None
        self._teams: WaitingTeams | None = None
        self._was_told = False

    def start(self) -> None:
        """Watch in a background thread until `stop`."""
        chosen = any(name in os.environ for name in POLICIES)
        if self._watcher or chosen or not STAT.exists() or torch.get_num_threads() == 1:
            return
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(self._stopped,), daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """End the background thread; threads spin again."""
        if self._stopped is not None and self._watcher is not None:
            self._stopped.set()
            self._watcher.join()
            self._stopped = self._watcher = None

    def _watch(self, stopped: threading.Event) -> None:
        before = read_cpu_times()
        while not stopped.wait(INTERVAL_S):
            after = read_cpu_times()
            self.follow(cores_of_others(before, after))
            before = after
        self.follow(0.0)

    def follow(self, others: float) -> None:
        """Let threads sleep if they and other processes need more than the cores there are.

        Args:
            others: cores that other processes used, such as 0.5.
        """
        cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
        is_busy = threads > 1 and others + threads > cores + MARGIN
        if is_busy and self._teams is None:
            self._teams = WaitingTeams(cores, threads)
            if not self._was_told:
                rank_zero_info(
                    f"Other processes use {others:.1f} CPU cores: while they do, OpenMP threads "
                    "sleep instead of spin (see docs/evidence/parity_and_speed.md, 'A busy "
                    "machine')."
                )
                self._was_told = True
        elif not is_busy and self._teams is not None:
            self._teams.end()
            self._teams = None


class WaitingTeams:
    """OpenMP teams that wait, so that there are more threads in teams than cores.

    libgomp keeps a team for each thread that ran a parallel loop, until that thread ends. The size
    of a team is torch's number of threads, which must not change: new threads, such as autograd's,
    would take it over.

    Args:
        cores: number of cores.
        threads: of each team, at least 2.
    """

    def __init__(self, cores: int, threads: int) -> None:
        self._done, self._size = threading.Event(), GRAIN_SIZE * threads
        teams = cores // (threads - 1) + 1
        self._formed = threading.Barrier(teams + 1)
        self._threads = [threading.Thread(target=self._wait, daemon=True) for _ in range(teams)]
        for thread in self._threads:
            thread.start()
        self._formed.wait()

    def _wait(self) -> None:
        torch.ones(self._size).add_(1)
        self._formed.wait()
        self._done.wait()

    def end(self) -> None:
        """Let the teams end."""
        self._done.set()
        for thread in self._threads:
            thread.join()


def read_cpu_times() -> tuple[float, float, float]:
    """Return the seconds that the cores of this process were busy, were there, and worked for it.

    Raises:
        OSError: there is no /proc/stat.
    """
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = there = 0.0
    for line in STAT.read_text().splitlines():
        name, *fields = line.split()
        if name in cores:
            # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
            ticks = [int(field) for field in fields[:8]]
            there += sum(ticks)
            busy += sum(ticks) - ticks[3] - ticks[4]
    own = os.times()
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return busy / ticks_per_s, there / ticks_per_s, own.user + own.system


def cores_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Return how many cores other processes used between two results of `read_cpu_times`.

    Example:
        >>> cores_of_others((0.0, 0.0, 0.0), (2.0, 2.0, 1.25))  # one second of two busy cores
        0.75
    """
    busy, there, own = (new - old for old, new in zip(before, after, strict=True))
    if there <= 0:
        return 0.0
    seconds = there / len(os.sched_getaffinity(0))
    return max(0.0, (busy - own) / seconds)
