# ruff: noqa: E501 (attacks are texts)
"""The reward for code, and known exploits of its tests."""

import pytest

from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.builtin.code import extract_code, read_tests, unit_tests
from litgrpo.workers import sandbox
from tests.support.raises import raises_for

in_sandbox = pytest.mark.skipif(
    not sandbox.available(), reason=f"sandbox: {sandbox.unavailable_reason()}"
)
SQUARES = ["assert f(2) == 4", "assert f(-3) == 9"]


def share(code, tests=SQUARES, **settings):
    return unit_tests([""], [code], [tests], **settings)[0]


@in_sandbox
def test_the_share_of_tests_that_pass_is_the_reward():
    codes = [f"def f(x): return {right}" for right in ("x * x", "4", "x +")]
    texts = [f"I think:\n```python\n{code}\n```\nDone." for code in codes]
    assert unit_tests([""] * 3, texts, [SQUARES] * 3) == [1.0, 0.5, 0.0]
    assert unit_tests([""], ["def f(x): return 4"], [None]) == [None]


@in_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "passed"),
    [
        (
            "def f(x): return (x, [x])",
            [["f(1)", [1, [1]]], {"call": "f(2)", "expected": [2, 2]}],
            0.5,
        ),
        ("def f(x): return {x: {1.5, None}}", ["assert f(1) == {1: {1.5, None}}"], 1.0),
        ("def f(x): return x / 3", ["assert math.isclose(f(1), 1 / 3)"], 1.0),
        (
            "def f(x): raise ValueError(x)",
            "try:\n f(1)\nexcept ValueError as e:\n a = e\nassert a",
            1.0,
        ),
        ("def f(x): return x", "def check(g):\n assert g(1) == 1\n assert g('a') == 'a'", 1.0),
        (
            "class Stack:\n def __init__(self): self.kept = []\n"
            " def push(self, x): self.kept.append(x)\n def __len__(self): return len(self.kept)",
            "s = Stack()\ns.push(5)\nassert len(s) == 1\nassert s.kept == [5]\nassert len(s) == 2",
            2 / 3,
        ),
        (
            "count = 0\ndef f():\n global count\n count += 1\n return count",
            ["assert f() == 1"] * 3,
            1.0,
        ),
        ("import sys\nsys.setrecursionlimit(50_000)\ndef f(x): return f(x)", SQUARES, 0.0),
        ("def f(x): return float('nan')", ["assert f(1) != f(1)"], 1.0),
    ],
)
def test_tests_of_every_form_are_run_each_in_a_fresh_process(code, tests, passed):
    entry = ["f"] if "check" in tests else None
    assert share(code, tests, entry_point=entry) == pytest.approx(passed)


TRICKS = {
    "equal to all": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def f(x): return Equal(5)
""",
    "an object equal to all": """
class Equal:
    def __getattr__(self, name): return lambda *a, **k: True
    def __eq__(self, other): return True
    def __req__(self, other): return True
    def __bool__(self): return True
    def __contains__(self, other): return True
    def __iter__(self): return iter(range(10**9))
def f(x): return Equal()
""",
    "exit 0": "import sys\nsys.exit(0)",
    "exit 0 in the call": "import os\ndef f(x): os._exit(0)",
    "exit at the end": "import atexit, os\natexit.register(lambda: os.write(1, b'++'))\ndef f(x): pass",
    "print the mark": "import os\nfor fd in range(64):\n try: os.write(fd, b'++')\n except OSError: pass",
    "print the mark in the call": (
        "import os\ndef f(x):\n for fd in range(64):\n  try: os.write(fd, b'++\\n')\n"
        "  except OSError: pass\n return None"
    ),
    "other builtins": """
import builtins
builtins.abs = builtins.isinstance = builtins.all = lambda *a: True
builtins.AssertionError = ValueError
def abs(x): return 0
def all(x): return True
def f(x): return 'no'
""",
    "the text in frames, objects, files, arguments": r"""
import gc, glob, os, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    yield from (each for each in gc.get_objects() if isinstance(each, str))
    for path in glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/cmdline') + glob.glob(
        '/proc/*/environ'
    ):
        try:
            yield open(path).read()
        except OSError:
            pass
    yield sys.stdin.read()
    yield from sys.argv
def f(x):
    for text in texts():
        found = re.search(r'assert f\(%d\) == (\d+)' % x, text.replace('assert f\\(', ''))
        if found:
            return int(found[1])
""",
    "memory of other processes": r"""
