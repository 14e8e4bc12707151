"""Run tests of code that is in another sandbox, and print which of them passed.

Appended to `wire.py`. What belongs to the code is requested from it and arrives as plain data. So
comparisons use Python's own `==`, which the code cannot override.
"""
# mypy: ignore-errors
# ruff: noqa

import ast
import builtins
import importlib
import json
import os
import socket
import sys
from decimal import Decimal, InvalidOperation

MAX_CHARS = 4_000_000  # limit of a reply: the code must not fill this sandbox's memory
# Raised by the code, these would end a loop of the test (`zip`, `all`) as if it had passed.
ENDS_LOOPS = ("StopIteration", "StopAsyncIteration")
GET, CALL = "\0get", "\0call"  # functions in the scope of a test


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
        self.has_answered = False

    def read(self):
        line = self.lines.readline(MAX_CHARS)
        if not line.endswith("\n"):
            raise Gone("no reply")
        return json.loads(line)

    def begin(self, source):
        self.ended = self.has_answered = False
        self.socket.sendall(bytes([1 + source]))  # cannot occur in JSON: it marks the start
        while self.read() != "ready":
            pass  # replies that an earlier test did not read

    def over(self):
        if not self.ended:
            self.socket.sendall(b'"over"\n')
        while not self.ended:
            self.ended = self.read() == "ended"

    def ask(self, **request):
        """Return the reply of the code; raise its exception."""
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        reply = self.read()
        if reply == "ended":
            self.ended = True
            raise Gone("exited")
        self.has_answered |= "function" not in reply
        if "missing" in reply:
            raise Gone("a name is not defined")
        if "raised" in reply:
            raise error_of_code(str(reply["raised"]), decode(reply["arguments"]))
        return reply

    def get(self, name):
        """Return the value of a name of the code; a function arrives as one that asks the code."""
        reply = self.ask(expression=name)
        if "function" in reply:
            return lambda *positional, **named: self.call(name, *positional, **named)
        return decode(reply["value"])

    def call(self, expression, /, *positional, **named):
        """Call what the code has under an expression, such as `f` or `Solution().f`."""
        arguments = encode((positional, named))
        reply = self.ask(expression=expression, arguments=arguments)
        value = decode(reply["value"])
        # A function that returns a value cannot change the arguments: a test that computes the
        # expected value from them would compare the code with itself.
        if value is None and "changed" in reply:
            new_positional, new_named = decode(reply["changed"])
            for old, new in zip(positional, new_positional):
                change(old, new)
            for name in named:
                change(named[name], new_named[name])
        return value


def change(target, new):
    """Change a list, dict or set of the test as the code has changed its copy."""
    if type(target) is not type(new):
        return
    if type(target) is list:
        target[:] = new
    elif type(target) in (dict, set):
        target.clear()
        target.update(new)


def error_of_code(name, arguments):
    """Return an exception that the code raised, for tests that expect one."""
    kind = vars(builtins).get(name)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return Gone(name)  # such as SystemExit
    kind = RuntimeError if name in ENDS_LOOPS else kind
    try:
        return kind(*arguments)
    except TypeError:  # such as UnicodeDecodeError, with arguments that are not plain data
        return RuntimeError(str(arguments))


class Scope(dict):
    """Variables of a test; the names of the code are requested from it."""

    def __missing__(self, name):
        # The code must not replace Python's names, nor define those that a test has forgotten.
        if name in self["\0names"]:
            return self[GET](name)
        if name in sys.stdlib_module_names and name not in vars(builtins):
            self[name] = importlib.import_module(name)
            return self[name]
        raise KeyError(name)


