import pytest

from litgrpo.cli import main as program
from litgrpo.runs.doctor.command import doctor
from tests.runs.doctor.run_folders import write_run

WARNING = [0.0] * 15 + [0.2] * 15


def exit_code(run, *level) -> int:
    try:
        doctor(str(run), *level)
    except SystemExit as stop:
        return stop.code
    return 0


def test_the_exit_code_depends_on_the_severity(tmp_path, capsys):
    run = write_run(tmp_path, completion__truncated_frac=WARNING)
    assert exit_code(run) == 0
    assert exit_code(run, "warning") == 1
    out = capsys.readouterr().out
    assert "WARNING since iteration" in out
    assert "not checked:" in out


@pytest.mark.parametrize("flag", ["--fail-on", "--fail_on"])
def test_the_command_takes_a_folder_and_a_severity(tmp_path, monkeypatch, capsys, flag):
    run = write_run(tmp_path, completion__truncated_frac=WARNING)
    monkeypatch.setattr("sys.argv", ["cli.py", "doctor", str(run), flag, "warning"])
    with pytest.raises(SystemExit) as stop:
        program.main()
    assert stop.value.code == 1
    assert "docs/reference/tools.md#truncated" in capsys.readouterr().out


def test_a_folder_without_a_run_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cli.py", "doctor", str(tmp_path)])
    assert program.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
