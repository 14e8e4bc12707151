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
    given = json.load(sys.stdin.buffer)
    # The code must not wait for input.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    # If the machine runs out of memory, the kernel kills this process before any other.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for name, value in given["limits"].items():
        resource.setrlimit(vars(resource)[name], (value, value))
    # After the limits, which only root could raise. Groups first: setuid gives up that right.
    if given["user"]:
        os.setgroups([])
        os.setgid(given["user"])
        os.setuid(given["user"])
    sys.path += given["packages"]
    for path, text in given["files"].items():
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return given


if __name__ == "__main__":
    payload = prepare()
    scope = {"__name__": "__main__", "__builtins__": __builtins__, **payload["names"]}  # type: ignore[dict-item]
    exec(compile(str(payload["code"]), "main.py", "exec"), scope)
