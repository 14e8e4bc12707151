import pytest

from litgrpo.runs.report.command import report, report_at_end
from tests.runs.report.run_folders import make_run


def test_the_report_is_written_to_the_run_folder(tmp_path, capsys):
    run = make_run(tmp_path / "mine\x1b[2J")
    report([str(run)])
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "mine[U+001B][2J/report.html (" in capsys.readouterr().out
    first = (run / "report.html").read_bytes()
    report([str(run)])
    assert (run / "report.html").read_bytes() == first
    assert not list(run.glob(".report*"))


def test_several_folders_are_given_on_the_command_line(tmp_path, cli):
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    code, out, _ = cli("report", *runs, "--output", str(tmp_path / "two.html"))
    assert code == 0
    assert "two.html" in out
    assert "b against a" in (tmp_path / "two.html").read_text()


@pytest.mark.parametrize(
    ("runs", "output", "match"),
    [
        ([], None, "got 0"),
        (["a", "./a"], None, "a is given twice"),
        (["none"], None, "none"),
        (["."], "nowhere/x.html", "nowhere"),
        (["."], ".", "--output"),
        (["."], "/proc/page.html", "/proc/page.html .*--output"),
    ],
)
def test_bad_arguments_are_errors_that_name_them(runs, output, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=match):
        report(runs, output)


def test_a_failed_report_is_logged_and_does_not_fail_the_run(tmp_path, capsys):
    report_at_end(str(tmp_path / "gone"))
    assert "ValueError" in capsys.readouterr().out
