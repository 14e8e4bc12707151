"""Compare `plan` with the one-thread steps measured in docs/evidence/benchmarks_*.json.

    python -m tests.benchmarks.plan_sweeps [--fit]

Writes a table of docs/dev/plan.md. Nothing is run: the plan receives the model, rows and mean
length that were measured. --fit prints the constants of `assumptions` in devices.yaml that fit a
processor best, by the interval score of the logarithms: narrow ranges, and outliers count 20 times.

Source: Gneiting and Raftery 2007, "Strictly Proper Scoring Rules", section 6.2 (interval score).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from litgrpo.distributed.device import threads
from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.devices import Bounds
from litgrpo.tools.plan.plan import make_plan
from litgrpo.tools.plan.time_model import TimeEstimate
from tests.benchmarks import page, step
from tests.benchmarks.plan import ROOT, write

# Those of an earlier processor, and those of the page.
MEASURED = {"EPYC": page.results_of("earlier")}
MEASURED |= {"Zen 4": page.results_of("zen4"), "Zen 5": page.results_of("zen5")}
OUTSIDE = 20.0
Range = dict[str, tuple[float, float]]


class Point(NamedTuple):
    """A step that was measured, and its estimate.

    Args:
        processor: that it ran on.
        arguments: of `tests.benchmarks.step`.
        seconds: {phase: measured}.
        estimate: by the plan's constants.
    """

    processor: str
    arguments: argparse.Namespace
    seconds: dict[str, float]
    estimate: TimeEstimate

    def plan_seconds(self, constants: Range | None = None) -> dict[str, Bounds]:
        """Seconds of the same phases by the plan, with its own constants or others."""
        estimate = self.estimate
        if constants is not None:
            share, calls = (Bounds(*constants[name]) for name in ("share", "calls"))
            assumptions = replace(
                estimate.assumptions,
                arithmetic=estimate.assumptions.arithmetic | {"cpu": {math.inf: share}},
                calls_us=estimate.assumptions.calls_us
                | {"cpu": {"eager": calls, "recorded": calls}},
            )
            estimate = replace(estimate, assumptions=assumptions)
        found = {phase.name: phase.once for phase in estimate.phases()}
        return {"rollout": found["prefill"] + found["decoding"], "learning": found["learning"]}


def points(folder: Path) -> Iterator[Point]:
    """Every step of one thread."""
    for processor, path in MEASURED.items():
        results = json.loads(path.read_text()) if path.exists() else {}
        for name, found in results.items():
            if name.startswith("step ") and found["threads"] == 1:
                arguments = step.arguments(name.split()[1:])
                litgrpo = found["litgrpo"]
                share = litgrpo["mean_completion_len"] / arguments.max_new
                seconds = {"rollout": litgrpo["rollout_s"], "learning": litgrpo["learn_s"]}
                estimate = replace(estimate_of(arguments, folder), lengths=Bounds(share, share))
                yield Point(processor, arguments, seconds, estimate)


def estimate_of(arguments: argparse.Namespace, folder: Path) -> TimeEstimate:
    """The plan's estimate for the arguments of `tests.benchmarks.step`."""
    size = step.work_of(arguments).size
    config = {
        **{"model_type": "qwen2", "vocab_size": size.vocab, "hidden_size": size.hidden},
        **{"num_hidden_layers": size.layers, "num_attention_heads": size.heads},
        **{"num_key_value_heads": size.kv_heads, "intermediate_size": size.inner},
        **{"tie_word_embeddings": True, "max_position_embeddings": 32768},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    words = ["-c", str(ROOT / "configs" / "gsm8k_qwen2.5_1.5b.yaml"), "--chip", "cpu"]
    words += ["--model_config", str(path), "--read_data", "false"]
    words += ["--trainer.precision", "32-true", "--model.objective.kl_coef", "0"]
    words += ["--model.precision.gradient_checkpointing", "false"]
    words += ["--data.batch_size", str(size.prompts), "--model.group_size", str(arguments.group)]
    words += ["--data.max_prompt_length", str(size.prompt_len)]
    words += ["--model.max_completion_length", str(arguments.max_new)]
    with threads(1):  # the plan counts the threads of this process
        return make_plan(PlanCLI(words).config).estimate


def score(found: list[Point], constants: Range) -> float:
    """Mean interval score of the logarithms of seconds."""
    scores = []
    for point in found:
        for phase, span in point.plan_seconds(constants).items():
            low, high, true = (
                math.log(span.low),
                math.log(span.high),
                math.log(point.seconds[phase]),
            )
            scores.append(high - low + OUTSIDE * max(0.0, low - true, true - high))
    return fmean(scores)


def neighbors(constants: Range) -> Iterator[Range]:
    """The same with a bound, or both of a pair, a step further."""
    for name, (low, high) in constants.items():
        for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0):
            for moved in ((low * factor, high), (low, high * factor)):
                yield constants | {name: moved}
            yield constants | {name: (low * factor, high * factor)}


def fit_constants(found: list[Point]) -> Range:
    """The constants of the best score: the best neighbor's, until none is better."""
    now: Range = {"share": (0.1, 0.5), "calls": (60.0, 400.0)}
    best = score(found, now)
    while True:
        value, nearby = min(
            ((score(found, each), each) for each in neighbors(now)), key=lambda pair: pair[0]
        )
        if value > best - 1e-4:
            return now
        best, now = value, nearby


def rows(found: list[Point]) -> list[str]:
    """Lines of the table: for each processor and phase, how often the range holds the truth."""
    lines = [
        "| processor | phase | steps | inside the range | range, high over low, median "
        "| middle over measured: median | least | most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for processor in MEASURED:
        own = [point for point in found if point.processor == processor]
        for phase in ("rollout", "learning") if own else ():
            pairs = [(point.plan_seconds()[phase], point.seconds[phase]) for point in own]
            inside = sum(span.low <= true <= span.high for span, true in pairs)
            off = sorted(span.middle / true for span, true in pairs)
            wide = sorted(span.high / span.low for span, _ in pairs)
            lines.append(
                f"| {processor} | {phase} | {len(pairs)} | {inside} | {wide[len(wide) // 2]:.1f} "
                f"| {off[len(off) // 2]:.2f} | {off[0]:.2f} | {off[-1]:.2f} |"
            )
    return lines


def main() -> None:
    """Write the table, and say what would fit better."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = list(points(Path(folder)))
    lines = rows(found)
    print(*lines, sep="\n")
    if args.fit:
        for name in (*MEASURED, ""):
            own = [point for point in found if name in ("", point.processor)]
            print(name or "all", fit_constants(own) if own else "")
    write(ROOT / "docs" / "dev" / "plan.md", "sweeps", lines)


if __name__ == "__main__":
    main()
