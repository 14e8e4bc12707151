import os
import subprocess
import sys

import pytest

from litgrpo.distributed import messages
from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn

BOTH = "from litgrpo.distributed.messages import rank_zero_info, rank_zero_warn\n"
BOTH += "rank_zero_info('a line'); rank_zero_warn('a warning')\n"


CONFIGURE = "import logging; logging.basicConfig(format='mine: %(message)s')\n"


def test_each_is_written_once_also_beside_lightning_and_the_line_by_the_programs_own_logging():
    program = f"{BOTH}import lightning\n{BOTH}{CONFIGURE}{BOTH}"
    environment = {name: value for name, value in os.environ.items() if name not in messages.RANKS}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    written = done.stderr.splitlines()
    assert written[0] == "a line"
    assert written[1].endswith("UserWarning: a warning")
    assert [line for line in written if line.endswith("a line")] == [
        *["a line"] * 2,
        "mine: a line",
    ]
    assert sum(line.endswith("UserWarning: a warning") for line in written) == 3


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
