"""The page of one run, or of several beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from litgrpo.callbacks.metric_table import definition
from litgrpo.tools.report import prompts, results, settings
from litgrpo.tools.report.curves import Drawing, Line, draw, short
from litgrpo.tools.report.panels import panels, part_names
from litgrpo.tools.report.run_files import Row, RunFiles
from litgrpo.tools.report.texts import Said, dialogue, visible

TEMPLATES = Path(__file__).parents[2] / "assets" / "report"
MOST_FINDINGS = 30
MOST_NAMES = 400  # of numbers in the last table


class Finding(Protocol):
    """What the page asks of a finding; `litgrpo.tools.doctor` makes them."""

    @property
    def what(self) -> str:
        """One sentence."""

    @property
    def severity(self) -> str:
        """`info`, `warning` or `critical`."""

    @property
    def since(self) -> int:
        """First iteration in which it shows."""

    @property
    def evidence(self) -> Sequence[str]:
        """Numbers that show it."""

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Completions that show it."""

    @property
    def key(self) -> str:
        """Key of the recipe to change."""

    @property
    def command(self) -> str:
        """Starts the changed run."""


class Diagnosis(Protocol):
    """What the page asks of a diagnosis."""

    @property
    def findings(self) -> Sequence[Finding]:
        """The causes."""

    @property
    def fine(self) -> Mapping[str, str]:
        """What was checked and is well."""

    @property
    def unchecked(self) -> Mapping[str, str]:
        """What could not be checked."""


@dataclass(frozen=True)
class Card:
    """A finding on the page."""

    number: int
    finding: Finding
    samples: list[tuple[str, list[Said], list[str]]]


@dataclass(frozen=True)
class Chart:
    """A chart on the page."""

    title: str
    about: str
    names: list[str]
    drawing: Drawing


def page(runs: Sequence[RunFiles], diagnoses: Sequence[Diagnosis | None] = ()) -> str:
    """The file.

    Args:
        runs: one, or several that are compared with the first.
        diagnoses: of each run; None where nobody looked.

    Returns:
        HTML; the same for the same runs.
    """
    known = [*diagnoses, *[None] * (len(runs) - len(diagnoses))]
    views = [view(run, found) for run, found in zip(runs, known, strict=True)]
    several = len(runs) > 1
    return (
        environment()
        .get_template("page.html")
        .render(
            title=" and ".join(visible(run.name, 80) for run in runs),
            runs=views,
            several=several,
            compared=[compared_view(name, found) for name, found in results.against_first(runs)],
            together=charts_together(runs) if several else [],
            style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        )
    )


def environment() -> Environment:
    """Templates in which every text is escaped and every name must be known."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["visible"] = visible
    return made


def view(run: RunFiles, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Everything that the template shows of one run."""
    found = results.of_run(run)
    findings = [] if diagnosis is None else list(diagnosis.findings)[:MOST_FINDINGS]
    names, stated = settings.stated(run)
    return {
        "name": visible(run.name, 80),
        "verdict": results.verdict(run, found),
        "way": found[0].way if found else "unknown",
        "pairs": found,
        "held_out": results.held_out(run),
        "facts": settings.environment(run),
        "diagnosis": diagnosis,
        "cards": [card(n, each) for n, each in enumerate(findings, 1)],
        "charts": charts(run, findings),
        "always_zero": [title for title, lines, _ in panels(run.series) if is_zero(lines)],
        "followed": prompts.followed(run),
        "ranked": prompts.ranked(run),
        "parts": parts(run),
        "audit": audit(run.audit),
        "audit_command": f"python cli.py audit -c {folder_of(run)}/config.yaml --report "
        f"{folder_of(run)}/audit.json",
        "recipes": names,
        "stated": stated,
        "config": visible(run.config_text, 60_000),
        "commands": settings.repeat(run),
        "numbers": numbers(run),
        "notes": run.notes,
        "empty": not (run.series or run.evaluations),
    }


def folder_of(run: RunFiles) -> str:
    """The run folder as its recipe names it."""
    return str(run.setting("run_dir") or f"runs/{run.name}")


def card(number: int, finding: Finding) -> Card:
    """A finding with the completions that show it."""
    samples = [
        (visible(row.get("prompt", ""), 400), dialogue(dict(row)), prompts.notes_of(dict(row)))
        for row in finding.samples
        if "completion" in row
    ]
    return Card(number, finding, samples)


def charts(run: RunFiles, findings: Sequence[Finding]) -> list[Chart]:
    """The curves, with a mark where each finding begins."""
    marks = [(float(each.since), str(n)) for n, each in enumerate(findings, 1)]
    return [
        Chart(title, about, [line.name for line in lines], draw(lines, run.iterations, marks))
        for title, lines, about in panels(run.series)
        if not is_zero(lines)
    ]


def is_zero(lines: Sequence[Line]) -> bool:
    """Whether there is nothing to see."""
    return not any(value for line in lines for _, value in line.points)


def charts_together(runs: Sequence[RunFiles]) -> list[Chart]:
    """The first number of each chart, a line for each run."""
    found: dict[str, list[Line]] = {}
    for number, run in enumerate(runs):
        for _, (line, *_), _ in panels(run.series):
            named = Line(f"{number + 1}: {run.name}", line.points, line.low, line.high)
            found.setdefault(line.name, []).append(named)
    last = max(run.iterations for run in runs)
    return [
        Chart(name, definition(name), [line.name for line in lines], draw(lines, last))
        for name, lines in found.items()
        if len(lines) > 1 and not is_zero(lines)
    ]


def parts(run: RunFiles) -> list[list[str]]:
    """A line for each reward function: weight, first and last mean, spread, share."""

    def at(name: str, place: int) -> str:
        points = run.series.get(name)
        return short(points[place][1]) if points else "unknown"

    weights = run.setting("model.init_args.rewards")
    weights = weights if isinstance(weights, dict) else {}
    return [
        [
            visible(name, 80),
            _weight(weights.get(name)),
            at(f"reward/{name}", 0),
            at(f"reward/{name}", -1),
            at(f"reward/{name}_std", -1),
            at(f"reward/{name}_share", -1),
        ]
        for name in part_names(run.series)
    ]


def _weight(reward: Any) -> str:
    weight = reward.get("weight") if isinstance(reward, dict) else None
    return short(weight) if isinstance(weight, int | float) else "unknown"


def audit(report: Row) -> dict[str, Any]:
    """What an audit of the rewards came to; nothing without one."""
    lists = {
        name: [visible(each, 400) for each in found if isinstance(each, str)]
        for name in ("faults", "remarks")
        if isinstance(found := report.get(name), list)
    }
    known = isinstance(report.get("passed"), bool) and "faults" in lists
    return {"passed": report["passed"], "remarks": [], **lists} if known else {}


def numbers(run: RunFiles) -> list[list[str]]:
    """Every logged number: first, last, smallest, largest, how often, what it means."""
    found = []
    for name, points in list(run.series.items())[:MOST_NAMES]:
        values = [value for _, value in points]
        ends = (values[0], values[-1], min(values), max(values))
        found.append([name, *map(short, ends), f"{len(values):,}", definition(name)])
    return found


def compared_view(name: str, found: Sequence[results.Pair]) -> dict[str, Any]:
    """Another run against the first."""
    return {"name": visible(name, 80), "pairs": found}
