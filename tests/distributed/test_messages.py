import os
import subprocess
import sys

import pytest

from litgrpo.distributed import messages
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn

BOTH = "from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn\n"
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


def test_a_line_and_a_warning_are_written_once_and_plainly():
    line, warning, *rest = stderr_of(BOTH)
    assert line == "a line"
    assert warning.endswith("UserWarning: a warning")
    assert "a warning" not in "".join(rest[1:])


def test_beside_lightning_too_until_a_program_configures_logging_and_writes_the_line_itself():
    configured = "import logging; logging.basicConfig(format='mine: %(message)s')\n"
    before, warning, *rest = stderr_of(f"import lightning\n{BOTH}{configured}{BOTH}")
    assert before == "a line"
    assert warning.endswith("UserWarning: a warning")
    assert [line for line in rest if line.endswith("a line")] == ["mine: a line"]


@pytest.mark.parametrize("name", messages.RANKS)
def test_other_processes_than_the_first_write_nothing(name, monkeypatch, caplog, recwarn):
    for each in messages.RANKS:
        monkeypatch.delenv(each, raising=False)
    for rank, said in (("1", []), ("0", ["a line"])):
        monkeypatch.setenv(name, rank)
        rank_zero_info("a line")
        assert caplog.messages == said
    monkeypatch.setenv(name, "1")
    rank_zero_warn("a warning")
    assert not recwarn.list


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
