"""Serve the functions of the tested code to a referee in another sandbox.

Appended to `wire.py` and run in a separate sandbox that has neither the tests nor the expected
values. It receives function names with plain arguments, and replies with plain data. The code can
take over this process, but it can only change its score by returning other values.
"""
# mypy: ignore-errors
# ruff: noqa

import builtins
import json
import os
import signal
import socket
import sys
import time
import types


class Callback:
    """Function of the test that was passed as an argument."""

    def __init__(self, code, number):
        self._code, self._number = code, number

    def __call__(self, *given, **named):
        return self._code.call_back(self._number, (given, named))


class Code:
    """The tested code, and its connection to the referee."""

    def __init__(self, channel, source):
        self.channel, self.lines = channel, channel.makefile("r")
        # A module that can be imported: `multiprocessing` pickles functions by their module.
        sys.modules["solution"] = module = types.ModuleType("solution")
        self.scope = vars(module)
        self.kept, self.errors = {}, {}
        try:
            exec(compile(source, "solution.py", "exec"), self.scope)
        except BaseException:  # also SystemExit: the code defines no name then
            self.scope = {}

    # --- plain data and what is not ---

    def encode(self, value):
        return encode(value, self.keep)

    def decode(self, node):
        known = {
            "kept": self.kept.__getitem__,
            "callback": lambda number: Callback(self, number),
            "builtin": vars(builtins).__getitem__,
        }
        return decode(node, known)

    def keep(self, value):
        """Keep an object that is not plain data; the referee gets its number."""
        if isinstance(value, Callback):
            return {"callback": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": self.lineage(value)}
        self.kept[len(self.kept)] = value
        return {"kept": len(self.kept) - 1}

    def lineage(self, kind):
        """Return the names of an exception's built-in classes, and numbers of the code's own."""
        return [
            each.__name__
            if each.__module__ == "builtins"
            else self.errors.setdefault(each, len(self.errors))
            for each in kind.__mro__
        ]

    # --- requests ---

    def send(self, message):
        self.channel.sendall(json.dumps(message).encode() + b"\n")

    def serve(self):
        """Answer requests until the test is over."""
        for line in self.lines:
            request = json.loads(line)
            if request == "over":
                return
            self.send(self.reply(request))

    def call_back(self, number, given):
        """Call a function of the test, which may call the code meanwhile."""
        self.send({"callback": number, "given": self.encode(given)})
        for line in self.lines:
            message = json.loads(line)
            if "result" in message:
                return self.decode(message["result"])
            if "raised" in message:
                raise vars(builtins)[message["raised"]](message["message"])
            self.send(self.reply(message))
        os._exit(0)

    def reply(self, request):
        try:
            if request["of"] is None:
                if request["name"] not in self.scope:
                    return {"missing": request["name"]}
                return {"value": self.encode(self.scope[request["name"]])}
            target = self.kept[request["of"]]
            if "next" in request:
                ended = object()
                value = next(target, ended)
                return {"end": True} if value is ended else {"value": self.encode(value)}
            if request["name"] is not None:
                target = getattr(target, request["name"])
            if "given" not in request:
                return {"value": self.encode(target)}
            return self.call(target, request["given"])
        except BaseException as error:
            return self.failure(error)

    def call(self, function, node):
        positional, named = self.decode(node)
        value = function(*positional, **named)
        reply = {"value": self.encode(value)}
        if value is None:  # as of list.sort: the arguments may have been changed in place
            old_positional, old_named = self.decode(node)
            pairs = [*zip(range(len(positional)), old_positional, positional)]
            pairs += [(name, old_named[name], named[name]) for name in named]
            reply["changed"] = [
                [place, self.encode(new)]
                for place, old, new in pairs
                if isinstance(new, (list, dict, set)) and self.encode(old) != self.encode(new)
            ]
        return reply

    def failure(self, error):
        try:
            given = encode(error.args)
            json.dumps(given)
        except (TypeError, ValueError, RecursionError):
            given = encode((str(error)[:200],))
        return {"raised": self.lineage(type(error)), "args": given}


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
    main(channel, sources, seconds)
