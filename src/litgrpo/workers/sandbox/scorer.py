"""Score answers with reasoning-gym's functions, each in a forked process in a sandbox.

Sent as text, appended to `wire.py`. Some of these functions execute the answer. The process that
executes it can set its own score, but nothing else: it has neither the channel nor a way to start
processes or to write files, and it is dead before its score is sent.
"""
# mypy: ignore-errors
# ruff: noqa

import ctypes
import json
import os
import resource
import signal
import socket
import time

SET_DUMPABLE = 4  # PR_SET_DUMPABLE of <sys/prctl.h>
WRITABLE = ("/tmp", "/dev/shm")


def score(task, answer, entry):
    """Return the score of an answer."""
    import reasoning_gym

    return float(reasoning_gym.get_score_answer_fn(task)(answer, decode(json.loads(entry))))


def in_a_process(channel, given, seconds):
    """Return the score; None if there is none."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os.close(channel.fileno())
        for limit, value in (("CPU", int(seconds) + 1), ("NPROC", 0), ("FSIZE", 0)):
            resource.setrlimit(vars(resource)[f"RLIMIT_{limit}"], (value, value))
        try:
            text = json.dumps(score(*given))
        except BaseException:
            text = "null"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    until = time.monotonic() + seconds
    while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.0005)
    for _ in range(3):  # kill everything but this process; a fork may race with the first attempt
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
        except OSError:
            break
    try:
        # The process may have written anything; it becomes one number, or none.
        found = float(json.loads(os.read(reading, 4096)))
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        found = None
    os.close(reading)
    return found


def state():
    """Return what an answer could have changed for later ones: files, limits, priority."""
    limits = [getattr(resource, each) for each in sorted(dir(resource)) if each[:7] == "RLIMIT_"]
    return [
        *(sorted(os.listdir(each)) for each in WRITABLE),
        *map(resource.getrlimit, limits),
        *(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)),
    ]


def serve(descriptor, seconds):
    """Answer each request with its number and a score until the channel closes."""
    import reasoning_gym  # before the forks: the import takes a second

    # The processes of the answers have the same user: forbid that they write this one's memory.
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0)
    channel = socket.socket(fileno=descriptor)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    before = state()
    channel.sendall(b'"ready"\n')
    for line in channel.makefile("rb"):
        number, *given = json.loads(line)
        found = in_a_process(channel, given, seconds)
        reply = {"number": number, "score": found, "reusable": state() == before}
        channel.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    serve(channel, seconds)
