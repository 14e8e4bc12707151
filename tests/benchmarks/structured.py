"""Evaluate the runs of smollm2_json.yaml: valid JSON, end tokens, and each field.

    python -m tests.benchmarks.structured runs/json

The folder holds runs, `seed 0` and so on, as `tests.benchmarks.seeds` writes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from litgrpo.rewards import json_fields
from tests.benchmarks.tone import Rows, run_rows, table

FIELDS = ("name", "age", "job", "city")
PERPLEXITY = "perplexity under the initial policy"
HEAD = ("seed", "ended", "a JSON object", *FIELDS, "all correct", PERPLEXITY)


def shares(rows: Rows) -> list[float]:
    """Shares of the sampled completions that end, are an object, have each field, and have all."""
    said = [(json.loads(row["columns"]["answer"]), one) for row in rows for one in row["samples"]]
    ended = mean(not one["truncated"] for _, one in said)
    objects = mean(_is_object(one["completion"]) for _, one in said)
    fields = [
        mean(_has(one["completion"], name, answer[name]) for answer, one in said) for name in FIELDS
    ]
    return [ended, objects, *fields, mean(one["correct"] for _, one in said)]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_object(text: str) -> bool:
    return isinstance(_read(text), dict)


def _has(text: str, name: str, value: Any) -> bool:
    """Return whether a completion has a correct field, by the comparison of the reward."""
    if not _is_object(text) or name not in _read(text):
        return False
    only = json.dumps({name: _read(text)[name]})
    return json_fields([""], [only], [{name: value}]) == [1.0]


def of_run(folder: Path) -> list[str]:
    """Cells of a run."""
    before, after = map(shares, run_rows(folder))
    summary = json.loads((folder / "summary.json").read_text())
    texts = [summary[when]["text_quality"]["initial_perplexity"] for when in ("before", "after")]
    found = [f"{one:.2f} to {two:.2f}" for one, two in zip(before, after, strict=True)]
    return [folder.name.removeprefix("seed "), *found, f"{texts[0]:.2f} to {texts[1]:.2f}"]


def main() -> None:
    """Print the table of a folder of runs, and a few sentences before and after."""
    folder = Path(sys.argv[1])
    runs = sorted(path.parent for path in folder.glob("*/summary.json"))
    print(table(HEAD, [of_run(run) for run in runs]))
    for before, after in list(zip(*run_rows(runs[0]), strict=True))[::47]:
        print(f"\n{before['columns']['answer']}")
        for when, row in (("before", before), ("after", after)):
            print(f"  {when:7}{row['samples'][0]['completion']!r}")


if __name__ == "__main__":
    main()
