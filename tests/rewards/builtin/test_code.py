# ruff: noqa: E501 (attacks are texts)
"""The reward for code, and known exploits of its tests."""

import pytest

from litgrpo.rewards import Reward, Scorer, Scoring
from litgrpo.rewards.builtin.code import (
    extract_code,
    find_undefined,
    read_tests,
    unit_tests,
)
from litgrpo.rewards.calls import UnusableReward
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


# Honest code that looks its own functions and classes up by their module.
WITH_PROCESSES = {
    "Pool": "import multiprocessing as mp\ndef g(x): return x * x\ndef f(x):\n with mp.Pool(2) as p: return p.map(g, [x])[0]",
    "spawned by name": "from concurrent.futures import ProcessPoolExecutor as E\ndef g(x): return x * x\ndef f(x):\n with E(1) as e: return e.submit(g, x).result()",
    "Process": "import multiprocessing as mp\ndef g(x, q): q.put(x * x)\ndef f(x):\n q = mp.SimpleQueue()\n p = mp.Process(target=g, args=(x, q)); p.start(); p.join()\n return q.get()",
    "pickle": "import pickle\nclass A:\n def __init__(self, x): self.x = x\ndef f(x): return pickle.loads(pickle.dumps(A(x))).x ** 2",
    "get_type_hints": "import typing\nclass A:\n x: 'A'\ndef f(x):\n assert typing.get_type_hints(A)['x'] is A\n return x * x",
}


@in_sandbox
@pytest.mark.parametrize("kind", WITH_PROCESSES)
def test_honest_code_may_use_processes_and_pickle(kind):
    assert share(WITH_PROCESSES[kind], timeout_s=20.0) == 1.0


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
            "class Solution:\n def __init__(self, x=1): self.x = x\n def add(self, y): return self.x + y",
            "n = 5\nassert Solution().add(n) == 6\nassert Solution(x=2).x == 2\nassert Solution(3).add(y=0) == 4",
            2 / 3,
        ),
        (
            "class Solution:\n def add(self, x, y): return x + y",
            [["Solution().add(1, 2)", 3], {"call": "abs(Solution().add(-1, -2))", "expected": 3}],
            1.0,
        ),
        ("limit = 7\ndef f(x): return min(x, limit)", ["assert f(9) == limit"], 1.0),
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
    entry = [["f", "limit"]] if "limit" in code else ["f"] if "check" in tests else None
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
    from litgrpo.rewards.runner import stays_in_process

    assert not stays_in_process(Call("tests", unit_tests, {}, {}, 1))


@pytest.mark.parametrize(
    "tests", [7, [7], [["f(1)"]], ["assert f("], "def f(:", [{"call": "f(1)"}], "return f(1)"]
)
def test_tests_that_are_none_are_refused(tests):
    with raises_for("tests", error=UnusableReward):
        read_tests(tests)


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("assert f(2) == 4", {"f"}),
        ("assert np.isclose(f(2), 4)", {"np", "f"}),
        ("import numpy as np\nassert np.isclose(f(2), 4)", {"f"}),
        ("assert math.isclose(f(2), 4)", {"f"}),
        ("assert bisect([1], 1) == 1", {"bisect"}),  # the module is not called
        ("def check(f):\n assert f(1) == 1\ncheck(f)", {"f"}),
        ("def g(x):\n return x\nassert f(g(1)) == [y for y in g(2)]", {"f"}),
        ("def t():\n global x\n x = f(1)\nt()\nassert x == 1", {"f"}),
        ("try:\n f(1)\nexcept Own as e:\n assert str(e)", {"f", "Own"}),
        ("class A:\n def __eq__(self, o): return almost(o)\nassert A() == f(1)", {"almost", "f"}),
    ],
)
def test_undefined_names_are_found(script, names):
    assert find_undefined(script) == names


UNDEFINED = {
    "numpy": "np.testing.assert_allclose(f(2), 4)",
    "a method of TestCase": "assertEqual(f(2), 4)",
    "a helper": "assert almost_equal(f(2), 4)",
    "a helper in one of several": ["assert f(2) == 4", "assert close(f(2), 4)"],
    "a helper in a call": [["approx(f(2))", 4]],
    "no name at all": "assert 1 + 1 == 2",
    "only Python's names": "assert max(1, 2) == 2",
    "no assert": "print(f(2))",
    "no assert in a list": ["f(2)"],
    "a fixture": "def test_f(tmp_path):\n assert f(2) == 4",
}


