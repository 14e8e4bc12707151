"""Reward functions that do what reward functions should not do, each for the completion "bad"."""

import asyncio
import ctypes
import os
import re
import sys
import time

from litgrpo.rewards import pure

CATASTROPHE = "a" * 60 + "b"


def lengths(completions):
    return [float(len(text)) for text in completions]


def letters(completions):
    return [sum(letter.isalpha() for letter in text) / 6 for text in completions]


def waiting_for(path):
    """A function that does not answer before the file is there."""

    def waits(completions):
        while not os.path.exists(path):
            time.sleep(0.01)
        return lengths(completions)

    return waits


def sleeps(completions):
    if "bad" in completions:
        time.sleep(3600)
    return lengths(completions)


def loops_in_c(completions):
    for text in completions:
        if text == "bad":
            sum(range(10**15))  # holds the interpreter: no signal, no thread gets a turn
    return lengths(completions)


def catastrophic_regex(completions):
    for text in completions:
        re.match(r"(a+)+$", CATASTROPHE if text == "bad" else text)
    return lengths(completions)


def loops_in_python(completions):
    while "bad" in completions:
        continue
    return lengths(completions)


def segfaults(completions):
    if "bad" in completions:
        ctypes.string_at(0)
    return lengths(completions)


def exits_at_once(completions):
    if "bad" in completions:
        os._exit(7)
    return lengths(completions)


def leaves(completions):
    if "bad" in completions:
        sys.exit(3)
    return lengths(completions)


def interrupts(completions):
    if "bad" in completions:
        raise KeyboardInterrupt
    return lengths(completions)


def raises(completions):
    if "bad" in completions:
        raise KeyError("bad")
    return lengths(completions)


def wrong_length(completions):
    return [1.0] if "bad" in completions and len(completions) > 1 else lengths(completions)


def wrong_length_for_the_bad(completions):
    return lengths([text for text in completions if text != "bad"])


def odd_values(completions, value):
    return [value if text == "bad" else float(len(text)) for text in completions]


async def async_hangs(completions):
    await asyncio.sleep(3600 if "bad" in completions else 0)
    return lengths(completions)


def all_are_there(path, name, of):
    """Leave a file, and say whether all others have left theirs."""
    open(os.path.join(path, name), "w").close()
    return len(os.listdir(path)) >= of


def meeting(path, name, of):
    """A function that returns once this many calls have started."""

    def meets(completions):
        while not all_are_there(path, name, of):
            time.sleep(0.01)
        return lengths(completions)

    return meets


@pure
def pure_meeting(completions, path):
    while not all_are_there(path[0], completions[0], 2):
        time.sleep(0.01)
    return lengths(completions)


@pure
def pure_hangs(completions):
    return sleeps(completions)


@pure
def pure_waits(completions):
    time.sleep(0.05 * len(completions))
    return lengths(completions)


def its_process(completions):
    return [float(os.getpid())] * len(completions)
