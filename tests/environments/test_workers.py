"""Faulty environments in real processes: each fault fails only its episode."""

import logging
import os
import signal
import threading
import time

import pytest

from litgrpo.environments.base import EpisodeFailures, EpisodeStart, FailedEpisode
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.workers import TIMEOUT_REPLY, EpisodeWorkers, episode_pool
from tests.support.faulty import Dice, Echo, Meeting
from tests.support.workers import starts, step_all, texts


@pytest.fixture
def pool_of():
    pools = []

    def make(environment, **settings):
        pools.append(EpisodeWorkers(environment, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def num_workers(pool):
    return len([worker for worker in pool.pool.workers if not worker.is_lost])


def test_episodes_of_a_group_begin_alike_and_go_their_own_ways(pool_of) -> None:
    pool = pool_of(Echo())
    for _ in range(2):
        assert pool.reset(starts()) == ["seed 0", "seed 0", "seed 1", "seed 1"]
        first = step_all(pool, {n: f"turn {n}" for n in range(4)})
        assert texts(first) == {n: f"1 turn {n}" for n in range(4)}
        assert texts(step_all(pool, {2: "again"})) == {2: "2 again"}
    assert num_workers(pool) == 4  # each plays its next episode in the second batch


FAULTS = {
    "die": "exited with 3",
    "hang": "timed out after 1 s",
    "raise": "KeyError: 'bad' (faulty.py, line ",
    "leave": "SystemExit: 3 (faulty.py",
    "dict": "TypeError: step returned dict instead of StepResult",
    "nan": "ValueError: the reward of a turn is nan",
    "number": "TypeError: the environment returned int, expected a text or a list of messages",
}


def test_a_fault_costs_its_episode_only(pool_of, caplog) -> None:
    pool = pool_of(Echo(), timeout_s=1.0)
    for fault, reason in FAULTS.items():
        caplog.clear()
        failures = EpisodeFailures()
        failures.reset(starts())
        assert pool.reset(starts())[3] == "seed 1"
        step_all(pool, {n: f"turn {n}" for n in range(4)})
        heard = step_all(pool, {0: "a", 1: fault, 2: "b", 3: "c"})
        with caplog.at_level(logging.WARNING):
            failures.count(heard)
        failed = heard.pop(1)
        assert isinstance(failed, FailedEpisode)
        assert failed.reason.startswith(reason)
        assert texts(heard) == {0: "2 a", 2: "2 b", 3: "2 c"}
        assert heard[3].state == (1, "turn 3", "c")
        assert failures.reasons == {failed.reason: 1}
        assert "completion 1 of prompt 0 failed" in caplog.text
        assert ("in hangs" in caplog.text) is (fault == "hang")  # the place of it


def test_a_reset_that_hangs_or_dies_fails_its_row(pool_of) -> None:
    pool = pool_of(Echo(), timeout_s=1.0, num_workers=2)
    rows = [
        EpisodeStart({"bad": bad}, 0, (0, 0, 0, n)) for n, bad in enumerate(("hang", "", "die"))
    ]
    assert pool.reset(rows) == [
        FailedEpisode("timed out after 1 s"), "seed 0", FailedEpisode("exited with 3"),
    ]  # fmt: skip
    assert texts(step_all(pool, {1: "a"})) == {1: "1 a"}


def test_a_step_that_takes_too_long_may_be_answered_by_a_fixed_sentence(pool_of) -> None:
    pool = pool_of(Echo(), timeout_s=1.0, on_timeout="reply")
    pool.reset(starts(2))
    step_all(pool, {0: "a", 1: "b"})
    heard = step_all(pool, {0: "hang", 1: "c"})
    assert texts(heard) == {0: TIMEOUT_REPLY, 1: "2 c"}
    # the turn never reached the environment
    assert step_all(pool, {0: "d"})[0].state == (0, "a", "d")


def test_episodes_beyond_the_processes_wait_until_others_are_over(pool_of) -> None:
    pool = pool_of(Echo(), num_workers=2)
    assert pool.reset(starts(6)) == [f"seed {n // 2}" for n in range(6)]
    for n in range(6):
        pool.send(n, f"turn {n}")
    heard = {}
    while len(heard) < 2:
        heard |= pool.receive(wait=True)
    assert texts(heard) == {0: "1 turn 0", 1: "1 turn 1"}
    assert pool.receive(wait=False) == {}
    pool.end(0)
    assert texts(pool.receive(wait=True)) == {2: "1 turn 2"}
    pool.send(1, "raise")  # a failure is an end
    pool.send(2, "more")
    heard = {}
    while len(heard) < 3:
        heard |= pool.receive(wait=True)
    assert isinstance(heard.pop(1), FailedEpisode)
    assert texts(heard) == {2: "2 more", 3: "1 turn 3"}
    for n in (2, 3, 4, 5):
        pool.end(n)
    assert num_workers(pool) == 2
    assert pool.reset(starts(2)) == ["seed 0", "seed 0"]


def test_a_caller_that_waits_for_an_episode_without_a_process_is_told(pool_of) -> None:
    pool = pool_of(Echo(), num_workers=1)
    pool.reset(starts(2))
    step_all(pool, {0: "a"})
    pool.send(1, "b")
    with pytest.raises(ValueError, match=r"num_workers is 1, but .*group_size or more"):
        pool.receive(wait=True)


def test_512_episodes_are_played_by_few_workers(pool_of) -> None:
    pool = pool_of(Echo(), num_workers=4)
    assert pool.reset(starts(512))[511] == "seed 255"
    for n in range(512):
        pool.send(n, str(n))
    heard = {}
    while len(heard) < 512:
        arrived = pool.receive(wait=True)
        heard |= arrived
        for n in arrived:
            pool.end(n)
    assert texts(heard) == {n: f"1 {n}" for n in range(512)}


def test_steps_that_wait_do_so_side_by_side(pool_of, tmp_path) -> None:
    """Each answers only when all are in the middle of their step."""
    pool = pool_of(Meeting(str(tmp_path), 8), timeout_s=120.0)
    pool.reset([EpisodeStart({"name": n}, 0, (0, 0, n, 0)) for n in range(8)])
    assert set(texts(step_all(pool, dict.fromkeys(range(8), "x"))).values()) == {"all here"}


def test_global_generators_are_seeded_for_each_episode(pool_of) -> None:
    pool = pool_of(Dice())
    for _ in range(2):
        first, second, *others = pool.reset(starts())
        assert first == second != others[0] == others[1]
        turns = texts(step_all(pool, dict.fromkeys(range(4), "x")))
        assert turns[0] == turns[1] != turns[2]


def test_what_cannot_be_sent_is_refused(pool_of) -> None:
    with pytest.raises(ValueError, match=r"cannot be sent .*TypeError.*episode.num_workers: 0"):
        pool_of(Echo(folder=threading.Lock())).reset(starts())


def test_what_cannot_be_loaded_is_refused(pool_of) -> None:
    class Unloadable(Echo):
        def __reduce__(self):
            return os._exit, (3,)

    with pytest.raises(ValueError, match=r"environment's module exited with 3 while loading"):
        pool_of(Unloadable()).reset(starts())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "episode.timeout_s is 0"),
        ({"num_workers": 0}, "episode.num_workers is 0"),
        ({"on_timeout": "wait"}, "episode.on_timeout is 'wait'; it must be one of: fail, reply"),
    ],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        EpisodeWorkers(Echo(), **settings)


def test_no_workers_play_in_this_process() -> None:
    assert isinstance(episode_pool(Echo(), num_workers=0), InProcessEpisodes)
    assert isinstance(episode_pool(Echo(), num_workers=2), EpisodeWorkers)


def test_a_worker_killed_from_outside_fails_its_episode_and_is_replaced(pool_of) -> None:
    pool = pool_of(Echo())
    pool.reset(starts())
    step_all(pool, {0: "a", 3: "b"})
    os.kill(pool.episodes[0].worker.pid, signal.SIGKILL)
    heard = step_all(pool, {0: "b", 3: "c"})
    assert heard[0] == FailedEpisode("died of SIGKILL")
    assert texts(heard)[3] == "2 c"
    os.kill(pool.pool.launcher.server.pid, signal.SIGKILL)
    for worker in pool.pool.workers:  # they end with their server
        while not (worker.is_lost or worker.connection.poll()):
            time.sleep(0.01)
    assert step_all(pool, {3: "d"})[3] == FailedEpisode("died of SIGKILL")
    assert pool.reset(starts()) == ["seed 0", "seed 0", "seed 1", "seed 1"]
