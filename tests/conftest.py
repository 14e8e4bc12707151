"""Fixtures of all tests: one seed, reward functions in this process, small models and recipes."""

import os
import signal
from dataclasses import replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run side by side; threads of each on top of that would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

# A filter of warnings in setup.cfg imports torch before this file sets the variable.
torch.set_num_threads(1)

pytest.register_assert_rewrite("tests.support")

from litgrpo.rewards.runner import Runner  # noqa: E402
from tests.support.command_line import cli, finished_run  # noqa: E402, F401
from tests.support.models import architecture  # noqa: E402, F401
from tests.support.recipes import gsm8k, models, program, questions  # noqa: E402, F401

# The same few examples in each run. Loaded machines are slow, so no example has a deadline.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")

# nohup ignores hangups and a script ignores interrupts in its background processes; every process
# that a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config):
    """Run the whole suite side by side, and chosen files in this process.

    Three processes are fastest on two cores: many tests wait for processes that they start.
    """
    whole_suite = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return min(len(os.sched_getaffinity(0)) + 1, 9) if whole_suite else 0


@pytest.fixture(autouse=True)
def one_seed():
    """Give a test the same random numbers, regardless of the tests before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def rewards_run_in_this_process(monkeypatch):
    """Replace the default reward runner by one without worker processes.

    Each fit would start workers that import torch. With them, three files of tests took
    more than four times as long. Tests that set a number of workers are not affected, nor are
    programs that a test starts, such as the run of tests/golden: these use worker processes.
    """

    def runner(scoring):
        return Runner(replace(scoring, num_workers=scoring.num_workers or 0))

    monkeypatch.setattr("litgrpo.rewards.scorer.Runner", runner)
