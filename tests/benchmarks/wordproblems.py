"""Word problems: splits the data, and compares what was learned problem by problem.

    python -m tests.benchmarks.wordproblems split PROBLEMS.jsonl --folder wordproblems
    python -m tests.benchmarks.wordproblems table start=FILE control=FILE grpo=FILE

`split` takes problems with `question`, `answer` and `solution` (such as `3 * 4 = 12; 12 + 1 = 13`)
and writes 300 to choose settings on, 520 to test on, 548 as demonstrations, and the others to train
on, by a hash of the question. Each has its solution as a `completion`, which in one of four asks a
calculator: `<call>3 * 4</call>`, which answers `<res>12</res>`; the others calculate themselves
(`--calls 0`: all of them, `--calls 1`: none).
`table` takes rows that evaluations left (`evaluation/*.jsonl` of a run folder), each with the name
of its side; a side is compared with every one before it.
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

from litgrpo.environments.examples import calculate
from litgrpo.evaluation.intervals import compare_evaluations, proportion_interval
from litgrpo.rewards import arithmetic
from tests.benchmarks.tone import table

PARTS = {"choose": 300, "test": 520, "demonstrations": 548}  # rows; the others are to train on
HEAD = (
    "side",
    "sampled",
    "any of the samples",
    "greedy",
    "change",
    "asks the calculator: sampled, greedy",
    "first operators, greedy",
    "as the solution's",
    "written calculations that hold",
)
OPERATOR = re.compile(r"\d\s*([-+*/])\s*\d")


def split(problems: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Problems of each part, by a hash of their question.

    Example:
        >>> parts = split([{"question": str(number)} for number in range(1400)])
        >>> {name: len(rows) for name, rows in parts.items()}
        {'choose': 300, 'test': 520, 'demonstrations': 548, 'train': 32}
    """
    rows = sorted(problems, key=lambda row: hashlib.sha256(row["question"].encode()).hexdigest())
    parts = {}
    for name, count in PARTS.items():
        parts[name], rows = rows[:count], rows[count:]
    return parts | {"train": rows}


def add_demonstration(row: dict[str, Any], calls: bool) -> dict[str, Any]:
    """Return the row with its solution as a `completion`: messages, with observations of the tool.

    Args:
        row: a problem.
        calls: ask the calculator, if it comes to the same answer.

    Example:
        >>> row = {"solution": "3 * 4 = 12; 12 + 1 = 13", "answer": "13"}
        >>> [each["content"] for each in add_demonstration(row, calls=True)["completion"]]
        ['<call>3 * 4</call>', '<res>12</res>', '<call>12 + 1</call>', '<res>13</res>', '#### 13']
        >>> add_demonstration(row, calls=False)["completion"][0]["content"].splitlines()
        ['3 * 4 = 12; 12 + 1 = 13', '#### 13']
    """
    asked = [step.split("=")[0].strip() for step in row["solution"].split(";")]
    told = [calculate(each) for each in asked]
    answer = f"#### {row['answer']}"
    if not calls or told[-1] != row["answer"]:
        said = [{"role": "assistant", "content": f"{row['solution']}\n{answer}"}]
        return row | {"completion": said}
    said = []
    for call, result in zip(asked, told, strict=True):
        said.append({"role": "assistant", "content": f"<call>{call}</call>"})
        said.append({"role": "user", "content": f"<res>{result}</res>"})
    return row | {"completion": [*said, {"role": "assistant", "content": answer}]}


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """{name: a number of each problem}."""
    right = [[float(one["correct"]) for one in row["samples"]] for row in rows]
    return {
        "index": [float(row["index"]) for row in rows],
        "sampled": [mean(each) for each in right],
        "any": [max(each) for each in right],
        "greedy": [float(row["greedy"]["correct"]) for row in rows],
    }


def operators(texts: list[str]) -> list[str]:
    """The first operator that each text calculates with, or nothing."""
    found = [OPERATOR.search(text) for text in texts]
    return [match[1] if match else "" for match in found]


def said(one: dict[str, Any]) -> str:
    """Return generated text and observations of an answer."""
    messages = one.get("messages", [{"content": one["completion"]}])
    return "\n".join(each["content"] for each in messages)


def how(rows: list[dict[str, Any]]) -> list[str]:
    """Cells on how answers are found.

    The first operator, if it is the solution's, and correct written calculations distinguish
    misreading a problem from miscalculating it.
    """
    sampled = [bool(one.get("calls")) for row in rows for one in row["samples"]]
    greedy = [bool(row["greedy"].get("calls")) for row in rows]
    texts = [said(row["greedy"]) for row in rows]
    first = operators(texts)
    gold = operators([row["columns"].get("solution", "") for row in rows])
    known = [one == other for one, other in zip(first, gold, strict=True) if other]
    counts = Counter(first)
    hold = arithmetic([], [text for text in texts if "=" in text])
    return [
        f"{mean(sampled):.2f}, {mean(greedy):.2f}",
        ", ".join(f"{sign} {counts[sign]}" for sign in "+-*/"),
        f"{mean(known):.3f}" if known else "",
        f"{mean(share or 0.0 for share in hold):.3f} of {len(hold)}" if hold else "",
    ]


def shown(sides: dict[str, Path]) -> str:
    """A Markdown row per side: accuracies, and the changes to the sides before it."""
    lines, known = [], {}
    for name, file in sides.items():
        rows = read(file)
        found = results(rows)
        samples = len(rows[0]["samples"])
        right = [round(share * samples) for share in found["sampled"]]
        low, high = proportion_interval(right, samples)
        changes = []
        for other, before in known.items():
            both = compare_evaluations(before, found)
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
            *how(rows),
        ]
        lines.append(cells)
        known[name] = found
    return table(HEAD, lines)


def main() -> None:
    """Split or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_split = commands.add_parser("split")
    of_split.add_argument("problems", type=Path)
    of_split.add_argument("--folder", type=Path, default=Path("wordproblems"))
    of_split.add_argument(
        "--calls", type=int, default=4, help="keep one of this many calls; 0: none"
    )
    commands.add_parser("table").add_argument("sides", nargs="+", metavar="NAME=FILE")
    options = parser.parse_args()
    if options.command == "table":
        sides = dict(side.split("=", 1) for side in options.sides)
        print(shown({name: Path(file) for name, file in sides.items()}))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in split(read(options.problems)).items():
        calls = [options.calls > 0 and number % options.calls == 0 for number in range(len(rows))]
        written = [add_demonstration(row, asks) for row, asks in zip(rows, calls, strict=True)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in written]
        (options.folder / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}: {len(rows)} problems")


if __name__ == "__main__":
    main()
