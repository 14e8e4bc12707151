"""First program in a sandbox: set limits, drop privileges, run the given code.

It is sent as text and imports the standard library only. It holds no secret, because the code runs
in the same process and can read all of it.
"""

import contextlib
import io
import json
import os
import resource
import sys


def prepare() -> dict[str, object]:
    """Apply the limits of the payload on stdin to this process and its descendants."""
    payload = json.load(sys.stdin.buffer)
    # The code must not wait for input.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    # If the machine runs out of memory, the kernel kills this process before any other.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for name, value in payload["limits"].items():
        resource.setrlimit(vars(resource)[name], (value, value))
    # After the limits, which only root could raise. Groups first: setuid gives up that right.
    if payload["user"]:
        os.setgroups([])
        os.setgid(payload["user"])
        os.setuid(payload["user"])
    return payload


if __name__ == "__main__":
    payload = prepare()
    scope = {"__name__": "__main__", "__builtins__": __builtins__, **payload["names"]}  # type: ignore[dict-item]
    exec(compile(str(payload["code"]), "main.py", "exec"), scope)