class AskCode(ast.NodeTransformer):
    """Let the code evaluate the methods and attributes of its classes: `Solution(3).f(x)`."""

    # Its objects are never here. The constructor's arguments must be literals; those of the method
    # are computed here. What a call returns is here, so `Solution().f(x).startswith("no")` is not
    # evaluated by the code, which would return True.

    def __init__(self, names):
        self.names = names

    def visit_Call(self, node):
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        if not self.is_member(node.func):
            node.func = self.visit(node.func)
            return node
        return self.ask(CALL, node.func, node.args, node.keywords)

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load) and self.is_member(node):
            return self.ask(GET, node)
        return self.generic_visit(node)

    def ask(self, how, node, arguments=(), keywords=()):
        expression = ast.Constant(ast.unparse(node))
        asked = ast.Call(ast.Name(how, ast.Load()), [expression, *arguments], list(keywords))
        return ast.copy_location(asked, node)

    def is_member(self, node):
        """True for `Solution.f` and `Solution(3).f`, where the code defines `Solution`."""
        if not isinstance(node, ast.Attribute):
            return False
        owner = node.value
        if isinstance(owner, ast.Name):  # a constant is in capitals
            return self.is_class(owner) and not owner.id.isupper()
        if not isinstance(owner, ast.Call) or not self.is_class(owner.func):
            return False
        values = [*owner.args, *(keyword.value for keyword in owner.keywords)]
        return all(map(is_literal, values))

    def is_class(self, node):
        return isinstance(node, ast.Name) and node.id in self.names and node.id[0].isupper()


def is_literal(node):
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def compile_test(text, mode, names):
    """Compile a test; names that it assigns itself are its own."""
    tree = ast.parse(text, "test", mode)
    nodes = list(ast.walk(tree))
    assigned = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assigned |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    tree = AskCode(set(names) - assigned).visit(tree)
    return compile(ast.fix_missing_locations(tree), "test", mode)


def equal(value, expected):
    """Compare plain data; lists equal tuples, because JSON data sets have no tuples."""
    return as_lists(value) == as_lists(expected)


def as_lists(value):
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_lists(item) for key, item in value.items()}
    return value


def same_output(stdout, expected):
    """Compare lines without the spaces at their ends; their numbers may be written differently."""
    lines, expected_lines = (text.rstrip().split("\n") for text in (stdout, expected))
    return len(lines) == len(expected_lines) and all(map(same_line, lines, expected_lines))


def same_line(line, expected):
    if line.rstrip() == expected.rstrip():
        return True
    words, expected_words = line.split(), expected.split()
    return len(words) == len(expected_words) and all(map(same_word, words, expected_words))


def same_word(word, expected):
    try:
        return word == expected or Decimal(word) == Decimal(expected)
    except InvalidOperation:
        return False


def run_test(channel, test):
    """Return True if the code passes a test."""
    if "stdin" in test:
        stdout = channel.ask(stdin=test["stdin"])["stdout"]
        return isinstance(stdout, str) and same_output(stdout, test["stdout"])
    names = test["names"]
    scope = Scope({"__name__": "test", "\0names": names, GET: channel.get, CALL: channel.call})
    if "call" in test:
        return equal(eval(compile_test(test["call"], "eval", names), scope), test["expected"])
    exec(compile_test(test["script"], "exec", names), scope)
    return True


def fails_with_any_code(channel, test, error):
    """True if the test is the cause of an error, not an answer of the code that it evaluates."""
    if not isinstance(error, (ImportError, SyntaxError, SystemExit)):
        return False
    if not channel.has_answered:
        return True
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    file, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
    if isinstance(error, SystemExit):
        return file == getattr(sys.modules.get("unittest.main"), "__file__", None)
    statement = test.get("script", "").split("\n")[line - 1 :][:1] if file == "test" else []
    return isinstance(error, ImportError) and any(
        text.lstrip().startswith(("import ", "from ")) for text in statement
    )


def judge(channel, test):
    """Return + or -, and the reason why a test fails with any code, or ""."""
    channel.begin(test["source"])
    mark, broken = "-", ""
    try:
        mark = "+" if run_test(channel, test) else "-"
    except BaseException as error:
        if fails_with_any_code(channel, test, error):
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
    channel, reasons = CodeChannel(descriptor, seconds), []
    for test in tests:
        # Written one by one: tests that finish before the time limit count.
        mark, broken = judge(channel, test)
        os.write(verdict, mark.encode())
        if broken:
            reasons.append(broken)
    os.write(verdict, "".join(f"\n{reason}" for reason in reasons).encode(errors="replace"))


if __name__ == "__main__":
    main(channel, tests, seconds)
