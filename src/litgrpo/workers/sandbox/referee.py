"""Run tests of code that is in another sandbox, and print which of them passed.

Appended to `wire.py`. The names that belong to the code are requested from it. A value arrives as
plain data, any other object as a `RemoteObject` whose methods can be called. The results are plain
data, so comparisons use Python's own `==`, which the code cannot override.
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
MAX_CLASSES = 50  # of an exception
# Raised by the code, these would end a loop of the test (`zip`, `all`) as if it had passed.
ENDS_LOOPS = ("StopIteration", "StopAsyncIteration")


class Gone(BaseException):
    """The code's process exited or broke the protocol, or the code lacks a name.

    Not an Exception: a test that expects one has not passed.
    """


class CodeChannel:
    """Connection to the code's sandbox."""

    def __init__(self, descriptor, seconds):
        self.socket = socket.socket(fileno=descriptor)
        self.socket.settimeout(seconds + 1.0)
        self.lines = self.socket.makefile("r", errors="replace")
        self.ended = False
        self.callbacks, self.errors = [], {}

    def read(self):
        line = self.lines.readline(MAX_CHARS)
        if not line.endswith("\n"):
            raise Gone("no reply")
        return json.loads(line)

    def send(self, message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def begin(self, source):
        self.ended = False
        self.callbacks, self.errors = [], {}
        self.socket.sendall(bytes([1 + source]))  # cannot occur in JSON: it marks the start
        while self.read() != "ready":
            pass  # replies that an earlier test did not read

    def over(self):
        if not self.ended:
            self.socket.sendall(b'"over"\n')
        while not self.ended:
            self.ended = self.read() == "ended"

    # --- plain data and what is not ---

    def encode(self, value):
        return encode(value, self.keep)

    def keep(self, value):
        """Pass an object of the code by its number, and a function of the test as a callback."""
        if isinstance(value, RemoteObject):
            return {"kept": value._number}
        if vars(builtins).get(getattr(value, "__name__", None)) is value:
            return {"builtin": value.__name__}
        if not callable(value):
            raise TypeError(f"{type(value).__name__} is not plain data")
        self.callbacks.append(value)
        return {"callback": len(self.callbacks) - 1}

    def decode(self, node):
        known = {
            "kept": lambda number: RemoteObject(self, int(number)),
            "callback": lambda number: self.callbacks[int(number)],
            "error": self.error_class,
        }
        return decode(node, known)

    def error_class(self, lineage):
        """Return a class for an exception of the code, with the same relations to others."""
        kind = Gone
        for each in reversed(list(lineage)[:MAX_CLASSES]):
            if isinstance(each, int):
                if each not in self.errors:
                    self.errors[each] = type(f"Error{each}", (kind,), {})
                kind = self.errors[each]
            elif each in ENDS_LOOPS:
                kind = RuntimeError
            else:
                # Looked up by name among Python's own classes; the code cannot define one here.
                found = vars(builtins).get(str(each))
                if isinstance(found, type) and issubclass(found, Exception):
                    kind = found
        return kind

    def error_of(self, reply):
        """Return the code's exception, for tests that expect one."""
        kind, given = self.error_class(reply["raised"]), decode(reply["args"])
        try:
            error = kind(*given)
        except TypeError:  # such as UnicodeDecodeError, with arguments that are not plain data
            error = RuntimeError(str(given))
        error.of_code = True
        return error

    # --- requests ---

    def ask(self, of, name, given=None, **request):
        request |= {"of": of, "name": name}
        if given is not None:
            request["given"] = self.encode(given)
        self.send(request)
        reply = self.read()
        while isinstance(reply, dict) and "callback" in reply:
            self.send(self.call_back(reply))
            reply = self.read()
        if not isinstance(reply, dict):
            self.ended = True
            raise Gone("exited")
        if "missing" in reply:
            raise Gone(f"{name} is not defined")
        if "raised" in reply:
            raise self.error_of(reply)
        if "next" in request and "end" in reply:
            raise StopIteration
        value = self.decode(reply["value"])
        # A function that returns a value cannot change the arguments: a test that computes the
        # expected value from them would compare the code with itself.
        for place, node in reply.get("changed", ()) if value is None else ():
            change(given[isinstance(place, str)][place], self.decode(node))
        return value

    def call_back(self, message):
        """Call a function of the test for the code."""
        try:
            positional, named = self.decode(message["given"])
            value = self.callbacks[int(message["callback"])](*positional, **named)
            return {"result": self.encode(value)}
        except Exception as error:
            known = [each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins"]
            return {"raised": known[0], "message": str(error)[:200]}


def change(target, new):
    """Change a list, dict or set of the test as the code has changed its copy."""
    if type(target) is not type(new):
        return
    if type(target) is list:
        target[:] = new
    elif type(target) in (dict, set):
        target.clear()
        target.update(new)


class RemoteObject:
    """Object of the code that is not plain data. It cannot be compared.

    An object with an `__eq__` that always returns True would pass every test.
    """

    __slots__ = ("_channel", "_number")

    def __init__(self, channel, number):
        self._channel, self._number = channel, number

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask(self._number, name)

    def __call__(self, *given, **named):
        return self._channel.ask(self._number, None, (given, named))

    def __len__(self):
        try:
            return int(self._channel.ask(self._number, "__len__", ((), {})))
        except AttributeError as error:  # list() ignores a TypeError
            raise TypeError("no length") from error

    def __getitem__(self, key):
        return self._channel.ask(self._number, "__getitem__", ((key,), {}))

    def __str__(self):
        return str(self._channel.ask(self._number, "__str__", ((), {})))

    def __iter__(self):
        found = self._channel.ask(self._number, "__iter__", ((), {}))
        if not isinstance(found, RemoteObject):
            raise TypeError("not an iterator")
        return found

    def __next__(self):
        return self._channel.ask(self._number, None, next=True)

    def __bool__(self):
        raise TypeError("an object of the code has no truth value")

    def __contains__(self, item):
        raise TypeError("compare plain data: list(...) reads an iterator")


class Scope(dict):
    """Variables of a test; the names of the code are requested from it."""

    def __missing__(self, name):
        # The code must not replace Python's names, nor define those that a test has forgotten.
        if name in self["\0names"]:
            return self["\0channel"].ask(None, name)
        if name in sys.stdlib_module_names and name not in vars(builtins):
            self[name] = importlib.import_module(name)
            return self[name]
        raise KeyError(name)


def equal(found, expected):
    """Compare plain data; lists equal tuples, because JSON data sets have no tuples."""
    return as_lists(found) == as_lists(expected)


def as_lists(value):
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_lists(item) for key, item in value.items()}
    return value


def judge(channel, test):
    """Return + or -, and the reason why a test fails with any code, or ""."""
    scope = Scope({"__name__": "test", "\0channel": channel, "\0names": test["names"]})
    channel.begin(test["source"])
    mark, broken = "-", ""
    try:
        if "call" in test:
            passed = equal(eval(compile(test["call"], "test", "eval"), scope), test["expected"])
        else:
            exec(compile(test["script"], "test", "exec"), scope)
            passed = True
        mark = "+" if passed else "-"
    except BaseException as error:
        own = isinstance(error, (ImportError, SyntaxError, SystemExit))
        if own and not getattr(error, "of_code", False):
            broken = f"{type(error).__name__}: {error}"
    channel.over()
    return mark, broken


def main(descriptor, tests, seconds):
    """Print + or - for each test, and the reasons why tests are broken."""
    # Tests may print; only this descriptor carries results.
    verdict = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    line, reasons = CodeChannel(descriptor, seconds), []
    for one in tests:
        # Written one by one: tests that finish before the time limit count.
        mark, broken = judge(line, one)
        os.write(verdict, mark.encode())
        if broken:
            reasons.append(broken)
    os.write(verdict, "".join(f"\n{each}" for each in reasons).encode(errors="replace"))


if __name__ == "__main__":
    main(channel, tests, seconds)
