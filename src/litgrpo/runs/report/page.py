"""Assemble the HTML page of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from litgrpo.callbacks.metrics import definition
from litgrpo.runs.config import is_number
from litgrpo.runs.doctor.finding import Diagnosis, Finding
from litgrpo.runs.doctor.render import describe_no_problems
from litgrpo.runs.report import prompts, results, settings
from litgrpo.runs.report.charts import Curve, Drawing, draw, format_number, group_curves
from litgrpo.runs.report.texts import MAX_CHARS, MessageDiff, diff_messages
from litgrpo.runs.run import Row, Run
from litgrpo.text.program import program_name
from litgrpo.text.visible import visible

TEMPLATES = Path(__file__).parents[2] / "assets" / "report"
MAX_FINDINGS = 30
MAX_METRICS = 400  # in the last table
MAX_RUN_NAME_CHARS = 80


@dataclass(frozen=True)
class FindingCard:
    """A finding on the page, with completions that show it."""

    number: int
    finding: Finding
    samples: list[tuple[str, list[MessageDiff], list[str]]]


@dataclass(frozen=True)
class Chart:
    """A chart on the page."""

    title: str
    explanation: str
    names: list[str]
    drawing: Drawing


def render_page(runs: Sequence[Run], diagnoses: Sequence[Diagnosis | None] = ()) -> str:
    """Render the HTML report.

    Args:
        runs: one, or several that are compared with the first.
        diagnoses: of each run; None if it was not diagnosed.

    Returns:
        HTML; the same for the same runs.
    """
    padded = [*diagnoses, *[None] * (len(runs) - len(diagnoses))]
    several = len(runs) > 1
    comparisons = results.compare_with_first_run(runs) if several else []
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=" and ".join(visible(run.name, MAX_RUN_NAME_CHARS) for run in runs),
            runs=[view_run(run, diagnosis) for run, diagnosis in zip(runs, padded, strict=True)],
            several=several,
            comparisons=[
                {"name": visible(name, MAX_RUN_NAME_CHARS), "pairs": pairs, "note": visible(note)}
                for name, pairs, note in comparisons
            ],
            shared_charts=chart_runs_together(runs) if several else [],
            style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        )
    )


def _environment() -> Environment:
    # Texts of a model are escaped, and a misspelled name is an error.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = partial(visible, max_chars=MAX_CHARS)
    return environment


def view_run(run: Run, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Collect everything that the template shows of one run."""
    pairs = results.compare_first_and_last(run)
    findings = [] if diagnosis is None else list(diagnosis.findings)[:MAX_FINDINGS]
    hardest, easiest = prompts.rank_prompts(run)
    return {
        "name": visible(run.name, MAX_RUN_NAME_CHARS),
        "verdict": visible(results.write_verdict(run, pairs)),
        "direction": pairs[0].direction if pairs else "unknown",
        "pairs": pairs,
        "held_out": results.held_out_metrics(run),
        "facts": settings.describe_environment(run),
        "diagnosis": diagnosis,
        "success_rule": run.config.success_rule,
        "no_findings": "" if diagnosis is None else describe_no_problems(diagnosis),
        "cards": [make_card(n, finding) for n, finding in enumerate(findings, 1)],
        "charts": chart_run(run, findings),
        "always_zero": [t for t, curves, _ in group_curves(run) if _is_zero(curves)],
        "histories": prompts.follow_prompts(run),
        "hardest": hardest,
        "easiest": easiest,
        "components": tabulate_components(run),
        "audit": view_audit(run.audit),
        "audit_command": f"{program_name()} audit -c {run.run_dir}/config.yaml --report "
        f"{run.run_dir}/audit.json",
        "config": visible(run.config_text, 60_000),
        "commands": settings.repeat_commands(run),
        "metrics": tabulate_metrics(run),
        "notes": run.notes,
        "empty": not (run.names or run.evaluations),
    }


def make_card(number: int, finding: Finding) -> FindingCard:
    """Add the completions that show a finding."""
    samples = [
        (visible(row.get("prompt", ""), 400), diff_messages(row), prompts.describe_completion(row))
        for row in finding.samples
        if "completion" in row
    ]
    return FindingCard(number, finding, samples)


def chart_run(run: Run, findings: Sequence[Finding]) -> list[Chart]:
    """Draw the charts of a run, with a mark where each finding begins."""
    marks = [(float(finding.first_iteration), str(n)) for n, finding in enumerate(findings, 1)]
    return [
        Chart(title, text, [curve.name for curve in curves], draw(curves, run.iterations, marks))
        for title, curves, text in group_curves(run)
        if not _is_zero(curves)
    ]


def _is_zero(curves: Sequence[Curve]) -> bool:
    return not any(value for curve in curves for _, value in curve.points)


def chart_runs_together(runs: Sequence[Run]) -> list[Chart]:
    """Draw the first metric of each chart, with a curve for each run."""
    by_metric: dict[str, list[Curve]] = {}
    for number, run in enumerate(runs, 1):
        for _, (curve, *_), _ in group_curves(run):
            labelled = Curve(f"{number}: {run.name}", curve.points, curve.low, curve.high)
            by_metric.setdefault(curve.name, []).append(labelled)
    end = max(run.iterations for run in runs)
    return [
        Chart(visible(name), definition(name), [curve.name for curve in curves], draw(curves, end))
        for name, curves in by_metric.items()
        if len(curves) > 1 and not _is_zero(curves)
    ]


def tabulate_components(run: Run) -> list[list[str]]:
    """Return table cells for each reward component: weight, first and last mean, spread, share."""

    def cell(metric: str, position: int) -> str:
        return format_number(run[metric].iloc[position]) if metric in run else "unknown"

    rows = []
    for name in run.reward_components:
        weight = run.config.get(f"model.rewards.{name}.weight")
        rows.append(
            [
                visible(name, 80),
                format_number(weight) if is_number(weight) else "unknown",
                cell(f"reward/{name}", 0),
                cell(f"reward/{name}", -1),
                cell(f"reward/{name}_std", -1),
                cell(f"reward/{name}_share", -1),
            ]
        )
    return rows


def view_audit(report: Row) -> dict[str, Any]:
    """Return the result of a reward audit; {} if there is none."""
    lists = {
        name: [visible(text, 400) for text in texts if isinstance(text, str)]
        for name in ("faults", "remarks")
        if isinstance(texts := report.get(name), list)
    }
    if not isinstance(report.get("passed"), bool) or "faults" not in lists:
        return {}
    return {"passed": report["passed"], "remarks": [], **lists}


def tabulate_metrics(run: Run) -> list[list[str]]:
    """Return table cells for each logged metric: first, last, min, max, count, definition."""
    rows = []
    for name in run.names[:MAX_METRICS]:
        values = run[name]
        numbers = (values.iloc[0], values.iloc[-1], values.min(), values.max())
        rows.append([name, *map(format_number, numbers), f"{len(values):,}", definition(name)])
    return rows
