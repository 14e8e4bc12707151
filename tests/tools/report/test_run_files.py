import pytest

from litgrpo.tools.report.run_files import read_run_files
from tests.tools.report.run_folders import make_run


def test_a_whole_run_is_read(tmp_path):
    run = read_run_files(make_run(tmp_path / "mine"))
    assert (run.name, run.iterations, run.evaluated) == ("mine", 60, (0, 60))
    assert run.command.startswith("python cli.py fit -c configs/quickstart.yaml")
    assert run.series["val/avg@2"] == [(0, 0.25), (60, 0.75)]
    assert len(run.evaluations[0]) == 20
    assert not run.notes


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="none"):
        read_run_files(tmp_path / "none")


def test_lines_cut_off_by_a_kill_are_left_out_and_noted(tmp_path):
    run = make_run(tmp_path / "killed")
    with (run / "metrics.csv").open("a") as file:
        file.write("61,0.9")
    with (run / "evaluation" / "iteration-000060.jsonl").open("a") as file:
        file.write('{"index": 9, "pro')
    (run / "summary.json").write_text('{"seconds": 1')
    found = read_run_files(run)
    assert found.iterations == 60
    assert found.summary == {}
    assert [note.split()[0] for note in found.notes] == ["iteration-000060.jsonl:", "summary.json"]


@pytest.mark.parametrize("content", ["[1, 2]\n", '{"index": 1}\n', "null\n", "[" * 9999 + "\n"])
def test_lines_without_an_evaluation_are_left_out(content, tmp_path):
    run = make_run(tmp_path / "odd")
    (run / "evaluation" / "iteration-000060.jsonl").write_text(content)
    assert list(read_run_files(run).evaluations) == [0]


def test_values_that_are_not_finite_are_counted_and_the_last_value_wins(
    tmp_path,
):
    (tmp_path / "metrics.csv").write_text("step,a\n1,nan\n2,0.5\n2,0.25\nx,9\n3,inf\n")
    run = read_run_files(tmp_path)
    assert run.series == {"a": [(2, 0.25)]}
    assert [note.split()[0] for note in run.notes] == ["2"]


def test_five_evaluations_are_kept_with_the_first_and_last(tmp_path):
    run = make_run(tmp_path / "many")
    text = (run / "evaluation" / "iteration-000000.jsonl").read_text()
    for n in range(1, 60):
        (run / "evaluation" / f"iteration-{n:06d}.jsonl").write_text(text)
    assert list(read_run_files(run).evaluations) == [0, 15, 30, 45, 60]
