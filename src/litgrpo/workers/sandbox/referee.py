"""Runs tests of code that is in another sandbox, and prints which of them passed.

Runs behind `wire.py`. A name that a test uses and that neither it nor Python defines is looked for
in the code: a function stands for itself, a value comes as plain data, anything else as an object
whose methods can be called. What comes back is plain data, so comparisons are Python's own.
"""
# mypy: ignore-errors
# ruff: noqa

import builtins
import importlib
import json
import os
import socket
import sys

LONGEST = 4_000_000  # characters of an answer


class Gone(Exception):
    """The code did not answer, or not in the way that was agreed."""


class CodeChannel:
    """Asks the code."""

    def __init__(self, descriptor, seconds):
        self.socket = socket.socket(fileno=descriptor)
        self.socket.settimeout(seconds + 1.0)
        self.lines = self.socket.makefile("r", errors="replace")
        self.ended = False

    def read(self):
        line = self.lines.readline(LONGEST)
        if not line.endswith("\n"):
            raise Gone("no answer")
        return json.loads(line)

    def begin(self):
        self.ended = False
        self.socket.sendall(b"\x01")  # in no line of JSON
        while self.read() != "ready":
            pass  # what a test before left unread

    def ask(self, of, name, given=None):
        request = {"of": of, "name": name}
        if given is not None:
            request["given"] = tagged(given)
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        reply = self.read()
        if not isinstance(reply, dict):
            self.ended = True
            raise Gone("it ended")
        if "raised" in reply:
            raise error_of(reply)
        if "kept" in reply:
            return Kept(self, int(reply["kept"]))
        return untagged(reply["value"])

    def over(self):
        if not self.ended:
            self.socket.sendall(b'"over"\n')
        while not self.ended:
            self.ended = self.read() == "ended"


def error_of(reply):
    """The exception that the code raised, as the nearest one that Python knows."""
    known = [vars(builtins).get(name) for name in map(str, reply["raised"])]
    kinds = [each for each in known if isinstance(each, type) and issubclass(each, Exception)]
    return (kinds or [RuntimeError])[0](str(reply["message"]))


class Kept:
    """Something of the code that is no plain data. It equals nothing and contains nothing."""

    __slots__ = ("_channel", "_number", "_path")

    def __init__(self, channel, number, path=None):
        self._channel, self._number, self._path = channel, number, path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask(self._number, name)

    def __call__(self, *given, **named):
        if any(isinstance(each, Kept) for each in (*given, *named.values())):
            own = lambda one: {"\0kept": one._number} if isinstance(one, Kept) else one
            given, named = tuple(map(own, given)), {k: own(v) for k, v in named.items()}
        return self._channel.ask(self._number, None, (given, named))

    def __len__(self):
        return int(self._channel.ask(self._number, "__len__", ((), {})))

    def __getitem__(self, key):
        return self._channel.ask(self._number, "__getitem__", ((key,), {}))

    def __str__(self):
        return str(self._channel.ask(self._number, "__str__", ((), {})))

    def __bool__(self):
        raise TypeError("the code's own object is neither true nor false")

    def __iter__(self):
        raise TypeError("compare plain data: list(...) is for the code")

    __contains__ = __iter__


class Scope(dict):
    """The variables of a test; what is missing is the code's."""

    def __missing__(self, name):
        if name in vars(builtins) or name.startswith("__"):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            self[name] = importlib.import_module(name)
            return self[name]
        try:
            return self["\0channel"].ask(None, name)
        except KeyError:
            raise KeyError(name) from None


def equal(found, expected):
    """Whether plain data are equal where JSON's lists stand for tuples, too."""
    return listed(found) == listed(expected)


def listed(value):
    if isinstance(value, (list, tuple)):
        return [listed(item) for item in value]
    if isinstance(value, dict):
        return {str(key): listed(item) for key, item in value.items()}
    return value


def passes(channel, test):
    """Whether the code passes one test."""
    scope = Scope({"__name__": "test", "\0channel": channel})
    channel.begin()
    try:
        if "call" in test:
            passed = equal(eval(compile(test["call"], "test", "eval"), scope), test["expected"])
        else:
            exec(compile(test["script"], "test", "exec"), scope)
            passed = True
    except BaseException:
        passed = False
    channel.over()
    return passed


def main(descriptor, tests, seconds):
    """Print + or - for each test."""
    # Whatever a test prints is not its mark.
    verdict = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    line = CodeChannel(descriptor, seconds)
    for one in tests:
        # Written one by one: when the time is over, those before count.
        os.write(verdict, b"+" if passes(line, one) else b"-")


if __name__ == "__main__":
    main(channel, tests, seconds)
