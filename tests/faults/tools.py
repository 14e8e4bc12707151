"""Environments that end badly while a run plays them, named by class path."""

import os
import signal
import time
from pathlib import Path
from zlib import crc32

from litgrpo.environments.base import StepResult


class Numbers:
    """Answers a turn with a number, rewards its length, and does one bad thing.

    Args:
        bad: what it does: a method of this class.
        folder: where it leaves traces.
        of: it does so for one of this number of turns, chosen by their texts.
    """

    played = 0  # by all episodes

    def __init__(self, bad: str = "nothing", folder: str = "", of: int = 32) -> None:
        self.bad, self.folder, self.of = bad, folder, of

    def reset(self, row, seed):
        self.seed = seed
        return ""

    def step(self, action):
        digest = crc32(f"{self.seed} {action}".encode())
        if digest % self.of == 0:
            vars(Numbers)[self.bad](self)
        text = os.urandom(2).hex() if self.bad == "searches" else f"{digest % 100}"
        text += f" {Numbers.played}" * (self.bad == "leaks")
        Numbers.played += 1
        return StepResult(f" {text} ", reward=min(len(action), 8) / 8)

    def first_time(self):
        """Return True if nothing has failed in this run before."""
        try:
            Path(self.folder, "struck").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def nothing(self):
        """It works."""

    leaks = searches = nothing

    def hangs(self):
        time.sleep(3600)

    def dies(self):
        os._exit(3)

    def dies_once(self):
        if self.first_time():
            os._exit(3)

    def kills_the_run(self):
        """In the middle of a step, from a worker: its parent's parent is the run."""
        if self.first_time():
            launcher = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2]
            os.kill(int(launcher.split()[1]), signal.SIGKILL)
            time.sleep(3600)
