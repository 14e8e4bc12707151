"""What a run that goes on hears again."""

import json
from types import SimpleNamespace

import pytest

from litgrpo.environments.base import Failed, Start, StepResult
from litgrpo.environments.response_log import Journal

START = Start({"prompt": "p"}, 7, (12, 0, 3, 1))
ANSWERS = [
    "opening",
    [{"role": "tool", "content": "x"}],
    StepResult("a", 0.1 + 0.2, True, ("s", (1, 2)), {"n": 1.0}, {"search": (2, 1)}),
    StepResult([{"role": "tool", "content": "x"}], None),
    Failed("timed out"),
]


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal", tmp_path)
    yield journal
    journal.close()


def again(tmp_path):
    return Journal(tmp_path / "journal", tmp_path)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_heard_again_as_it_was(journal, tmp_path, answer) -> None:
    assert journal.heard(START, ("q",)) is None
    assert journal.keep(START, ("q",), answer) == answer
    other = again(tmp_path)
    assert journal.heard(START, ("q",)) == other.heard(START, ("q",)) == answer
    other.close()


def test_another_turn_text_row_seed_or_episode_hears_nothing_of_it(journal) -> None:
    journal.keep(START, ("q",), "a")
    row, seed, key = START.row, START.seed, START.key
    others = [
        Start({"prompt": "r"}, seed, key), Start(row, 8, key), Start(row, seed, (12, 1, 3, 1)),
        Start(row, seed, (13, 0, 3, 1)),
    ]  # fmt: skip
    assert [journal.heard(other, ("q",)) for other in others] == [None] * 4
    assert journal.heard(START, ("r",)) is journal.heard(START, ("q", "q")) is None
    assert journal.heard(START, ("q",)) == "a"


def test_a_line_that_a_kill_has_cut_is_skipped(journal, tmp_path) -> None:
    journal.keep(START, (), "first")
    journal.keep(START, ("a",), StepResult("second"))
    journal.close()
    (file,) = (tmp_path / "journal").iterdir()
    whole = file.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        other = again(tmp_path)
        assert other.heard(START, ()) == "first"
        assert other.heard(START, ("a",)) is None
        other.keep(START, ("a",), StepResult("new"))
        other.close()
        other = again(tmp_path)
        assert other.heard(START, ("a",)) == StepResult("new")
        other.close()


def test_a_state_that_json_cannot_hold_is_its_text_from_the_first(journal, tmp_path) -> None:
    strange = StepResult("a", state=frozenset([1]))  # type: ignore[arg-type]
    kept = journal.keep(START, ("q",), strange)
    assert kept.state == "frozenset({1})"
    other = again(tmp_path)
    assert other.heard(START, ("q",)) == kept
    other.close()


def test_iterations_before_the_second_newest_checkpoint_are_forgotten(journal, tmp_path) -> None:
    for iteration in range(6):
        for name in {2: ["000002"], 4: ["000004"]}.get(iteration, []):
            (tmp_path / f"iteration={name}.ckpt").touch()
        journal.keep(Start({}, 0, (iteration, 0, 0, 0)), (), "x")
    left = sorted(file.name for file in (tmp_path / "journal").iterdir())
    assert left == [f"iteration={n:06d}.jsonl" for n in range(2, 6)]
    line = (tmp_path / "journal" / left[0]).read_text()
    assert json.loads(line)["opening"] == "x"
    assert SimpleNamespace(**json.loads(line)).key[0] == 2
