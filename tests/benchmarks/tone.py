"""Evaluate the runs of smollm2_cheerful.yaml: end tokens, tone, and side effects.

    python -m tests.benchmarks.tone runs/kl runs/no_kl

Each folder holds runs, `seed 0` and so on, as `tests.benchmarks.seeds` writes them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from litgrpo.evaluation.intervals import bootstrap_ratio
from litgrpo.rewards import cheerful

Rows = list[dict[str, Any]]
THRESHOLD = 0.8
FLUENCY = ("initial_perplexity", "initial_kl", "distinct_2", "len_mean")
CUT = " [cut]"


@dataclass(frozen=True)
class Shares:
    """Shares of completions.

    Args:
        ended: that end within the limit.
        tone: of those that ended, the share that is cheerful (0.8 of 1 or more).
        any_tone: of all, the share that is cheerful, also if it was cut off.
    """

    ended: float
    tone: float
    any_tone: float

    @property
    def success(self) -> float:
        """Share that ended and is cheerful."""
        return self.ended * self.tone


def shares(completions: Rows) -> Shares:
    """The shares of completions as `evaluation/*.jsonl` has them."""
    texts = [row["completion"].removesuffix(CUT) for row in completions]
    tones = cheerful(texts, texts, truncated=[False] * len(texts))
    good = [tone >= THRESHOLD for tone in tones]
    ended = [not row["truncated"] for row in completions]
    both = sum(g and e for g, e in zip(good, ended, strict=True))
    return Shares(mean(ended), both / max(sum(ended), 1), mean(good))


def split(before: Shares, after: Shares) -> tuple[float, float]:
    """The change of success as that of ending and that of tone; their sum is the whole.

    Each is averaged over the two orders in which one can change before the other (Shapley).

    Example:
        >>> split(Shares(0.5, 0.5, 0.5), Shares(1.0, 1.0, 1.0))
        (0.375, 0.375)
    """
    ending = (after.ended - before.ended) * (before.tone + after.tone) / 2
    return ending, (after.tone - before.tone) * (before.ended + after.ended) / 2


def bootstrap_change(before: Rows, after: Rows) -> tuple[float, float]:
    """Return a bootstrap interval of the change of success, resampling topics."""
    old, new = ({row["index"]: row["correct"] for row in rows} for rows in (before, after))
    return bootstrap_ratio([new[index] - old[index] for index in sorted(old)], [1.0] * len(old))


def run_rows(folder: Path) -> tuple[Rows, Rows]:
    """Every topic with its completions, at the first and at the last evaluation."""
    files = sorted((folder / "evaluation").glob("iteration-*.jsonl"))
    first, last = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (files[0], files[-1])
    )
    return first, last


def of_run(folder: Path) -> list[list[str]]:
    """Cells of the two tables for a run: what was learned, and what it cost."""
    rows = run_rows(folder)
    sampled = [shares([one for row in each for one in row["samples"]]) for each in rows]
    greedy = [shares([row["greedy"] for row in each]).success for each in rows]
    low, high = bootstrap_change(*rows)
    gain = sampled[1].success - sampled[0].success
    ending, tone = split(*sampled)
    summary = json.loads((folder / "summary.json").read_text())
    learned = [
        *(f"{each.success:.3f}" for each in sampled),
        f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]",
        *(f"{each:.3f}" for each in greedy),
        f"{ending:+.3f}",
        f"{tone:+.3f}",
        " to ".join(f"{each.ended:.2f}" for each in sampled),
        " to ".join(f"{each.tone:.2f}" for each in sampled),
        f"{summary['seconds']:.0f}",
    ]
    texts = [summary[when]["text_quality"] for when in ("before", "after")]
    cost = [" to ".join(f"{each[name]:.2f}" for each in texts) for name in FLUENCY]
    return [learned, cost]


LEARNED = (
    *("seed", "success before", "after", "change", "greedy before", "after"),
    *("by ending", "by tone", "ended", "cheerful, of ended", "training, s"),
)
COST = ("seed", "perplexity under the initial policy", "KL to it, nats", "distinct-2", "tokens")


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print the tables of each folder of runs, and a few topics before and after."""
    for folder in map(Path, sys.argv[1:]):
        runs = sorted(path.parent for path in folder.glob("*/summary.json"))
        cells = [of_run(run) for run in runs]
        print(f"\n{folder.name}: {len(run_rows(runs[0])[0])} topics")
        for number, head in enumerate((LEARNED, COST)):
            lines = [
                [run.name.removeprefix("seed "), *cells[n][number]] for n, run in enumerate(runs)
            ]
            print("\n" + table(head, lines))
        for before, after in list(zip(*run_rows(runs[0]), strict=True))[::40]:
            print(f"\n{before['prompt'].strip()}")
            for when, row in (("before", before), ("after", after)):
                print(f"  {when:7}{row['samples'][0]['completion']}")


if __name__ == "__main__":
    main()