@pytest.mark.parametrize("tests", UNDEFINED.values(), ids=list(UNDEFINED))
def test_tests_that_cannot_judge_code_are_rejected_as_they_are_read(tests):
    with raises_for("tests", error=UnusableReward):
        read_tests(tests)


@pytest.mark.parametrize(
    ("tests", "entry_point", "names"),
    [
        ("assert f(g(2)) == 4", ["f", "g"], ("f", "g")),
        ("assert bisect.bisect([1], 1) == 1\nassert f(1)", None, ("f",)),
        ("assert max([1, 2]) == 2", "max", ("max",)),
        ("def check(g):\n assert g([1]) == 1", "Solution().total", ("Solution",)),
    ],
)
def test_the_names_of_the_code_can_be_declared(tests, entry_point, names):
    assert read_tests(tests, entry_point).names == names


def test_a_helper_that_is_not_declared_is_rejected():
    with raises_for("close", "entry_point", error=UnusableReward):
        read_tests("assert close(f(2), 4)", "f")
    with raises_for("close", "entry_point", error=UnusableReward):
        read_tests("assert close(f(2), 4)")


@in_sandbox
def test_the_code_cannot_define_a_helper_that_the_tests_lack():
    code = "def f(x): return 0\ndef close(a, b): return True\nclass np: isclose = close"
    with raises_for("close", "entry_point", error=UnusableReward):
        share(code, "assert close(f(2), 4)")


@in_sandbox
def test_tests_that_cannot_be_read_stop_the_run_before_training():
    scorer = Scorer({"tests": Reward("litgrpo.rewards.unit_tests")})
    with raises_for("tests", "no name that the code could define"):
        scorer.check({"tests": [SQUARES, "import sys\nassert sys\nsys.exit(f(2) != 4)"]})
    with raises_for("tests", "is not Python"):
        scorer.check({"tests": [SQUARES, "assert f("]})
    with raises_for("tests", error=UnusableReward):
        read_tests([{"stdin": 1, "stdout": "1"}])


@in_sandbox
@pytest.mark.parametrize("num_workers", [0, None])
def test_a_row_that_is_first_seen_in_training_stops_the_run(num_workers):
    exits = "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(2), 4)\nunittest.main()"
    scorer = Scorer(
        {"tests": Reward("litgrpo.rewards.unit_tests")}, Scoring(num_workers=num_workers)
    )
    columns = {"tests": [SQUARES] * 3 + [exits]}
    with raises_for("tests", "unittest.main"):
        scorer([""] * 4, ["def f(x): return x * x"] * 4, columns, group_size=4)
    scorer.close()


@in_sandbox
@pytest.mark.parametrize(
    "raised",
    ["StopIteration", "StopIteration(4)", "StopAsyncIteration", "type('E', (StopIteration,), {})"],
)
def test_code_cannot_end_a_loop_of_a_test(raised):
    tests = [
        "for got, want in zip(map(f, [1, 2, 3]), [1, 4, 9]): assert got == want",
        "assert all(map(lambda i: f(i) == i * i, range(3)))",
        "assert list(map(f, [1, 2])) != [7]",
        "for got in iter(lambda: f(1), 7): assert got == 7",
        "assert not [x for x in map(f, [1])]",
    ]
    assert share(f"def f(x): raise {raised}", tests) == 0.0
    assert share("def f(x): return x * x", tests[:2]) == 1.0


@in_sandbox
@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError(1)",
        "import sys\nsys.exit()",
        "x = 1",
        "def f(x): import sys; sys.exit()",
        "import os\ndef f(x): os._exit(0)",
    ],
)
def test_code_without_the_function_or_that_exits_raises_no_error_that_a_test_expects(code):
    tests = [
        "try:\n f(-1)\nexcept Exception:\n pass\nelse:\n assert False",
        "try:\n f(-1)\nexcept ValueError:\n pass\nelse:\n assert False",
        "assert f(2) == 4",
    ]
    assert share(code, tests) == 0.0
    right = "def f(x):\n if x < 0: raise ValueError(x)\n return x * x"
    assert share(right, tests) == 1.0


