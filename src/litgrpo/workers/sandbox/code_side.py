"""Run the tested code for `test_side.py`, which is in another sandbox.

Appended to `wire.py`. This sandbox has neither the tests nor the expected values: it receives
expressions, plain arguments and inputs, and replies with plain data. The code can take over this
process, but it can only change its score by returning other values.
"""
# mypy: ignore-errors
# ruff: noqa

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import types

MAX_OUTPUT = 1_000_000  # bytes that a program may write to stdout


class Code:
    """The code of one test, in a process of its own."""

    def __init__(self, channel, source):
        self.channel, self.source, self.scope = channel, source, None

    def serve(self):
        """Answer requests until the test is over."""
        for line in self.channel.makefile("r"):
            request = json.loads(line)
            if request == "over":
                return
            try:
                reply = self.answer(**request)
            except BaseException as error:
                reply = describe_error(error)
            self.channel.sendall(json.dumps(reply).encode() + b"\n")

    def answer(self, expression=None, arguments=None, stdin=None):
        """Run the program with an input, or evaluate an expression and call its value."""
        if stdin is not None:
            return {"stdout": run_program(self.source, stdin)}
        if self.scope is None:
            self.scope = define(self.source)
        name = re.match(r"\w+", expression)[0]
        if name not in self.scope:
            return {"missing": name}
        value = eval(expression, self.scope)
        if arguments is None:
            return {"function": expression} if callable(value) else {"value": encode(value)}
        positional, named = decode(arguments)
        value = value(*positional, **named)
        reply = {"value": encode(value)}
        if value is None:  # as of list.sort: the arguments may have been changed in place
            reply["changed"] = encode((positional, named))
        return reply


def define(source):
    """Return the variables of the code; none if it raises or exits."""
    # A module that can be imported: `multiprocessing` pickles functions by their module.
    sys.modules["solution"] = module = types.ModuleType("solution")
    try:
        exec(compile(source, "solution.py", "exec"), vars(module))
    except BaseException:
        return {}
    return vars(module)


def run_program(source, text):
    """Run the code as a program; return what it wrote to stdout, None if it failed."""
    with open("/tmp/stdin", "w", encoding="utf-8") as file:
        file.write(text)
    # A process of its own: it may exit in any way.
    child = os.fork()
    if not child:
        code = 1
        try:
            os.dup2(os.open("/tmp/stdin", os.O_RDONLY), 0)
            os.dup2(os.open("/tmp/stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
            stdout = open(1, "w", closefd=False)
            sys.stdin, sys.stdout = open(0, closefd=False), stdout
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            try:
                exec(compile(source, "solution.py", "exec"), vars(module))
                code = 0
            except SystemExit as error:
                code = 0 if error.code in (None, 0) else 1
            # What Python does when it exits; the program may have closed or replaced its stdout.
            endings = (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, stdout.flush)
            for end in endings:
                with contextlib.suppress(BaseException):
                    end()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status != 0:
        return None
    with open("/tmp/stdout", "rb") as file:
        return file.read(MAX_OUTPUT).decode("utf-8", "replace")


def describe_error(error):
    """Return an exception by its nearest built-in class, whose name the tests know."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        arguments = encode(error.args)
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        arguments = encode((str(error)[:200],))
    return {"raised": kind.__name__, "arguments": arguments}


def main(descriptor, sources, seconds):
    """Fork a process for each test, and kill its descendants afterwards.

    A test must not see what an earlier one left in the code's variables.
    """
    channel = socket.socket(fileno=descriptor)
    while byte := channel.recv(1):
        # The rest are requests that arrived after the test's process had exited.
        number = byte[0] - 1
        if not 0 <= number < len(sources):
            continue
        channel.sendall(b'"ready"\n')
        child = os.fork()
        if not child:
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            try:
                Code(channel, sources[number]).serve()
            finally:
                os._exit(0)
        until = time.monotonic() + seconds
        while time.monotonic() < until and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        # -1: all processes but this one and the sandbox's first; a fork may race.
        for _ in range(3):
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except OSError:
                break
        channel.sendall(b'"ended"\n')


if __name__ == "__main__":
    main(channel, sources, seconds)
