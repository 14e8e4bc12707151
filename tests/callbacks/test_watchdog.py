import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litgrpo.callbacks.watchdog import Watchdog
from tests.callbacks.fitting import fit
from tests.support.standin import StandIn

ROOT = Path(__file__).parents[2]


class Hangs(StandIn):
    def training_step(self, batch, batch_idx):
        if self.iteration == 1:
            time.sleep(600)
        return super().training_step(batch, batch_idx)


def hang(folder: str) -> None:
    fit(Path(folder), Watchdog(1.0), module=Hangs(4))


def test_a_run_that_hangs_shows_where_and_ends(tmp_path):
    code = "import sys; from tests.callbacks.test_watchdog import hang; hang(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=500,  # it would sleep longer
    )
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr
    assert "in training_step" in done.stderr


def test_a_run_that_goes_on_is_left_alone(tmp_path):
    assert fit(tmp_path, Watchdog(30.0), module=StandIn(3)).iteration == 3
    with pytest.raises(ValueError, match=r"watchdog.timeout_s is 0; it must be above 0"):
        Watchdog(0)