HONEST = {
    "a list changed in place": ("def f(x): x.sort()", "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]"),
    "a list grown in place": ("def f(x): x += [{4}]", "xs = [3]\nf(xs)\nassert xs == [3, {4}]"),
    "a dict changed in place": ("def f(*, d): d.pop(1)", "d = {1: 2}\nf(d=d)\nassert d == {}"),
    "a set changed in place": ("def f(s): s.add(2)", "s = {1}\nf(s)\nassert s == {1, 2}"),
    "a matrix changed in place": (
        "def f(m):\n for r in m: r.reverse()",
        "m = [[1, 2], [3, 4]]\nf(m)\nassert m == [[2, 1], [4, 3]]",
    ),
    "a generator": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "a generator in a loop": (
        "def f(n):\n for x in range(n): yield x",
        "total = 0\nfor x in f(4): total += x\nassert total == 6",
    ),
    "next": (
        "def f(n):\n yield n",
        "g = f(1)\nassert next(g) == 1\ntry:\n next(g)\nexcept StopIteration:\n g = None\nassert g is None",
    ),
    "a range": ("def f(n): return range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "an argument that is a range": ("def f(xs): return sum(xs)", "assert f(range(4)) == 6"),
    "a map": ("def f(xs): return map(abs, xs)", "assert list(f([-1])) == [1]"),
    "the text of a KeyError": (
        "def f(x): return {}[x]",
        "try:\n f('a')\nexcept KeyError as error:\n said = str(error)\nassert said == repr('a')",
    ),
}


@in_sandbox
@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(name):
    code, script = HONEST[name]
    assert share(code, [script]) == 1.0


PROGRAM = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 -5", "stdout": "0"}]


@in_sandbox
@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), '')\nsys.exit()", 1.0),
        ("import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()))).encode())", 1.0),
        ("import sys\nfor line in sys.stdin.buffer: print(sum(map(float, line.split())))", 1.0),
        ("if __name__ == '__main__':\n print(3)", 0.5),
        (
            "import threading\ndef main(): print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
            1.0,
        ),
        (
            "import atexit\na = sum(map(int, input().split()))\natexit.register(lambda: print(a))",
            1.0,
        ),
        ("import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()", 1.0),
        ("import io, sys\nprint(sum(map(int, input().split())))\nsys.stdout = io.StringIO()", 1.0),
        ("print(3, flush=True)\nraise ValueError", 0.0),
        ("print(3, flush=True)\nimport os\nos._exit(1)", 0.0),
        ("print(3)\nwhile True: pass", 0.0),
        ("print(3, 0)", 0.0),
        ("print('3\\n3')", 0.0),
        ("def f(x): return 3", 0.0),
        ("print('3\\n' * 10**7)", 0.0),
    ],
)
def test_programs_are_tested_by_what_they_read_and_write(code, passed):
    assert share(code, PROGRAM, timeout_s=8.0) == passed


@in_sandbox
def test_a_program_that_writes_a_reply_itself_gets_no_more_than_for_printing_it():
    code = """
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"stdout": "3"}\\n')
    except OSError: pass
"""
    # Which of the two replies is read depends on which is there first.
    assert share(code, PROGRAM, timeout_s=8.0) in (0.0, 0.5)


@in_sandbox
def test_programs_see_no_expected_output():
    search = """
import gc
texts = [each for each in gc.get_objects() if isinstance(each, str)]
texts += [repr(vars(__import__(name))) for name in ('__main__', 'sys')]
print(4242 if any('4' + '242' in text for text in texts) else '')
"""
    assert share(search, [{"stdin": "1", "stdout": "4242"}]) == 0.0
    assert share("print(7)", [{"stdin": "", "stdout": "7"}, ["f(1)", 1]]) == 0.5


LIAR = """
class Yes:
    def __getattr__(self, name): return lambda *a, **k: open('/tmp/seen', 'a').write(repr(a)) or True
    def __call__(self, *a, **k): return self
def f(x): return Yes()
class Solution:
    def f(self, x): return Yes()
    g = Yes()
limit = Yes()
"""


