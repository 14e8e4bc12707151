"""The simulation by hand, and one published gain."""

from dataclasses import replace

import pytest

from tests.benchmarks import asynchrony
from tests.benchmarks.asynchrony import (
    HOST_S,
    PUBLISHED,
    Case,
    Lengths,
    drain_time,
    predict_time,
    simulate,
)

EVEN = Case(8, Lengths(100, 0.0, 1_000), fixed_s=1.0, row_s=0.5)


def test_rows_of_one_length_take_a_step_for_each_token():
    assert drain_time(EVEN, 2) == pytest.approx(100 * (1.0 + 4 * 0.5))
    assert drain_time(replace(EVEN, wait_s=7.0), 8) == pytest.approx(100 * 1.5 + 7)


def test_a_row_that_ends_makes_room_for_the_others(monkeypatch):
    monkeypatch.setattr(Lengths, "draw", lambda *_: [10.0, 30.0])
    # two rows for 10 tokens, then one for 20
    assert drain_time(replace(EVEN, rows=2), 1) == pytest.approx(10 * 2.0 + 20 * 1.5)


@pytest.mark.parametrize("learn_s", [100.0, 1_000.0])
def test_one_step_off_takes_the_larger_of_both(learn_s):
    rollout = drain_time(EVEN, 2)
    found = simulate(EVEN, 2, learn_s, 0.0, ahead=True)
    assert found.step_s == pytest.approx(max(rollout, learn_s + HOST_S))
    assert found.learners_idle == pytest.approx(max(0.0, 1 - (learn_s + HOST_S) / rollout))


def test_without_staleness_one_waits_for_the_other():
    found = simulate(EVEN, 2, 50.0, 0.0, ahead=False)
    assert found.step_s == pytest.approx(drain_time(EVEN, 2) + 50.0 + HOST_S)


def test_a_stream_does_not_wait_for_the_longest_row():
    tail = replace(EVEN, rows=64, lengths=Lengths(100, 1.2, 2_000))
    off, stream = (
        simulate(tail, 16, 10.0, stale, ahead=ahead) for stale, ahead in ((0.0, True), (1.0, False))
    )
    assert stream.step_s < 0.8 * off.step_s
    assert stream.samplers_idle < off.samplers_idle


def test_a_published_gain_is_reproduced(monkeypatch):
    monkeypatch.setattr(asynchrony, "UPDATES", 5)
    pair = PUBLISHED[0]
    gain, litgrpo = pair.step_s / pair.async_s, pair.step_s / predict_time(pair)
    assert litgrpo == pytest.approx(gain, rel=0.2)
