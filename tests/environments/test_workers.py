"""Faulty environments in real processes: each fault fails only its episode."""

import logging
import os
import signal
import threading

import pytest

from litgrpo.environments.base import EnvironmentFailure, EpisodeStart, FailedEpisode, StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.response_log import ResponseLog
from litgrpo.environments.workers import TIMEOUT_REPLY, EpisodeWorkers, episode_pool
from tests.support.faulty import Echo, Meeting
from tests.support.workers import starts, step_all, texts


@pytest.fixture
def pool_of():
    pools = []

    def make(environment, **settings):
        pools.append(EpisodeWorkers(environment, **{"max_failed_frac": 1.0, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_episodes_of_a_group_begin_alike_and_go_their_own_ways(pool_of) -> None:
    pool = pool_of(Echo(), num_workers=3)
    for _ in range(2):
        assert pool.reset(starts()) == ["seed 0", "seed 0", "seed 1", "seed 1"]
        first = step_all(pool, {n: f"turn {n}" for n in range(4)})
        assert texts(first) == {n: f"1 turn {n}" for n in range(4)}
        assert texts(step_all(pool, {2: "again"})) == {2: "2 again"}
    assert len(pool.pool.workers) == 3


FAULTS = {
    "die": "exited with 3, twice",
    "hang": "timed out after 1 s",
    "raise": "KeyError: 'bad' (faulty.py, line ",
    "leave": "SystemExit: 3 (faulty.py",
    "dict": "TypeError: step returned dict instead of StepResult",
    "nan": "ValueError: the reward of a turn is nan",
    "number": "TypeError: the environment returned int, expected a text or a list of messages",
}


def test_a_fault_costs_its_episode_and_the_others_are_rebuilt(pool_of, caplog) -> None:
    pool = pool_of(Echo(), timeout_s=1.0, num_workers=1)
    for fault, reason in FAULTS.items():
        caplog.clear()
        pool.failures.reasons.clear()  # the first is told
        assert pool.reset(starts())[3] == "seed 1"
        step_all(pool, {n: f"turn {n}" for n in range(4)})
        with caplog.at_level(logging.WARNING):
            heard = step_all(pool, {0: "a", 1: fault, 2: "b", 3: "c"})
        failed = heard.pop(1)
        assert isinstance(failed, FailedEpisode)
        assert failed.reason.startswith(reason)
        assert texts(heard) == {0: "2 a", 2: "2 b", 3: "2 c"}
        assert heard[3].state == (1, "turn 3", "c")
        assert pool.failures.reasons == {failed.reason: 1}
        assert "completion 1 of prompt 0 failed" in caplog.text
        assert ("in hangs" in caplog.text) is (fault == "hang")  # the place of it


def test_a_reset_that_hangs_or_dies_fails_its_row(pool_of) -> None:
    pool = pool_of(Echo(), timeout_s=1.0, num_workers=2)
    rows = [
        EpisodeStart({"bad": bad}, 0, (0, 0, 0, n)) for n, bad in enumerate(("hang", "", "die"))
    ]
    assert pool.reset(rows) == [
        FailedEpisode("timed out after 1 s"), "seed 0", FailedEpisode("exited with 3, twice"),
    ]  # fmt: skip
    assert texts(step_all(pool, {1: "a"})) == {1: "1 a"}


def test_a_step_that_killed_its_worker_once_is_said_again_after_the_turns_before(
    pool_of, tmp_path
) -> None:
    pool = pool_of(Echo(str(tmp_path)), num_workers=1)
    pool.reset(starts(1))
    step_all(pool, {0: "a"})
    (heard,) = step_all(pool, {0: "die once"}).values()
    assert heard == StepResult("2 die once", 1.0, state=(0, "a", "die once"))
    assert (tmp_path / "steps").read_text().split("\n")[:-1] == [
        *("reset", "a", "die once", "reset", "a", "die once"),
    ]


def test_a_step_that_takes_too_long_may_be_answered_by_a_fixed_sentence(pool_of) -> None:
    pool = pool_of(Echo(), timeout_s=1.0, on_timeout="reply", num_workers=1)
    pool.reset(starts(2))
    step_all(pool, {0: "a", 1: "b"})
    heard = step_all(pool, {0: "hang", 1: "c"})
    assert texts(heard) == {0: TIMEOUT_REPLY, 1: "2 c"}
    # the turn never reached the environment
    assert step_all(pool, {0: "d"})[0].state == (0, "a", "d")


def test_steps_that_wait_do_so_side_by_side(pool_of, tmp_path) -> None:
    """Each answers only when all are in the middle of their step."""
    pool = pool_of(Meeting(str(tmp_path), 8), timeout_s=120.0)
    pool.reset([EpisodeStart({"name": n}, 0, (0, 0, n, 0)) for n in range(8)])
    assert set(texts(step_all(pool, dict.fromkeys(range(8), "x"))).values()) == {"all here"}


def test_long_texts_are_cut_and_too_many_failures_stop_the_run(pool_of) -> None:
    pool = pool_of(Echo(), max_failed_frac=0.5, max_observation_chars=10)
    pool.reset(starts())
    heard = step_all(pool, {0: "raise", 1: "raise", 3: "long"})
    assert texts(heard)[3] == "ababa ... (90 characters left out) ... babab"
    message = r"3 of 4 episodes failed; the first is .*completion 0 of prompt 0: KeyError: 'bad'"
    with pytest.raises(EnvironmentFailure, match=message):
        step_all(pool, {2: "raise"})


def test_a_pool_of_one_process_is_played_with_what_was_loaded_already(pool_of) -> None:
    pool = pool_of(Echo(), num_workers=2)
    pool.reset(starts())
    launcher = pool.pool.launcher
    ours = list(pool.pool.workers)
    alone = pool.single_process_pool()
    for _ in range(2):
        assert alone.reset(starts(2)) == ["seed 0", "seed 0"]
        assert texts(step_all(alone, {0: "a", 1: "b"})) == {0: "1 a", 1: "1 b"}
    assert len(pool.pool.workers) == 3
    alone.close()
    assert pool.pool.launcher is launcher
    assert pool.pool.workers == ours
    assert texts(step_all(pool, {3: "on"})) == {3: "1 on"}


def test_what_cannot_be_sent_is_refused(pool_of) -> None:
    with pytest.raises(ValueError, match=r"cannot be sent .*TypeError.*episode.num_workers: 0"):
        pool_of(Echo(folder=threading.Lock())).reset(starts())


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


def test_no_workers_play_in_this_process_and_keep_no_journal(tmp_path) -> None:
    assert isinstance(episode_pool(Echo(), num_workers=0), InProcessEpisodes)
    assert isinstance(episode_pool(Echo(), num_workers=2), EpisodeWorkers)
    with pytest.raises(ValueError, match=r"episode.record_responses needs worker processes"):
        episode_pool(Echo(), num_workers=0, response_log=ResponseLog(tmp_path, tmp_path))


def test_a_worker_killed_from_outside_is_replaced(pool_of) -> None:
    pool = pool_of(Echo())
    pool.reset(starts())
    step_all(pool, {0: "a"})
    for worker in list(pool.pool.workers):
        os.kill(worker.pid, signal.SIGKILL)
    assert texts(step_all(pool, {0: "b", 3: "c"})) == {0: "2 b", 3: "1 c"}
    os.kill(pool.pool.launcher.server.pid, signal.SIGKILL)
    assert texts(step_all(pool, {0: "d"})) == {0: "3 d"}


def test_a_journal_answers_what_was_said_before(pool_of, tmp_path) -> None:
    first, second = (
        pool_of(Echo(str(tmp_path)), response_log=ResponseLog(tmp_path / "response_log", tmp_path))
        for _ in range(2)
    )
    first.reset(starts(2))
    before = step_all(first, {0: "a", 1: "b"})
    (tmp_path / "steps").unlink()
    assert second.reset(starts(2)) == ["seed 0", "seed 0"]
    assert step_all(second, {0: "a", 1: "b"}) == before
    assert not (tmp_path / "steps").exists()
    # A new turn reaches an environment that has replayed the recorded ones.
    assert step_all(second, {0: "new"})[0] == StepResult("2 new", 1.0, state=(0, "a", "new"))
    assert (tmp_path / "steps").read_text().split() == ["reset", "a", "new"]
