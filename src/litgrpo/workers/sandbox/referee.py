"""Run tests of code that is in another sandbox, and print which of them passed.

Appended to `wire.py`. A name that neither the test nor Python defines is requested from the code.
A value arrives as plain data, any other object as a `RemoteObject` whose methods can be called.
The results are plain data, so comparisons use Python's own `==`, which the code cannot override.
"""
# mypy: ignore-errors
# ruff: noqa

import builtins
import importlib
import json
import os
import socket
import sys

MAX_CHARS = 4_000_000  # limit of a reply: the code must not fill the referee's memory


class Gone(Exception):
    """The code's process exited, or broke the protocol."""


class CodeChannel:
    """Connection to the code's sandbox."""

    def __init__(self, descriptor, seconds):
        self.socket = socket.socket(fileno=descriptor)
        self.socket.settimeout(seconds + 1.0)
        self.lines = self.socket.makefile("r", errors="replace")
        self.ended = False

    def read(self):
        line = self.lines.readline(MAX_CHARS)
        if not line.endswith("\n"):
            raise Gone("no reply")
        return json.loads(line)

    def begin(self):
        self.ended = False
        self.socket.sendall(b"\x01")  # cannot occur in JSON, so it marks the start of a test
        while self.read() != "ready":
            pass  # replies that an earlier test did not read

    def ask(self, of, name, given=None):
        request = {"of": of, "name": name}
        if given is not None:
            request["given"] = encode(given)
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        reply = self.read()
        if not isinstance(reply, dict):
            self.ended = True
            raise Gone("exited")
        if "raised" in reply:
            raise error_of(reply)
        if "kept" in reply:
            return RemoteObject(self, int(reply["kept"]))
        return decode(reply["value"])

    def over(self):
        if not self.ended:
            self.socket.sendall(b'"over"\n')
        while not self.ended:
            self.ended = self.read() == "ended"


def error_of(reply):
    """Return the code's exception as its nearest built-in class, for tests that expect one."""
    # Looked up by name among Python's own classes; the code cannot define one here.
    known = [vars(builtins).get(name) for name in map(str, reply["raised"])]
    kinds = [each for each in known if isinstance(each, type) and issubclass(each, Exception)]
    return (kinds or [RuntimeError])[0](str(reply["message"]))


class RemoteObject:
    """Object of the code that is not plain data. It cannot be compared.

    An object with an `__eq__` that always returns True would pass every test.
    """

    __slots__ = ("_channel", "_number", "_path")

    def __init__(self, channel, number, path=None):
        self._channel, self._number, self._path = channel, number, path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask(self._number, name)

    def __call__(self, *given, **named):
        if any(isinstance(each, RemoteObject) for each in (*given, *named.values())):
            own = lambda one: {"\0kept": one._number} if isinstance(one, RemoteObject) else one
            given, named = tuple(map(own, given)), {k: own(v) for k, v in named.items()}
        return self._channel.ask(self._number, None, (given, named))

    def __len__(self):
        return int(self._channel.ask(self._number, "__len__", ((), {})))

    def __getitem__(self, key):
        return self._channel.ask(self._number, "__getitem__", ((key,), {}))

    def __str__(self):
        return str(self._channel.ask(self._number, "__str__", ((), {})))

    def __bool__(self):
        raise TypeError("an object of the code has no truth value")

    def __iter__(self):
        raise TypeError("compare plain data: list(...) is for the code")

    __contains__ = __iter__


class Scope(dict):
    """Variables of a test; missing names are requested from the code."""

    def __missing__(self, name):
        # Python looks builtins up after a KeyError; the code must not replace them.
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
    """Compare plain data; lists equal tuples, because JSON data sets have no tuples."""
    return as_lists(found) == as_lists(expected)


def as_lists(value):
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_lists(item) for key, item in value.items()}
    return value


def passes(channel, test):
    """Return True if the code passes a test."""
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
    # Tests may print; only this descriptor carries results.
    verdict = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    line = CodeChannel(descriptor, seconds)
    for one in tests:
        # Written one by one: tests that finish before the time limit count.
        os.write(verdict, b"+" if passes(line, one) else b"-")


if __name__ == "__main__":
    main(channel, tests, seconds)
