import pytest

from litgrpo.cli import main as program
from litgrpo.tools.doctor.command import doctor
from tests.tools.doctor.writing import written

WARNING = [0.0] * 15 + [0.2] * 15


def code(run, *level) -> int:
    """The exit code of the function."""
    try:
        doctor(str(run), *level)
    except SystemExit as stop:
        return stop.code
    return 0


def test_the_exit_code_says_whether_something_is_as_severe(tmp_path, capsys):
    run = written(tmp_path, completion__truncated_frac=WARNING)
    assert code(run) == 0
    assert code(run, "warning") == 1
    assert code(run, "info") == 1
    said = capsys.readouterr().out
    assert "WARNING since iteration" in said
    assert "not checked:" in said


@pytest.mark.parametrize("flag", ["--fail-on", "--fail_on"])
def test_the_verb_takes_a_folder_and_a_level(tmp_path, monkeypatch, capsys, flag):
    run = written(tmp_path, completion__truncated_frac=WARNING)
    monkeypatch.setattr("sys.argv", ["cli.py", "doctor", str(run), flag, "warning"])
    with pytest.raises(SystemExit) as stop:
        program.main()
    assert stop.value.code == 1
    assert "docs/doctor.md#truncated" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cli.py", "doctor", str(tmp_path)])
    assert program.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