import glob, re
def f(x):
    for path in glob.glob('/proc/[0-9]*/mem'):
        try:
            maps = open(path.replace('/mem', '/maps')).read()
            with open(path, 'rb', 0) as memory:
                for low, high in re.findall(r'^(\w+)-(\w+) rw', maps, re.M):
                    memory.seek(int(low, 16))
                    found = re.search(rb'asser[t] f\(%d\) == (\d+)' % x, memory.read(
                        int(high, 16) - int(low, 16)))
                    if found:
                        return int(found[1])
        except (OSError, OverflowError, ValueError):
            pass
""",
    "answers in advance": r"""
import json, os
for fd in range(3, 64):
    try:
        os.write(fd, b'{"value": true}\n"ended"\n"ready"\n{"value": null}\n' * 5)
    except OSError:
        pass
def f(x): return True
""",
    "what is no data": """
import os
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, b'{"value": {"bytes": 99999999999}}\\n' + b'[' * 100_000 + b'\\n')
        except OSError: pass
""",
    "a thread that answers": """
import os, threading
def answer():
    for _ in range(200):
        for fd in range(3, 10):
            try: os.write(fd, b'{"value": true}\\n')
            except OSError: pass
threading.Thread(target=answer, daemon=True).start()
def f(x): return True
""",
    "a process that stays": """
import os
if os.fork():
    os._exit(0)
def f(x): return True
""",
    "assert compiled away": "import ast, sys\nsys.flags\ncompile = eval = exec = None\nassert True\n",
    "modules of the tests": "import sys\nclass M:\n isclose = lambda *a: True\nmath = M()\nsys.modules['math'] = math",
    "kills all": "import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)",
}


@in_sandbox
@pytest.mark.parametrize("code", TRICKS.values(), ids=list(TRICKS))
def test_a_trick_earns_nothing(code):
    tests = ["assert f(2) == 4", "assert 7 in f(1)", "assert abs(f(2) - 4) < 1", "assert all(f(3))"]
    tests += ["assert math.isclose(f(1), 2)", ["f(3)", 9]]
    assert share(code, tests, timeout_s=2.0) == 0.0


@in_sandbox
def test_one_endless_test_costs_itself_and_two_the_rest():
    code = "def f(x):\n while x == 2: pass\n return x * x"
    assert share(code, timeout_s=1.6) == 0.5


@in_sandbox
def test_code_that_takes_too_much_memory_fails_alone():
    code = "def f(x):\n kept = bytearray(10**9) if x == 2 else 0\n return x * x"
    assert share(code) == 0.5


@in_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "print('x' * 10_000_000)\ndef f(x): return x * x",
        "import os\nos.write(2, b'x' * 10_000_000)\ndef f(x): return x * x",
        "def f(x):\n for _ in range(10_000): print('x' * 1_000)\n return x * x",
    ],
    ids=["at the import", "to stderr", "in a call"],
)
def test_correct_code_that_prints_ten_megabytes_passes(code):
    assert share(code, timeout_s=8.0) == 1.0


@in_sandbox
def test_memory_of_the_processes_that_the_code_starts_is_limited():
    code = """
import os, time
def f(x):
    for _ in range(12):
        if os.fork() == 0:
            kept = bytearray(200 << 20)
            time.sleep(60)
    time.sleep(2)
    return x * x
"""
    assert share(code, timeout_s=20.0, memory_mib=256) == 0.0


@in_sandbox
def test_the_reward_has_the_path_that_recipes_name_and_runs_in_a_worker():
    scorer = Scorer({"tests": Reward("litgrpo.rewards.builtin.code.unit_tests")})
    rows = {"tests": [SQUARES], "prompts": [""], "completions": ["def f(x): return x * x"]}
    assert scorer.functions["tests"](**rows) == [1.0]
    from litgrpo.rewards.calls import Call
    from litgrpo.rewards.process_runner import stays_in_process

    assert not stays_in_process(Call("tests", unit_tests, {}, {}, 1))


@pytest.mark.parametrize(
    "tests", [7, [7], [["f(1)"]], ["assert f("], "def f(:", [{"call": "f(1)"}]]
)
def test_tests_that_are_none_are_refused(tests):
    with raises_for("tests"):
        read_tests(tests)


def test_the_last_block_of_python_is_the_code():
    text = "```py\na\n```\n```json\n{}\n```\n```python\nb\n```\n```text\nc\n```"
    assert extract_code(text) == "b\n"
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("x = 1", require_code_block=True) is None
    assert extract_code("```python\nx = 1") == "x = 1"
