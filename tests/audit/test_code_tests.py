"""Tests of code that judge all code the same, or a correct program as wrong, are faults."""

import json

import pytest
import yaml

from litgrpo.audit.code_tests import find_test_faults
from litgrpo.rewards import Reward
from litgrpo.workers import sandbox

pytestmark = pytest.mark.skipif(
    not sandbox.available(), reason=f"sandbox: {sandbox.unavailable_reason()}"
)
SQUARES = ["assert f(2) == 4", "assert f(-3) == 9"]
PROGRAM = [{"stdin": "1 2\n", "stdout": "3\n"}]
RIGHT, WRONG = "def f(x): return x * x", "def f(x): return 4"
SAME_FOR_ALL = {
    "a TestCase without a call": (
        "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(2), 4)"
    ),
    "a TestCase behind __main__": (
        "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(2), 4)\n"
        "if __name__ == '__main__': unittest.main()"
    ),
    "unittest.main": (
        "import unittest\nclass T(unittest.TestCase):\n def test(self): self.assertEqual(f(2), 4)\n"
        "unittest.main()"
    ),
    "a module that is not there": "import numpy as np\nassert np.isclose(f(2), 4)",
    "pytest": "import pytest\ndef test_f():\n assert f(2) == pytest.approx(4)",
    "an import in a function": "def test_f():\n assert f(2) == 4\n import numpy",
    "the code as a module": "from solution import f\nassert f(2) == 4",
    "asserts in a function that is not called": "def run():\n assert f(2) == 4",
    "a test that is not awaited": "async def test_f():\n assert f(2) == 4",
    "a class of pytest": "class TestF:\n def test_f(self):\n  assert f(2) == 4",
    "an assert on a pair": "assert (f(2) == 4, 'f(2)')",
    "an assert that is caught": "try:\n assert f(2) == 4\nexcept Exception:\n pass",
    "an assert that is always true": "assert f(2) == 4 or True",
    "any error": "try:\n f(2)\n assert False\nexcept:\n pass",
    "a loop over nothing": "for x in []:\n assert f(x) == x",
    "nothing expected": [["f(1)", None], {"call": "f(2)", "expected": None}],
}


def faults(*rows, **kwargs):
    return find_test_faults(Reward("litgrpo.rewards.unit_tests", kwargs=kwargs), rows)


@pytest.mark.parametrize("name", SAME_FOR_ALL)
def test_tests_that_judge_all_code_the_same_are_faults(name):
    entry = {"entry_point": ["f"]} if "module" in name else {}
    found = faults({"tests": SQUARES}, {"tests": SAME_FOR_ALL[name]} | entry)
    assert found
    for fault in found:
        assert fault.startswith("tests of 1 of 2 rows, such as ")
        assert "would pass all of them" in fault or "cannot run with any code" in fault


def test_tests_that_separate_correct_code_from_other_have_no_fault():
    rows = [{"tests": SQUARES}, {"tests": SQUARES, "reference_solution": RIGHT}, {"tests": None}]
    rows.append({"tests": SQUARES, "reference_solution": f"```python\n{RIGHT}\n```"})
    rows.append({"tests": PROGRAM, "reference_solution": "print(sum(map(int, input().split())))"})
    assert faults(*rows) == []
    assert faults({"answer": "7"}) == []


def test_a_reference_solution_that_fails_is_a_fault():
    (fault,) = faults(*[{"tests": SQUARES, "reference_solution": code} for code in (RIGHT, WRONG)])
    assert "1 of 2 rows" in fault
    assert "(1 of 2; one test may take 2 s)" in fault
    assert fault.endswith("the reference_solution does not pass all of them")


def test_a_program_that_prints_nothing_must_not_pass():
    (fault,) = faults({"tests": [{"stdin": "1", "stdout": ""}]})
    assert fault.endswith("empty code would pass all of them")


def test_the_command_runs_the_tests_of_its_data(cli, tmp_path):
    recipe = {
        "model": {
            "class_path": "litgrpo.GRPO",
            "init_args": {
                "pretrained": "builtin:tiny-gemma2",
                "max_completion_length": 8,
                "rewards": {"tests": {"function": "litgrpo.rewards.unit_tests"}},
            },
        },
        "data": {"class_path": "litgrpo.PromptData", "init_args": {"train": "rows.jsonl"}},
    }
    (tmp_path / "code.yaml").write_text(yaml.safe_dump(recipe))
    for tests, code in ((SQUARES, 0), ("assert f(2) == 4 or True", 1)):
        rows = [{"prompt": f"Write f, {n}.", "tests": tests} for n in range(2)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found, out, err = cli("audit", "-c", "code.yaml")
        assert (found, err) == (code, ""), out
        fault = "functions that return nothing would pass all of them"
        assert (f": {fault}" in out) == bool(code)
