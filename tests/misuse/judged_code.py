"""Rewards that run programs of a model, without tests, with bad ones, or without a sandbox."""

from collections.abc import Sequence
from importlib.util import find_spec

from tests.misuse.probe import Probe, split

CODE = (
    "fit --model.pretrained builtin:tiny-gemma2 --data.train a.jsonl --data.batch_size 2"
    " --model.group_size 2 --model.max_completion_length 2 --model.max_iterations 1"
    " --model.check_invariants false --trainer.accelerator cpu --run_dir run"
)
UNIT_TESTS = "--model.rewards '{code: {function: litgrpo.rewards.unit_tests}}'"
GYM = "--model.rewards '{gym: {function: litgrpo.rewards.reasoning_gym, kwargs: {isolation: %s}}}'"
PROBLEMS = "--data.train '{class_path: ReasoningGym, init_args: {tasks: {countdown: 1}, size: 4}}'"
WITHOUT_BUBBLEWRAP = """
import os, sys
os.environ["PATH"] = os.getcwd()
sys.argv = ["cli.py", *{words!r}]
from litgrpo.cli.main import main
raise SystemExit(main())
"""


def rows(*tests: str) -> dict[str, str]:
    """Return a data file with two rows for each value of the column `tests`, given as JSON."""
    each = [f'{{"prompt": "Write f, {n}.", "tests": {test}}}\n' for test in tests for n in "12"]
    return {"a.jsonl": "".join(each)}


def build_probe(name: str, says: Sequence[str], tests: str) -> Probe:
    """Return a probe of `unit_tests` with these tests in every row."""
    return Probe(name, f"{CODE} {UNIT_TESTS}", tuple(says), files=rows(tests))


PROBES = [
    Probe(
        "unit_tests without a column of tests",
        f"{CODE} {UNIT_TESTS}",
        ("tests",),
        files={"a.jsonl": '{"prompt": "Write f."}\n' * 4},
    ),
    build_probe("tests that are no texts", ["tests:", "got 3"], "3"),
    build_probe("tests without an assert", ["tests:", "no assert"], '"x = f(2)"'),
    build_probe("tests that any code passes", ["tests:", "pass"], '"assert True or f(2)"'),
    build_probe("tests that are not Python", ["tests:"], '"assert f(2) =="'),
    Probe(
        "a misspelt setting of unit_tests",
        f"{CODE} {UNIT_TESTS}".replace("unit_tests}", "unit_tests, kwargs: {timeout: 3}}"),
        ("timeout",),
        files=rows('"assert f(2) == 4"'),
    ),
    Probe(
        "unit_tests without bubblewrap",
        "",
        ("sandbox", "bubblewrap"),
        files=rows('"assert f(2) == 4"'),
        script=WITHOUT_BUBBLEWRAP.format(words=split(f"{CODE} {UNIT_TESTS}")),
    ),
]
if find_spec("reasoning_gym"):
    PROBES += [
        Probe(
            "a misspelt isolation",
            f"{CODE} {PROBLEMS} {GYM % 'bublewrap'}",
            ("isolation", "bubblewrap"),
        ),
        Probe(
            "reasoning-gym without bubblewrap",
            "",
            ("countdown", "bubblewrap", "isolation: none"),
            script=WITHOUT_BUBBLEWRAP.format(
                words=split(f"{CODE} {PROBLEMS} {GYM % 'bubblewrap'}")
            ),
        ),
    ]
