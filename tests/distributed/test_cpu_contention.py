"""During contention for the CPU, idle OpenMP teams make libgomp's threads sleep early."""

import copy
import os
import threading
import time

import pytest
import torch

from litgrpo import GRPO
from litgrpo.distributed import cpu_contention
from litgrpo.distributed.cpu_contention import CpuContention, cores_of_others, read_cpu_times

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def contention(two_threads, monkeypatch):
    for name in cpu_contention.POLICIES:
        monkeypatch.delenv(name, raising=False)
    contention = CpuContention()
    yield contention
    contention.follow(0.0)
    contention.stop()


def test_teams_wait_only_while_others_need_the_cores(contention):
    alone = threading.active_count()
    contention.follow(others=0.0)
    assert threading.active_count() == alone
    contention.follow(others=CORES - 1.0)
    waiting = threading.active_count()
    assert waiting > alone
    contention.follow(others=CORES - 1.0)
    assert threading.active_count() == waiting
    contention.follow(others=0.0)
    assert threading.active_count() == alone


def test_a_process_that_continues_with_one_thread_has_no_teams(contention):
    torch.set_num_threads(1)
    alone = threading.active_count()
    contention.follow(others=float(CORES))
    assert threading.active_count() == alone


def test_teams_have_more_threads_than_there_are_cores_and_keep_the_number_per_operation(contention):
    before = threading.active_count()
    contention.follow(others=float(CORES))
    teams = threading.active_count() - before
    assert teams * (torch.get_num_threads() - 1) >= CORES
    assert torch.get_num_threads() == 2
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]  # autograd's threads take the same number


def test_the_user_hears_once_why_threads_sleep(contention, caplog):
    for others in (float(CORES), 0.0, float(CORES)):
        contention.follow(others)
    assert len(caplog.records) == 1


@pytest.mark.skipif(CORES < 2, reason="one core")
def test_a_machine_with_free_cores_is_not_busy(contention, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    before = threading.active_count()
    contention.follow(others=5.5)
    assert threading.active_count() == before


@pytest.mark.parametrize("name", cpu_contention.POLICIES)
def test_a_policy_that_the_user_set_is_kept(name, contention, monkeypatch):
    monkeypatch.setenv(name, "1")
    before = threading.active_count()
    contention.start()
    assert threading.active_count() == before


def test_one_thread_needs_no_watching(contention):
    torch.set_num_threads(1)
    before = threading.active_count()
    contention.start()
    assert threading.active_count() == before


def test_watching_ends_with_its_thread_and_can_start_again(contention):
    before = threading.active_count()
    for _ in range(2):
        contention.start()
        assert threading.active_count() == before + 1
        contention.start()  # a second stage of the same trainer
        assert threading.active_count() == before + 1
        contention.stop()
        assert threading.active_count() == before


def test_work_of_this_process_is_not_that_of_others():
    before = read_cpu_times()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = read_cpu_times()
    own = after[2] - before[2]
    assert own >= 0.25
    assert cores_of_others((0.0, 0.0, 0.0), (own, own, own)) == 0.0
    assert cores_of_others((0.0, 0.0, 0.0), (1.0, 1.0, 0.25)) == pytest.approx(0.75 * CORES)
    assert cores_of_others(after, after) == 0.0  # no time has passed


def test_a_module_can_be_copied():
    module = GRPO("builtin:tiny-gemma2", {"one": lambda prompts, completions: [1.0]})
    copied = copy.deepcopy(module)
    assert copied.hparams == module.hparams
    assert copied.hparams is not module.hparams
