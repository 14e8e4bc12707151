"""Shared by tests of rewards.runner.process_runner."""

import time
from pathlib import Path

import pytest


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids) -> None:
    for _ in range(6000):
        if not any(map(alive, pids)):
            return
        time.sleep(0.02)
    pytest.fail("a worker outlived its parent")


def processes_under(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found[1:]
