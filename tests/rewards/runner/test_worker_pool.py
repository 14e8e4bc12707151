"""Processes that are started, taken, released and ended."""

import pickle

import pytest

from litgrpo.rewards.runner.calls import Call
from litgrpo.rewards.runner.worker_pool import MAX_PICKLED, WorkerPool, packed
from tests.rewards import faulty

CALL = Call("r", faulty.lengths, {"completions": ["a"]}, {}, 1)


@pytest.fixture
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


def test_no_more_workers_are_given_than_may_run(pool):
    assert pool.register([CALL]) == {}
    workers = [pool.take() for _ in range(3)]
    assert workers[2] is None
    pool.release(workers[0])
    assert pool.take() is workers[0]


def test_functions_that_are_registered_already_start_nothing(pool):
    pool.register([CALL])
    (launcher,) = pool.launchers
    pool.register([CALL])
    assert pool.launchers == [launcher]


def test_a_function_that_cannot_be_loaded_is_named_with_the_reason(pool):
    class Unloadable:
        def __reduce__(self):
            return (exec, ("raise OSError('no licence')",))

    (reason,) = pool.register([Call("r", Unloadable(), {}, {}, 1)]).values()
    assert "no licence" in reason
    assert not pool.launchers


def test_ending_the_busy_leaves_the_idle(pool):
    pool.register([CALL])
    busy, idle = pool.take(), pool.take()
    pool.release(idle)
    pool.end_busy()
    assert (pool.busy, pool.idle) == ([], [idle])
    assert busy.connection.closed


def test_what_must_hold_a_model_is_not_sent():
    with pytest.raises(ValueError, match="it holds 64 MB"):
        packed(bytes(MAX_PICKLED + 1), {})
    function, settings = pickle.loads(packed(faulty.lengths, {"a": 1}))
    assert (function, settings) == (faulty.lengths, {"a": 1})
