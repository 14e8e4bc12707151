"""Serve the functions of the tested code to a referee in another sandbox.

Appended to `wire.py` and run in a separate sandbox that has neither the tests nor the expected
values. It receives function names with plain arguments, and replies with plain data. The code can
take over this process, but it can only change its score by returning other values.
"""
# mypy: ignore-errors
# ruff: noqa

import json
import os
import signal
import socket
import time


def serve(channel, source):
    """Answer the requests of one test, after executing the code."""
    scope = {"__name__": "solution", "__builtins__": __builtins__}
    kept = {}
    lines = channel.makefile("r")

    def make_reply(value):
        try:
            return {"value": encode(value)}
        except (TypeError, ValueError, RecursionError):
            kept[len(kept)] = value
            return {"kept": len(kept) - 1}

    def evaluate(request):
        target = scope if request["of"] is None else kept[request["of"]]
        name, given = request["name"], request.get("given")
        found = (
            target[name] if target is scope else target if name is None else getattr(target, name)
        )
        if given is None:
            return found
        positional, named = decode(given)
        own = lambda one: kept[one["\0kept"]] if isinstance(one, dict) and "\0kept" in one else one
        return found(*map(own, positional), **{key: own(one) for key, one in named.items()})

    try:
        exec(compile(source, "solution.py", "exec"), scope)
        failure = None
    except BaseException as error:  # also SystemExit; each call of the test raises it
        failure = error
    for line in lines:
        request = json.loads(line)
        if request == "over":
            return
        try:
            if failure is not None:
                raise failure
            reply = make_reply(evaluate(request))
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = {"raised": kinds, "message": str(error)[:200]}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def main(descriptor, source, seconds):
    """Fork a process for each test, and kill its descendants afterwards.

    A test must not see what an earlier one left in the code's variables.
    """
    channel = socket.socket(fileno=descriptor)
    while byte := channel.recv(1):
        if byte != b"\x01":  # request that arrived after the test's process had exited
            continue
        channel.sendall(b'"ready"\n')
        child = os.fork()
        if not child:
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            try:
                serve(channel, source)
            finally:
                os._exit(0)
        until = time.monotonic() + seconds
        while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        for _ in range(
            3
        ):  # -1: all processes but this one and the sandbox's first; a fork may race
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except OSError:
                break
        channel.sendall(b'"ended"\n')


if __name__ == "__main__":
    main(channel, source, seconds)
