"""Score answers with reasoning-gym's functions, each in a forked process in a sandbox.

Sent as text, appended to `wire.py`. Some of these functions execute the answer, so its effects
must end with its process.
"""
# mypy: ignore-errors
# ruff: noqa

import json
import os
import resource
import signal
import socket
import time


def score(line):
    """Return the score of an answer."""
    import reasoning_gym

    task, answer, entry = json.loads(line)
    return float(reasoning_gym.get_score_answer_fn(task)(answer, decode(json.loads(entry))))


def in_a_process(line, seconds):
    """Return the score as JSON, or the reason why there is none."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
        try:
            text = json.dumps(score(line))
        except BaseException as error:
            text = json.dumps(f"{type(error).__name__}: {error}"[:300])
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    until = time.monotonic() + seconds
    while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.0005)
    for _ in range(3):  # kill its descendants; a fork may race with the first attempt
        try:
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
        except OSError:
            break
    try:
        found = os.read(reading, 4096).decode()
    except BlockingIOError:
        found = ""
    os.close(reading)
    return found or json.dumps("timed out or exited")


def serve(descriptor, seconds):
    """Reply to each line until the channel closes."""
    import reasoning_gym  # before the forks: the import takes a second

    channel = socket.socket(fileno=descriptor)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    channel.sendall(b'"ready"\n')
    for line in channel.makefile("r"):
        channel.sendall(in_a_process(line, seconds).encode() + b"\n")


if __name__ == "__main__":
    serve(channel, seconds)
