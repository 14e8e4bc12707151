"""The verb `report`: one page that shows a run, or several beside each other."""

from __future__ import annotations

from pathlib import Path

from litgrpo.arguments import require
from litgrpo.callbacks.run_folder import REPORT
from litgrpo.tools.doctor import run_files
from litgrpo.tools.doctor.diagnosis import examine
from litgrpo.tools.report.page import Diagnosis, page
from litgrpo.tools.report.run_files import METRICS, read

MOST_RUNS = 8


def report(runs: list[str], output: str | None = None) -> None:
    """Write one HTML file that shows a run: complete without a network, and without scripts.

    Verdict, diagnosis, before and after, curves, held-out prompts over time, reward parts, hardest
    and easiest prompts, settings, and the commands to repeat it. Several runs are compared with the
    first, prompt by prompt.

    Args:
        runs: run folders, at most 8.
        output: the file; default: report.html in the (first) run folder; of several runs
            report-of-several.html.
    """
    require(0 < len(runs) <= MOST_RUNS, f"give 1 to {MOST_RUNS} run folders; got {len(runs)}")
    places = [Path(run).resolve() for run in runs]
    twice = [run for run, place in zip(runs, places, strict=True) if places.count(place) > 1][:1]
    require(not twice, f"{''.join(twice)} is given twice; give each run folder once")
    path = write(runs, output)
    print(f"written to {path} ({path.stat().st_size / 1000:,.0f} kB)")


def report_at_end(run: str) -> None:
    """Write the page of a run that has just ended; what fails here costs a line and not the run.

    Args:
        run: its folder.
    """
    try:
        print(f"  open {write([run])} in a browser")
    except Exception as error:  # the run itself is done, and its files are written
        why = f"{type(error).__name__}: {error}"
        print(f"no report was written ({why}); `report {run} --debug` shows where")


def write(runs: list[str], output: str | None = None) -> Path:
    """Write the page; the file is complete or not there.

    Args:
        runs: run folders.
        output: the file.

    Raises:
        ValueError: there is no such folder, or no folder for the file.
    """
    name = REPORT if len(runs) == 1 else "report-of-several.html"
    path = Path(runs[0], name) if output is None else Path(output)
    read_runs = [read(run) for run in runs]
    require(
        path.parent.is_dir(), f"there is no folder {path.parent} for {path.name}; make it first"
    )
    require(not path.is_dir(), f"{path} is a folder; --output names the file to write")
    unfinished = path.with_name(f".{path.name}.tmp")
    text = page(read_runs, [diagnosis_of(Path(run)) for run in runs])
    try:
        unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror}): name another file with --output"
        raise ValueError(why) from error
    return unfinished.replace(path)


def diagnosis_of(folder: Path) -> Diagnosis | None:
    """What the doctor says of a run; None where there are no numbers to read."""
    if not (folder / METRICS).is_file():
        return None
    try:
        return examine(run_files.read(folder))
    except ValueError:  # no numbers in the file
        return None
