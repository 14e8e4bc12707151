"""Word problems: splits the data, and compares what was learned problem by problem.

    python -m tests.benchmarks.wordproblems split PROBLEMS.jsonl --folder wordproblems
    python -m tests.benchmarks.wordproblems table start=FILE control=FILE grpo=FILE

`split` takes problems with `question`, `answer` and `solution` and writes those to train on, 300 to
choose settings on, and 520 to test on, by a hash of the question. `table` takes rows that
evaluations left (`evaluation/*.jsonl` of a run folder), each with the name of its side; a side is
compared with every one before it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from litgrpo.evaluation.intervals import clustered_proportion
from litgrpo.evaluation.paired import compared
from tests.benchmarks.tone import table

PARTS = {"choose": 300, "test": 520}  # rows; the others are to train on
OPERATOR = re.compile(r"\d\s*([-+*/])\s*\d")


def split(problems: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Problems of each part, by a hash of their question.

    Example:
        >>> parts = split([{"question": str(number)} for number in range(900)])
        >>> {name: len(rows) for name, rows in parts.items()}
        {'choose': 300, 'test': 520, 'train': 80}
    """
    rows = sorted(problems, key=lambda row: hashlib.sha256(row["question"].encode()).hexdigest())
    parts = {}
    for name, count in PARTS.items():
        parts[name], rows = rows[:count], rows[count:]
    return parts | {"train": rows}


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """{name: a number of each problem}."""
    right = [[float(one["right"]) for one in row["samples"]] for row in rows]
    return {
        "index": [float(row["index"]) for row in rows],
        "sampled": [mean(each) for each in right],
        "any": [max(each) for each in right],
        "greedy": [float(row["greedy"]["right"]) for row in rows],
    }


def operators(rows: list[dict[str, Any]]) -> str:
    """How often the most likely answers calculate first with each operator."""
    found = [OPERATOR.search(row["greedy"]["completion"]) for row in rows]
    counts = Counter(match[1] for match in found if match)
    return ", ".join(f"{sign} {counts[sign]}" for sign in "+-*/")


def shown(sides: dict[str, Path]) -> str:
    """A Markdown row per side: accuracies, and the changes to the sides before it."""
    lines, known = [], {}
    for name, file in sides.items():
        rows = read(file)
        found = results(rows)
        samples = len(rows[0]["samples"])
        right = [round(share * samples) for share in found["sampled"]]
        low, high = clustered_proportion(right, samples)
        changes = []
        for other, before in known.items():
            both = compared(before, found)
            assert both is not None
            for kind in ("sampled", "greedy"):
                change = both.changes[kind]
                changes.append(
                    f"{kind} {change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}] to {other}"
                )
        cells = [
            name,
            f"{mean(found['sampled']):.3f} [{low:.3f}, {high:.3f}]",
            f"{mean(found['any']):.3f}",
            f"{mean(found['greedy']):.3f}",
            "; ".join(changes),
            operators(rows),
        ]
        lines.append(cells)
        known[name] = found
    head = ("side", "sampled", "any of the samples", "greedy", "change", "first operators, greedy")
    return table(head, lines)


def main() -> None:
    """Split or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_split = verbs.add_parser("split")
    of_split.add_argument("problems", type=Path)
    of_split.add_argument("--folder", type=Path, default=Path("wordproblems"))
    verbs.add_parser("table").add_argument("sides", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args()
    if options.verb == "table":
        sides = dict(side.split("=", 1) for side in options.sides)
        print(shown({name: Path(file) for name, file in sides.items()}))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in split(read(options.problems)).items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (options.folder / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}: {len(rows)} problems")


if __name__ == "__main__":
    main()
