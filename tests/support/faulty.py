"""Environments that hang, crash, or are not deterministic."""

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from litgrpo.environments.base import StepResult

MODULE_STATE = []


@dataclass
class Echo:
    """Repeats a turn with its number; the words in FAULTS cause a fault."""

    folder: str = ""  # folder of the files that record its calls
    actions: list = field(default_factory=list)

    def reset(self, row, seed):
        self.actions = [seed]
        self.leave("reset")
        if row.get("bad"):
            return self.answer(row["bad"])
        return f"seed {seed}"

    def step(self, action):
        self.leave(action)
        self.actions.append(action)
        return self.answer(action)

    def leave(self, word):
        if self.folder:
            with open(Path(self.folder) / "steps", "a") as file:
                file.write(f"{word}\n")

    def answer(self, word):
        if word in FAULTS:
            return FAULTS[word](self)
        return StepResult(f"{len(self.actions) - 1} {word}", reward=1.0, state=tuple(self.actions))


def hangs(_):
    while True:
        sum(range(10**9))


def raises(error):
    raise error


FAULTS = {
    "hang": hangs,
    "die": lambda _: os._exit(3),
    "raise": lambda _: raises(KeyError("bad")),
    "leave": lambda _: raises(SystemExit(3)),
    "dict": lambda _: {"said": "a"},
    "nan": lambda _: StepResult("a", reward=float("nan")),
    "number": lambda _: StepResult(5),
    "long": lambda _: StepResult("ab" * 50),
}


@dataclass
class Meeting:
    """Answers only when `of` episodes are inside a step at the same time."""

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
    """Counts in a class attribute, which all episodes share."""

    played = 0

    def step(self, action):
        Counting.played += 1
        return StepResult(str(Counting.played))


class ModuleState(Dice):
    """Keeps turns in a module variable, which all episodes share."""

    def step(self, action):
        MODULE_STATE.append(action)
        return StepResult(" ".join(MODULE_STATE))


class Clock(Dice):
    """Returns the clock."""

    def step(self, action):
        return StepResult(str(time.perf_counter_ns()))
