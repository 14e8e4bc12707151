"""What runs first in a sandbox: sets limits, gives up rights, then runs the given code.

It is sent as text and imports the standard library only. Nothing here is secret: code that runs in
the same process may read and change all of it.
"""

import io
import json
import os
import resource
import sys


def prepare() -> dict[str, object]:
    """Limit this process and all that it starts, as the payload on stdin says."""
    given = json.load(sys.stdin.buffer)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    for name, value in given["limits"].items():
        resource.setrlimit(vars(resource)[name], (value, value))
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
