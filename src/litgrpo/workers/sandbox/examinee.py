"""Serves the functions of judged code to a referee in another sandbox.

Runs behind `wire.py` in a sandbox of its own, which knows neither the tests nor what they expect:
it is told which function to call, with which plain data, and answers with plain data. The code may
do here whatever it likes; all that it can do to its marks is to return something else.
"""
# mypy: ignore-errors
# ruff: noqa

import json
import os
import signal
import socket
import time


def served(channel, source):
    """Answer the requests of one test, in a fresh copy of the code."""
    scope = {"__name__": "solution", "__builtins__": __builtins__}
    kept = {}
    lines = channel.makefile("r")

    def answered(value):
        try:
            return {"value": tagged(value)}
        except (TypeError, ValueError, RecursionError):
            kept[len(kept)] = value
            return {"kept": len(kept) - 1}

    def asked(request):
        target = scope if request["of"] is None else kept[request["of"]]
        name, given = request["name"], request.get("given")
        found = (
            target[name] if target is scope else target if name is None else getattr(target, name)
        )
        if given is None:
            return found
        positional, named = untagged(given)
        own = lambda one: kept[one["\0kept"]] if isinstance(one, dict) and "\0kept" in one else one
        return found(*map(own, positional), **{key: own(one) for key, one in named.items()})

    try:
        exec(compile(source, "solution.py", "exec"), scope)
        failure = None
    except BaseException as error:
        failure = error
    for line in lines:
        request = json.loads(line)
        if request == "over":
            return
        try:
            if failure is not None:
                raise failure
            reply = answered(asked(request))
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = {"raised": kinds, "message": str(error)[:200]}
        channel.sendall(json.dumps(reply).encode() + b"\n")


def main(descriptor, source, seconds):
    """A fresh process for every test; what it left behind is ended with it."""
    channel = socket.socket(fileno=descriptor)
    while byte := channel.recv(1):
        if byte != b"\x01":  # what a test asked after its process had ended
            continue
        channel.sendall(b'"ready"\n')
        child = os.fork()
        if not child:
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            try:
                served(channel, source)
            finally:
                os._exit(0)
        until = time.monotonic() + seconds
        while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        for _ in range(3):  # everything but this process and the sandbox's first
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except OSError:
                break
        channel.sendall(b'"ended"\n')


if __name__ == "__main__":
    main(channel, source, seconds)
