"""Measure the recall and the false alarms of the doctor, and of other tools, on labelled runs.

python -m tests.tools.doctor.measure --half held_out [--verdicts verdicts.json]
"""

import argparse
import gzip
import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from litgrpo.evaluation.intervals import wilson_interval
from litgrpo.tools.doctor.diagnosis import examine
from litgrpo.tools.doctor.run import RunConfig, RunLog, RunMetrics
from tests.tools.doctor.corpus import PACKED

FAILED, HEALTHY, CRITICAL = "failed", "healthy", "critical"


@dataclass(frozen=True)
class Verdict:
    """Alarms of a tool about a labelled run.

    Args:
        run: the run with its label.
        alarms: {rule with a finding of at least warning: first iteration}.
        critical: whether one of them is critical.
        first: rule of the first finding.
    """

    run: dict[str, Any]
    alarms: dict[str, int | None]
    critical: bool
    first: str = ""

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
        found = [self.alarms.get(name) for name in self.run["label"]["expected"]]
        known = [since for since in found if since is not None]
        return min(known) - self.run["label"]["since"] if known else None


def load_runs(half: str) -> list[dict[str, Any]]:
    """Load the labelled runs of a half."""
    with gzip.open(PACKED / f"{half}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def run_log(run: dict[str, Any]) -> RunLog:
    """Convert a labelled run to the input of the rules."""
    names = list(run["table"])
    rows = [
        dict(zip(names, cells, strict=True)) for cells in zip(*run["table"].values(), strict=True)
    ]
    settings = run["config"]["model"]["init_args"]
    # The runs were recorded with the first reward as the one that decides correctness.
    success = {"evaluation": {"success_reward": next(iter(settings["rewards"]))}}
    config = {"model": {"init_args": settings | success}}
    return RunLog(
        RunMetrics.from_rows(rows), tuple(run["samples"]), RunConfig(run["config"] | config)
    )


def verdict_of_doctor(run: dict[str, Any]) -> Verdict:
    """Diagnose a labelled run."""
    diagnosis = examine(run_log(run))
    findings = [each for each in diagnosis.all_findings if each.at_least("warning")]
    critical = any(each.severity == CRITICAL for each in findings)
    first = next((each.rule for each in diagnosis.findings), "")
    alarms = {each.rule: each.first_iteration for each in findings}
    return Verdict(run, alarms, critical, first)


def verdict_of_other(run: dict[str, Any], alarms: list[list[Any]]) -> Verdict:
    """Convert another tool's alarms: detector, first step and severity each."""
    critical = any(severity == CRITICAL for *_, severity in alarms)
    return Verdict(run, {name: step for name, step, _ in reversed(alarms)}, critical)


def share(hits: int, of: int) -> str:
    """Format a fraction with its Wilson bounds."""
    low, high = wilson_interval(hits, of)
    return f"{hits}/{of} = {hits / max(1, of):.3f} [{low:.3f}, {high:.3f}]"


def summary(verdicts: list[Verdict], names_causes: bool) -> dict[str, str]:
    """Measure recall, false alarms and delay of one tool."""
    failed = [each for each in verdicts if each.label == FAILED]
    healthy = [each for each in verdicts if each.label == HEALTHY]
    found = {
        "any alarm in failed runs": share(sum(bool(v.alarms) for v in failed), len(failed)),
        "the cause named": "not measured",
        "false alarms in healthy runs": share(sum(bool(v.alarms) for v in healthy), len(healthy)),
        "failed runs, critical only": share(sum(v.critical for v in failed), len(failed)),
        "healthy runs, critical only": share(sum(v.critical for v in healthy), len(healthy)),
    }
    if names_causes:
        delays = [abs(v.delay) for v in failed if v.delay is not None]
        found["the cause named"] = share(sum(v.cause_named for v in failed), len(failed))
        first = [v.first in v.run["label"]["expected"] for v in failed]
        found["the cause is the first finding"] = share(sum(first), len(failed))
        found["first iteration, median error"] = f"{median(delays or [0]):.0f} iterations"
    return found


def confusion(verdicts: list[Verdict]) -> list[list[str]]:
    """Return a row per kind: failed runs, named causes, healthy runs, false alarms, findings."""
    kinds = defaultdict(list)
    for each in verdicts:
        kinds[each.run["label"]["kind"]].append(each)
    quiet = {kind for kind, runs in kinds.items() if not any(each.alarms for each in runs)}
    quiet -= {kind for kind in quiet if any(each.label == FAILED for each in kinds[kind])}
    for kind in quiet:
        kinds[f"{len(quiet)} healthy kinds without any finding"] += kinds.pop(kind)
    lines = [["kind", "failed", "named", "healthy", "false alarms", "findings"]]
    for kind, runs in kinds.items():
        failed = [each for each in runs if each.label == FAILED]
        healthy = [each for each in runs if each.label == HEALTHY]
        found = Counter(name for each in runs for name in each.alarms)
        lines.append(
            [
                kind,
                str(len(failed)),
                str(sum(each.cause_named for each in failed)),
                str(len(healthy)),
                str(sum(bool(each.alarms) for each in healthy)),
                ", ".join(f"{name} {count}" for name, count in found.most_common(6)),
            ]
        )
    return lines


def markdown(lines: list[list[str]]) -> str:
    """Format rows of cells as a Markdown table."""
    head, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def main() -> None:
    """Print the tables of a half."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=("dev", "held_out"), required=True)
    parser.add_argument("--verdicts", type=Path, help="output of other_tools.py")
    given = parser.parse_args()
    report(given.half, given.verdicts)


def report(half: str, verdicts_of_others: Path | None = None) -> None:
    """Print the tables of a half, its missed faults and false alarms."""
    runs = load_runs(half)
    ours = [verdict_of_doctor(run) for run in runs]
    counted = Counter(each.label for each in ours)
    print(", ".join(f"{count} {label}" for label, count in counted.items()), "\n")
    print(markdown(confusion(ours)), "\n")
    columns = {"litgrpo doctor": summary(ours, names_causes=True)}
    others = json.loads(verdicts_of_others.read_text()) if verdicts_of_others else {}
    for tool in ("rldoctor", "rlwatch") if others else ():
        theirs = [verdict_of_other(run, others[run["name"]][tool]) for run in runs]
        columns[tool] = summary(theirs, names_causes=False)
    names = list(columns["litgrpo doctor"])
    lines = [
        ["", *columns],
        *([name, *(c.get(name, "") for c in columns.values())] for name in names),
    ]
    print(markdown(lines))
    for each in ours:
        missed = each.label == FAILED and not each.cause_named
        if missed or (each.label == HEALTHY and each.alarms):
            print(
                "missed" if missed else "false",
                each.run["name"],
                each.run["label"]["accuracy"][::3],
                each.alarms,
            )


if __name__ == "__main__":
    main()
