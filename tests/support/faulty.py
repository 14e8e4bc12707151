"""Environments that do what environments should not do."""

import os
import random
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from litgrpo.environments.base import StepResult

TOLD = []  # a module's own list


@dataclass
class Echo:
    """Says a turn again, with its number; some words end it, with the process or without."""

    folder: str = ""  # where it leaves traces
    heard: list = field(default_factory=list)

    def reset(self, row, seed):
        self.heard = [seed]
        self.leave("reset")
        if row.get("bad"):
            return self.answer(row["bad"])
        return f"seed {seed}"

    def step(self, action):
        self.leave(action)
        self.heard.append(action)
        return self.answer(action)

    def leave(self, word):
        if self.folder:
            with open(Path(self.folder) / "steps", "a") as file:
                file.write(f"{word}\n")

    def first_time(self, word):
        marker = Path(self.folder) / f"first-{word}"
        first = not marker.exists()
        marker.touch()
        return first

    def answer(self, said):
        if said in FAULTS:
            return FAULTS[said](self)
        return StepResult(f"{len(self.heard) - 1} {said}", reward=1.0, state=tuple(self.heard))

    def dies_once(self):
        if self.first_time("death"):
            os._exit(3)
        return StepResult(f"{len(self.heard) - 1} die once", 1.0, state=tuple(self.heard))

    def starts_a_program(self):
        child = subprocess.Popen(["setsid", "sleep", "600"])
        (Path(self.folder) / "pid").write_text(str(child.pid))
        time.sleep(3600)


def hangs(_):
    while True:
        sum(range(10**9))


def floods(_):
    while True:
        print("x" * 65536)


def raises(error):
    raise error


FAULTS = {
    "hang": hangs,
    "flood": floods,
    "die": lambda _: os._exit(3),
    "die once": Echo.dies_once,
    "raise": lambda _: raises(KeyError("bad")),
    "leave": lambda _: raises(SystemExit(3)),
    "dict": lambda _: {"said": "a"},
    "nan": lambda _: StepResult("a", reward=float("nan")),
    "number": lambda _: StepResult(5),
    "long": lambda _: StepResult("ab" * 50),
    "start": Echo.starts_a_program,
}


@dataclass
class Meeting:
    """Answers only when so many episodes are in the middle of a step at the same time."""

    folder: str
    of: int

    def reset(self, row, seed):
        self.name = str(row["name"])
        return ""

    def step(self, action):
        Path(self.folder, self.name).touch()
        while len(os.listdir(self.folder)) < self.of:
            time.sleep(0.01)
        return StepResult("all here")


class Dice:
    """Draws from the global generators."""

    def reset(self, row, seed):
        return f"{random.random()} {np.random.rand()}"

    def step(self, action):
        return StepResult(f"{random.random()} {np.random.rand()}")


class Counting(Dice):
    """Counts in its class: episodes change each other."""

    played = 0

    def step(self, action):
        Counting.played += 1
        return StepResult(str(Counting.played))


class Telling(Dice):
    """Keeps what was said in its module."""

    def step(self, action):
        TOLD.append(action)
        return StepResult(" ".join(TOLD))


class Clock(Dice):
    """Looks at the clock."""

    def step(self, action):
        return StepResult(str(time.perf_counter_ns()))
