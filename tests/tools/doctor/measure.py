"""How often the doctor is right on labelled runs, and how often others are on the same files.

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

from litgrpo.evaluation.intervals import wilson
from litgrpo.tools.doctor.config import Config
from litgrpo.tools.doctor.diagnosis import examine
from litgrpo.tools.doctor.metrics import of_rows
from litgrpo.tools.doctor.run_files import Run
from tests.tools.doctor.corpus import PACKED

FAILED, HEALTHY, CRITICAL = "failed", "healthy", "critical"


@dataclass(frozen=True)
class Verdict:
    """What a tool said of a run.

    Args:
        run: with its label.
        alarms: rules that found a warning or worse, and since when.
        critical: whether one of them is critical.
        first: the rule of the first finding.
    """

    run: dict[str, Any]
    alarms: dict[str, int | None]
    critical: bool
    first: str = ""

    @property
    def label(self) -> str:
        return self.run["label"]["label"]

    @property
    def named(self) -> bool:
        """Whether one of the alarms is what the run suffers from."""
        return any(name in self.alarms for name in self.run["label"]["expected"])

    @property
    def delay(self) -> int | None:
        """Iterations from the onset to what was said of it."""
        found = [self.alarms.get(name) for name in self.run["label"]["expected"]]
        known = [since for since in found if since is not None]
        return min(known) - self.run["label"]["since"] if known else None


def labelled(half: str) -> list[dict[str, Any]]:
    """The runs of a half."""
    with gzip.open(PACKED / f"{half}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def run_of(line: dict[str, Any]) -> Run:
    """A labelled run as the doctor reads one."""
    names = list(line["table"])
    rows = [
        dict(zip(names, cells, strict=True)) for cells in zip(*line["table"].values(), strict=True)
    ]
    return Run(of_rows(rows), tuple(line["samples"]), Config(line["config"]))


def ours(line: dict[str, Any]) -> Verdict:
    """What the doctor says of a run."""
    diagnosis = examine(run_of(line))
    found = [each for each in diagnosis.every if each.at_least("warning")]
    critical = any(each.severity == CRITICAL for each in found)
    first = next((each.rule for each in diagnosis.findings), "")
    return Verdict(line, {each.rule: each.since for each in found}, critical, first)


def verdict_of(line: dict[str, Any], said: list[list[Any]]) -> Verdict:
    """What another tool says of a run: its detectors, first steps and severities."""
    critical = any(severity == CRITICAL for *_, severity in said)
    return Verdict(line, {name: step for name, step, _ in reversed(said)}, critical)


def share(hits: int, of: int) -> str:
    """A share with its bounds."""
    low, high = wilson(hits, of)
    return f"{hits}/{of} = {hits / max(1, of):.3f} [{low:.3f}, {high:.3f}]"


def summary(verdicts: list[Verdict], names_causes: bool) -> dict[str, str]:
    """Recall, false alarms and delay of one tool."""
    failed = [each for each in verdicts if each.label == FAILED]
    healthy = [each for each in verdicts if each.label == HEALTHY]
    found = {
        "any alarm in failed runs": share(sum(bool(v.alarms) for v in failed), len(failed)),
        "the cause named": "not asked",
        "false alarms in healthy runs": share(sum(bool(v.alarms) for v in healthy), len(healthy)),
        "failed runs, critical only": share(sum(v.critical for v in failed), len(failed)),
        "healthy runs, critical only": share(sum(v.critical for v in healthy), len(healthy)),
    }
    if names_causes:
        delays = [abs(v.delay) for v in failed if v.delay is not None]
        found["the cause named"] = share(sum(v.named for v in failed), len(failed))
        first = [v.first in v.run["label"]["expected"] for v in failed]
        found["the cause is the first finding"] = share(sum(first), len(failed))
        found["since, median distance from the truth"] = f"{median(delays or [0]):.0f} iterations"
    return found


def confusion(verdicts: list[Verdict]) -> list[list[str]]:
    """A line for each kind: how many runs failed, how often that was named, what was said."""
    kinds = defaultdict(list)
    for each in verdicts:
        kinds[each.run["label"]["kind"]].append(each)
    quiet = {kind for kind, runs in kinds.items() if not any(each.alarms for each in runs)}
    quiet -= {kind for kind in quiet if any(each.label == FAILED for each in kinds[kind])}
    for kind in quiet:
        kinds[f"{len(quiet)} ways of training of which nothing was said"] += kinds.pop(kind)
    lines = [["kind", "failed", "named", "healthy", "false alarms", "said"]]
    for kind, runs in kinds.items():
        failed = [each for each in runs if each.label == FAILED]
        healthy = [each for each in runs if each.label == HEALTHY]
        said = Counter(name for each in runs for name in each.alarms)
        lines.append(
            [
                kind,
                str(len(failed)),
                str(sum(each.named for each in failed)),
                str(len(healthy)),
                str(sum(bool(each.alarms) for each in healthy)),
                ", ".join(f"{name} {count}" for name, count in said.most_common(6)),
            ]
        )
    return lines


def markdown(lines: list[list[str]]) -> str:
    """Lines of cells as a table."""
    head, *rows = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def main() -> None:
    """Print the tables of a half."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=("dev", "held_out"), required=True)
    parser.add_argument("--verdicts", type=Path, help="what peers.py printed")
    given = parser.parse_args()
    report(given.half, given.verdicts)


def report(half: str, said_by_others: Path | None = None) -> None:
    """Print the tables of a half, and what was missed or false."""
    runs = labelled(half)
    mine = [ours(line) for line in runs]
    counted = Counter(each.label for each in mine)
    print(", ".join(f"{count} {label}" for label, count in counted.items()), "\n")
    print(markdown(confusion(mine)), "\n")
    columns = {"litgrpo doctor": summary(mine, names_causes=True)}
    said = json.loads(said_by_others.read_text()) if said_by_others else {}
    for tool in ("rldoctor", "rlwatch") if said else ():
        theirs = [verdict_of(line, said[line["name"]][tool]) for line in runs]
        columns[tool] = summary(theirs, names_causes=False)
    names = list(columns["litgrpo doctor"])
    lines = [
        ["", *columns],
        *([name, *(c.get(name, "") for c in columns.values())] for name in names),
    ]
    print(markdown(lines))
    for each in mine:
        missed = each.label == FAILED and not each.named
        if missed or (each.label == HEALTHY and each.alarms):
            print(
                "missed" if missed else "false",
                each.run["name"],
                each.run["label"]["accuracy"][::3],
                each.alarms,
            )


if __name__ == "__main__":
    main()