@in_sandbox
@pytest.mark.parametrize(
    "test",
    [
        "assert f('x').startswith('secret')",
        "assert f(3).issubset({1, 2, 3})",
        "assert Solution().f('x').startswith('secret')",
        "assert limit.startswith('secret')",
        "assert f('x').a.b('secret')",
        "assert f(1)(2)",
    ],
)
def test_code_does_not_answer_for_what_it_returns(test):
    assert share(LIAR, [test], entry_point=[["f", "Solution", "limit"]]) == 0.0


@in_sandbox
def test_methods_of_results_are_called_here_and_arguments_have_any_name():
    tests = [
        "assert f('x').startswith('secret')",
        "assert Solution().f('x').upper() == 'SECRET X'",
        "assert f(expression='1') == 'secret 1'",
    ]
    code = "def f(expression): return 'secret ' + expression\nclass Solution:\n def f(self, x): return f(x)"
    assert share(code, tests, entry_point=[["f", "Solution"]]) == 1.0


@in_sandbox
def test_code_that_returns_a_value_cannot_change_what_it_is_compared_with():
    tests = ["xs = [3, 1]\nassert f(xs) == sorted(xs)", "d = {1: 2}\nassert f(d) == list(d)"]
    assert share("def f(x):\n x.clear()\n return []", tests) == 0.0
    assert share("def f(x): return sorted(x)", tests) == 1.0


@in_sandbox
def test_a_loop_behind_the_last_assert_is_a_test():
    script = "assert f(0) == 0\nfor x in range(3):\n assert f(x) == x * x"
    assert share("def f(x): return 0", script) == 0.5
    assert share("def f(x): return x * x", script) == 1.0


@in_sandbox
def test_hostile_code_does_not_change_the_score_of_the_code_beside_it():
    right, wrong = "def f(x): return x * x", "def f(x): return 4"
    codes = [each for trick in TRICKS.values() for each in (right, trick, wrong)]
    found = unit_tests([""] * len(codes), codes, [SQUARES] * len(codes), timeout_s=8.0)
    assert found[::3] == [1.0] * len(TRICKS)
    assert found[2::3] == [0.5] * len(TRICKS)


@pytest.fixture
def no_sandbox(monkeypatch, tmp_path):
    """Hide bubblewrap from this process and from workers."""
    sandbox.unavailable_reason.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    yield
    sandbox.unavailable_reason.cache_clear()


@pytest.mark.parametrize("num_workers", [0, None])
def test_without_a_sandbox_the_run_is_rejected_before_training_and_in_it(no_sandbox, num_workers):
    scorer = Scorer(
        {"tests": Reward("litgrpo.rewards.unit_tests")}, Scoring(num_workers=num_workers)
    )
    columns = {"tests": [SQUARES] * 2}
    with raises_for("tests", "sandbox", "bubblewrap"):
        scorer.check(columns)
    with raises_for("tests", "sandbox", "bubblewrap"):
        scorer(["?"] * 2, ["no Python", "def f(x): return x"], columns, group_size=2)
    scorer.close()


def test_the_last_block_of_python_is_the_code():
    text = "```py\na\n```\n```json\n{}\n```\n```python\nb\n```\n```text\nc\n```"
    assert extract_code(text) == "b\n"
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("x = 1", require_code_block=True) is None
    assert extract_code("```python\nx = 1") == "x = 1"


@in_sandbox
@pytest.mark.parametrize(
    "test",
    [
        "import ast\nassert ast.literal_eval(f(2)) == 4",
        "import importlib\nassert importlib.import_module(f(2))",
        "import sys\nif f(2) != '4': sys.exit(1)\nassert f(2) == '4'",
    ],
)
def test_what_the_code_returns_cannot_make_a_test_look_broken(test):
    assert share("def f(x): return '('", [test]) == 0.0


@pytest.mark.parametrize("piece", ["```", "``` ", "`", "```\t", "```python"])
def test_a_long_repetition_is_searched_for_code_in_linear_time(piece):
    # This takes a fraction of a second. A quadratic step would take minutes.
    extract_code(piece * (200_000 // len(piece)))


def test_a_fence_may_have_more_than_three_backticks():
    assert extract_code("````python\nx = 1\n````") == "x = 1\n"
