import pytest

from litgrpo.tools.report.command import report, report_at_end
from tests.cli.running import cli  # noqa: F401 (a fixture)
from tests.tools.report.run_folders import make_run


def test_the_page_is_written_to_the_run_folder(tmp_path, capsys):
    run = make_run(tmp_path / "mine")
    report([str(run)])
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "report.html (" in capsys.readouterr().out
    first = (run / "report.html").read_bytes()
    report([str(run)])
    assert (run / "report.html").read_bytes() == first
    assert not list(run.glob(".report*"))


def test_folders_are_words_of_the_command_line(tmp_path, cli):  # noqa: F811
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    code, said, _ = cli("report", *runs, "--output", str(tmp_path / "two.html"))
    assert code == 0
    assert "two.html" in said
    assert "b against a" in (tmp_path / "two.html").read_text()


@pytest.mark.parametrize(
    ("runs", "output", "said"),
    [
        ([], None, "give 1 to 8 run folders; got 0"),
        (["a", "./a"], None, "a is given twice"),
        (["none"], None, "there is no run folder none"),
        (["."], "nowhere/x.html", "there is no folder nowhere"),
        (["."], ".", "is a folder"),
        (["."], "/proc/page.html", "/proc/page.html cannot be written .*--output"),
    ],
)
def test_what_cannot_be_shown_is_refused(runs, output, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        report(runs, output)


def test_a_report_that_fails_costs_a_line_and_not_the_run(tmp_path, capsys):
    report_at_end(str(tmp_path / "gone"))
    assert "no report was written (ValueError: there is no run folder" in capsys.readouterr().out
