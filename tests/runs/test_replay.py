import json

import pytest

from litgrpo.runs.replay import replay
from tests.support.episodes import rows_of_episodes


@pytest.fixture
def run(tmp_path):
    """A run folder with samples of two iterations."""
    (tmp_path / "samples").mkdir()
    for number in (1, 10):
        rows = [row | {"iteration": number} for row in rows_of_episodes()]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "samples" / f"iteration-{number:06d}.jsonl").write_text(text)
    return tmp_path


def test_an_episode_of_the_last_samples_is_printed(run, capsys):
    replay(str(run))
    printed = capsys.readouterr().out
    assert "iteration-000010.jsonl, row 0 of 2" in printed
    assert "policy 2   | 6   (reward 1)" in printed


@pytest.mark.parametrize(("row", "number"), [("best", 0), ("worst", 1), ("1", 1)])
def test_an_episode_is_chosen_by_number_or_reward(run, row, number, capsys):
    replay(str(run), iteration=1, row=row)
    assert f"iteration-000001.jsonl, row {number} of 2" in capsys.readouterr().out


def test_predictions_are_replayed_without_training_samples(tmp_path, capsys):
    (tmp_path / "predictions.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n')
    replay(str(tmp_path))
    assert "policy     | 2" in capsys.readouterr().out


def test_an_incomplete_last_line_is_ignored(run, capsys):
    path = run / "samples" / "iteration-000010.jsonl"
    path.write_text(path.read_text() + '{"prompt": "2*')
    replay(str(path))
    assert "row 0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"iteration": 5}, "iteration 5; available: 1, 10"),
        ({"row": "2"}, "--row is '2'; it must be 0 to 1"),
        ({"row": "-1"}, "--row is '-1'"),
        ({"row": "good"}, "`best` or `worst`"),
    ],
)
def test_missing_iterations_and_rows_raise(run, options, text):
    with pytest.raises(ValueError, match=text):
        replay(str(run), **options)


@pytest.mark.parametrize("content", ["", "{\n", "[1]\n", '{"prompt": "1+1?"}\n'])
def test_a_file_without_samples_raises(tmp_path, content):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.jsonl has no samples"):
        replay(str(path))


def test_a_folder_without_samples_raises(tmp_path):
    with pytest.raises(ValueError, match="every_n_iterations"):
        replay(str(tmp_path))
    with pytest.raises(ValueError, match="nowhere"):
        replay(str(tmp_path / "nowhere"))


def test_escape_sequences_of_the_policy_are_printed_as_text(tmp_path, capsys):
    row = {"prompt": "1+1?", "completion": "\x1b[2J2"}
    (tmp_path / "predictions.jsonl").write_text(json.dumps(row) + "\n")
    replay(str(tmp_path))
    assert "policy     | [U+001B][2J2" in capsys.readouterr().out
