import pytest

from litgrpo.tools.report.run_files import read, series_of
from tests.tools.report.run_folders import make_run


def test_a_whole_run_is_read(tmp_path):
    run = read(make_run(tmp_path / "mine"))
    assert (run.name, run.iterations, run.evaluated) == ("mine", 60, (0, 60))
    assert run.command.startswith("python cli.py fit -c configs/quickstart.yaml")
    assert run.series["val/avg@2"] == [(0, 0.25), (60, 0.75)]
    assert len(run.evaluations[0]) == 20
    assert not run.notes


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no run folder"):
        read(tmp_path / "none")


def test_what_a_kill_cut_is_left_out_and_said(tmp_path):
    run = make_run(tmp_path / "killed")
    with (run / "metrics.csv").open("a") as file:
        file.write("61,0.9")
    with (run / "evaluation" / "iteration-000060.jsonl").open("a") as file:
        file.write('{"index": 9, "pro')
    (run / "summary.json").write_text('{"seconds": 1')
    found = read(run)
    assert found.iterations == 60
    assert found.summary == {}
    assert "summary.json is damaged and was left out." in found.notes
    assert "iteration-000060.jsonl: 1 of 21 lines could not be read." in found.notes


@pytest.mark.parametrize("content", ["[1, 2]\n", '{"index": 1}\n', "null\n", "[" * 9999 + "\n"])
def test_lines_that_are_no_evaluation_are_left_out(content, tmp_path):
    run = make_run(tmp_path / "odd")
    (run / "evaluation" / "iteration-000060.jsonl").write_text(content)
    assert list(read(run).evaluations) == [0]


def test_numbers_that_are_not_finite_are_counted_and_a_resumed_iteration_is_one(tmp_path):
    path, notes = tmp_path / "metrics.csv", []
    path.write_text("step,a\n1,nan\n2,0.5\n2,0.25\nx,9\n3,inf\n")
    assert series_of(path, notes) == {"a": [(2, 0.25)]}
    assert notes == ["2 logged numbers are not finite; curves leave them out."]


def test_of_many_evaluations_five_are_shown_with_the_first_and_last(tmp_path):
    run = make_run(tmp_path / "many")
    text = (run / "evaluation" / "iteration-000000.jsonl").read_text()
    for n in range(1, 60):
        (run / "evaluation" / f"iteration-{n:06d}.jsonl").write_text(text)
    assert list(read(run).evaluations) == [0, 15, 30, 45, 60]
