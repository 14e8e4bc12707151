"""The command `report`: write an HTML page of a run, or of several side by side."""

from __future__ import annotations

import shlex
from pathlib import Path

from litgrpo.arguments import require, require_folder_of
from litgrpo.files import write_text
from litgrpo.run_folder import CONFIG, REPORT
from litgrpo.runs.config import RunConfig
from litgrpo.runs.report.page import render_page
from litgrpo.runs.run import Run
from litgrpo.text.visible import visible

MAX_RUNS = 8


def report(runs: list[str], output: str | None = None) -> None:
    """Write a self-contained HTML report of a run.

    It has the verdict, the diagnosis, held-out results before and after, charts, held-out prompts
    over time, reward components, hardest and easiest prompts, settings, and the commands to repeat
    the run. Several runs are compared with the first, prompt by prompt.

    Args:
        runs: run folders, at most 8.
        output: file to write; default: report.html in the (first) run folder,
            report-of-several.html for several runs.
    """
    require(0 < len(runs) <= MAX_RUNS, f"expected 1 to {MAX_RUNS} run folders, got {len(runs)}")
    folders = [Path(run).resolve() for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        require(folders.count(folder) == 1, f"run folder {run} is given twice")
    path = write_report(runs, output)
    print(visible(f"written to {path} ({path.stat().st_size / 1000:,.0f} kB)"))


def report_at_end(run: str) -> None:
    """Write the report of a run that has just ended; a failure is logged and not raised."""
    try:
        print(visible(f"  open {shlex.quote(str(write_report([run])))} in a browser"))
    except Exception as error:  # training is finished and its files are written
        reason = f"{type(error).__name__}: {error}"
        print(visible(f"could not write the HTML report ({reason}); see `report {run} --debug`"))


def write_report(runs: list[str], output: str | None = None) -> Path:
    """Write the report; the file is complete or not written.

    Raises:
        ValueError: a run folder does not exist, or the file cannot be written.
    """
    from litgrpo.runs.doctor.diagnosis import examine  # imports pandas, which --help need not

    name = REPORT if len(runs) == 1 else "report-of-several.html"
    path = Path(runs[0], name) if output is None else Path(output)
    opened = [open_run(run) for run in runs]
    require_folder_of("output", output)
    require(not path.is_dir(), f"--output {path} is a folder; give a file")
    text = render_page(opened, [None if run.metrics.empty else examine(run) for run in opened])
    try:
        write_text(path, text)
    except OSError as error:
        raise ValueError(
            f"could not write {path} ({error.strerror}); give another file with --output"
        ) from error
    return path


def open_run(folder: str | Path) -> Run:
    """Open a run; a config that is not YAML is noted and left out.

    Raises:
        ValueError: there is no such folder.
    """
    run = Run(folder)
    try:
        _ = run.config
    except ValueError:
        run.config = RunConfig()
        run.notes.append(f"{CONFIG} is not valid YAML and was ignored.")
    return run
