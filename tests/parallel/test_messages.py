import os
import subprocess
import sys

import pytest

from litgrpo.parallel import messages
from litgrpo.parallel.messages import rank_zero_info, rank_zero_warn

BOTH = "from litgrpo.parallel.messages import rank_zero_info, rank_zero_warn\n"
BOTH += "rank_zero_info('a line'); rank_zero_warn('a warning')\n"


def stderr_of(program, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in messages.RANKS}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("first", ["", "import lightning\n"])
def test_a_line_and_a_warning_are_written_once_and_plainly(first):
    line, warning, *rest = stderr_of(first + BOTH)
    assert line == "a line"
    assert warning.endswith("UserWarning: a warning")
    assert "a warning" not in "".join(rest[1:])


def test_a_program_that_configures_logging_writes_the_line_itself():
    configured = "import logging; logging.basicConfig(format='mine: %(message)s')\n"
    assert stderr_of(configured + BOTH)[0] == "mine: a line"
    assert "a line" not in "".join(stderr_of(configured + BOTH)[1:])


@pytest.mark.parametrize("name", messages.RANKS)
def test_other_processes_than_the_first_write_nothing(name):
    assert stderr_of(BOTH, **{name: "1"}) == []


def test_the_launchers_rank_counts_before_that_of_the_cluster(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert messages.rank() == 0


def test_a_warning_names_the_line_that_gave_it(caplog):
    with pytest.warns(UserWarning, match="^here$") as caught:
        rank_zero_warn("here")
    assert caught[0].filename == __file__
    rank_zero_info("there")
    assert caplog.messages == ["there"]
