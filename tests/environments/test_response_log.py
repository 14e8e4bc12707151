"""Response log: recorded responses after a resume, and deviations of environments."""

import json
from types import SimpleNamespace

import pytest

from litgrpo.environments.base import EpisodeStart, FailedEpisode, StepResult
from litgrpo.environments.episode import InProcessEpisodes
from litgrpo.environments.response_log import ResponseLog, find_deviations
from litgrpo.environments.workers import EpisodeWorkers
from tests.support.faulty import Clock, Counting, Dice, Echo, ModuleState
from tests.support.workers import starts

START = EpisodeStart({"prompt": "p"}, 7, (12, 0, 3, 1))
ANSWERS = [
    "opening",
    [{"role": "tool", "content": "x"}],
    StepResult("a", 0.1 + 0.2, True, ("s", (1, 2)), {"n": 1.0}, {"search": (2, 1)}),
    StepResult([{"role": "tool", "content": "x"}], None),
    FailedEpisode("timed out"),
]


@pytest.fixture
def response_log(tmp_path):
    response_log = ResponseLog(tmp_path / "response_log", tmp_path)
    yield response_log
    response_log.close()


def again(tmp_path):
    return ResponseLog(tmp_path / "response_log", tmp_path)


@pytest.mark.parametrize("answer", ANSWERS)
def test_find_returns_the_saved_response(response_log, tmp_path, answer) -> None:
    assert response_log.find(START, ("q",)) is None
    assert response_log.save(START, ("q",), answer) == answer
    other = again(tmp_path)
    assert response_log.find(START, ("q",)) == other.find(START, ("q",)) == answer
    other.close()


def test_another_turn_text_row_seed_or_episode_hears_nothing_of_it(response_log) -> None:
    response_log.save(START, ("q",), "a")
    row, seed, key = START.row, START.seed, START.key
    others = [
        EpisodeStart({"prompt": "r"}, seed, key), EpisodeStart(row, 8, key), EpisodeStart(row,
        seed, (12, 1, 3, 1)),
        EpisodeStart(row, seed, (13, 0, 3, 1)),
    ]  # fmt: skip
    assert [response_log.find(other, ("q",)) for other in others] == [None] * 4
    assert response_log.find(START, ("r",)) is response_log.find(START, ("q", "q")) is None
    assert response_log.find(START, ("q",)) == "a"


def test_a_line_that_a_kill_has_cut_is_skipped(response_log, tmp_path) -> None:
    response_log.save(START, (), "first")
    response_log.save(START, ("a",), StepResult("second"))
    response_log.close()
    (file,) = (tmp_path / "response_log").iterdir()
    whole = file.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        other = again(tmp_path)
        assert other.find(START, ()) == "first"
        assert other.find(START, ("a",)) is None
        other.save(START, ("a",), StepResult("new"))
        other.close()
        other = again(tmp_path)
        assert other.find(START, ("a",)) == StepResult("new")
        other.close()


def test_a_state_that_json_cannot_hold_is_its_text_from_the_first(response_log, tmp_path) -> None:
    strange = StepResult("a", state=frozenset([1]))  # type: ignore[arg-type]
    kept = response_log.save(START, ("q",), strange)
    assert kept.state == "frozenset({1})"
    other = again(tmp_path)
    assert other.find(START, ("q",)) == kept
    other.close()


def test_iterations_before_the_second_newest_checkpoint_are_forgotten(
    response_log, tmp_path
) -> None:
    for iteration in range(6):
        for name in {2: ["000002"], 4: ["000004"]}.get(iteration, []):
            (tmp_path / f"iteration={name}.ckpt").touch()
        response_log.save(EpisodeStart({}, 0, (iteration, 0, 0, 0)), (), "x")
    left = sorted(file.name for file in (tmp_path / "response_log").iterdir())
    assert left == [f"iteration={n:06d}.jsonl" for n in range(2, 6)]
    line = (tmp_path / "response_log" / left[0]).read_text()
    assert json.loads(line)["opening"] == "x"
    assert SimpleNamespace(**json.loads(line)).key[0] == 2


SAID = ("1", "two", "three words now")


@pytest.mark.parametrize("pool_class", [InProcessEpisodes, EpisodeWorkers])
def test_an_environment_that_draws_from_the_global_generators_does_not_deviate(pool_class) -> None:
    pool = pool_class(Dice())
    assert find_deviations(pool, starts(3), SAID) == []
    pool.close()


@pytest.mark.parametrize("environment", [Counting(), ModuleState(), Clock()])
def test_class_state_module_state_and_clocks_are_found(environment) -> None:
    found = find_deviations(InProcessEpisodes(environment), starts(2), SAID)
    assert found
    assert found[0].startswith("turn 1, played again: got StepResult(observation='")


def test_state_left_by_other_episodes_is_found() -> None:
    seeds = set()

    class Shared(Echo):
        def step(self, action):
            seeds.add(self.actions[0])
            return super().step(f"{action} {len(seeds)}")

    found = find_deviations(InProcessEpisodes(Shared()), starts(4)[1:], SAID)
    assert [line[: line.index(":")] for line in found] == [
        f"turn {n}, played next to others" for n in (2, 3)
    ]


def test_generators_that_are_not_kept_apart_are_found(monkeypatch) -> None:
    for name in ("episode.seed_rngs", "episode.set_rng_states"):
        monkeypatch.setattr(f"litgrpo.environments.{name}", lambda *states: None)
    pool = InProcessEpisodes(Dice())
    found = find_deviations(pool, starts(2), SAID)
    assert found
    assert found[0].startswith("reset, played again")


def test_an_episode_that_ends_earlier_is_a_difference() -> None:
    class Tired(Echo):
        left = 2

        def step(self, action):
            Tired.left -= 1
            return super().step("raise" if Tired.left < 0 else action)

    found = find_deviations(InProcessEpisodes(Tired(), max_failed_frac=1.0), starts(1), SAID)
    assert "KeyError" in found[0]
