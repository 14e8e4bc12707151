"""Measure the recall and the false alarms of the doctor on labelled runs."""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

from litgrpo.evaluation.intervals import wilson_interval
from litgrpo.runs.config import RunConfig
from litgrpo.runs.doctor.diagnosis import examine
from litgrpo.runs.run import Run, table_of
from tests.runs.doctor.corpus import PACKED

FAILED, HEALTHY = "failed", "healthy"


@dataclass(frozen=True)
class Verdict:
    """Alarms about a labelled run.

    Args:
        run: the run with its label.
        alarms: {rule with a finding of at least warning: first iteration}.
        critical: whether one of them is critical.
        first: rule of the first finding.
    """

    run: dict[str, Any]
    alarms: dict[str, int | None]
    critical: bool
    first: str

    @property
    def label(self) -> str:
        return self.run["label"]["label"]

    @property
    def cause_named(self) -> bool:
        """True if one of the alarms is the planted fault."""
        return any(name in self.alarms for name in self.run["label"]["expected"])

    @property
    def delay(self) -> int | None:
        """Iterations from the onset to the first iteration of the finding."""
        iterations = [self.alarms.get(name) for name in self.run["label"]["expected"]]
        known = [iteration for iteration in iterations if iteration is not None]
        return min(known) - self.run["label"]["since"] if known else None


def load_runs(half: str) -> list[dict[str, Any]]:
    """Load the labelled runs of a half."""
    with gzip.open(PACKED / f"{half}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def to_run(run: dict[str, Any]) -> Run:
    """Convert a labelled run to the input of the rules."""
    names = list(run["table"])
    rows = [
        dict(zip(names, cells, strict=True)) for cells in zip(*run["table"].values(), strict=True)
    ]
    settings = run["config"]["model"]["init_args"]
    # The runs were recorded with the first reward as the one that decides correctness.
    success = {"evaluation": {"success_reward": next(iter(settings["rewards"]))}}
    config = {"model": {"init_args": settings | success}}
    return Run(
        metrics=table_of(rows), samples=run["samples"], config=RunConfig(run["config"] | config)
    )


def verdict_of_doctor(run: dict[str, Any]) -> Verdict:
    """Diagnose a labelled run."""
    diagnosis = examine(to_run(run))
    findings = [finding for finding in diagnosis.all_findings if finding.at_least("warning")]
    critical = any(finding.severity == "critical" for finding in findings)
    first = next((finding.rule for finding in diagnosis.findings), "")
    alarms = {finding.rule: finding.first_iteration for finding in findings}
    return Verdict(run, alarms, critical, first)


def share(hits: int, of: int) -> str:
    """Format a fraction with its Wilson bounds."""
    low, high = wilson_interval(hits, of)
    return f"{hits}/{of} = {hits / max(1, of):.3f} [{low:.3f}, {high:.3f}]"


def summary(verdicts: list[Verdict]) -> dict[str, str]:
    """Measure recall, false alarms and delay."""
    failed = [verdict for verdict in verdicts if verdict.label == FAILED]
    healthy = [verdict for verdict in verdicts if verdict.label == HEALTHY]
    delays = [abs(verdict.delay) for verdict in failed if verdict.delay is not None]
    first = [verdict.first in verdict.run["label"]["expected"] for verdict in failed]
    return {
        "any alarm in failed runs": share(sum(bool(v.alarms) for v in failed), len(failed)),
        "the cause named": share(sum(v.cause_named for v in failed), len(failed)),
        "the cause is the first finding": share(sum(first), len(failed)),
        "false alarms in healthy runs": share(sum(bool(v.alarms) for v in healthy), len(healthy)),
        "failed runs, critical only": share(sum(v.critical for v in failed), len(failed)),
        "healthy runs, critical only": share(sum(v.critical for v in healthy), len(healthy)),
        "first iteration, median error": f"{median(delays or [0]):.0f} iterations",
    }


def confusion(verdicts: list[Verdict]) -> list[list[str]]:
    """Return a row per kind: failed runs, named causes, healthy runs, false alarms, findings."""
    kinds = defaultdict(list)
    for verdict in verdicts:
        kinds[verdict.run["label"]["kind"]].append(verdict)
    quiet = {
        kind for kind, runs in kinds.items() if not any(v.alarms or v.label == FAILED for v in runs)
    }
    for kind in quiet:
        kinds[f"{len(quiet)} healthy kinds without any finding"] += kinds.pop(kind)
    lines = [["kind", "failed", "named", "healthy", "false alarms", "findings"]]
    for kind, runs in kinds.items():
        failed = [verdict for verdict in runs if verdict.label == FAILED]
        healthy = [verdict for verdict in runs if verdict.label == HEALTHY]
        rules = Counter(name for verdict in runs for name in verdict.alarms)
        numbers = (
            len(failed),
            sum(verdict.cause_named for verdict in failed),
            len(healthy),
            sum(bool(verdict.alarms) for verdict in healthy),
        )
        findings = ", ".join(f"{name} {count}" for name, count in rules.most_common(6))
        lines.append([kind, *map(str, numbers), findings])
    return lines


def markdown(lines: list[list[str]]) -> str:
    """Format rows of cells as a Markdown table."""
    head, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def report(half: str) -> None:
    """Print the tables of a half, its missed faults and false alarms."""
    verdicts = [verdict_of_doctor(run) for run in load_runs(half)]
    labels = Counter(verdict.label for verdict in verdicts)
    print(", ".join(f"{count} {label}" for label, count in labels.items()), "\n")
    print(markdown(confusion(verdicts)), "\n")
    print(markdown([["", "litgrpo doctor"], *map(list, summary(verdicts).items())]))
    for verdict in verdicts:
        missed = verdict.label == FAILED and not verdict.cause_named
        if missed or (verdict.label == HEALTHY and verdict.alarms):
            accuracy = verdict.run["label"]["accuracy"][::3]
            print("missed" if missed else "false", verdict.run["name"], accuracy, verdict.alarms)
