"""Measure the errors of `plan`: time and memory of recipes that are planned and then run.

    python -m tests.benchmarks.plan --run "quickstart, 30 iterations"
    python -m tests.benchmarks.plan

The first plans, measures and runs one recipe (all of them without a name), and keeps what it found
in docs/reference/plan.json; the second writes the tables of docs/reference/plan.md from it. Seconds
are those of the processor, because other programs may run beside; memory is the most that the
program ever held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs" / "reference" / "plan.json", ROOT / "docs" / "reference" / "plan.md"
# {name: command line of fit}
FEWER = "--trainer.limit_val_batches 2"
RECIPES = {
    "quickstart, 30 iterations": "-c configs/quickstart.yaml --model.max_iterations 30",
    "quickstart with KL, 30 iterations": (
        "-c configs/quickstart.yaml --model.max_iterations 30 --model.objective.kl_coef 0.02 "
        + FEWER
    ),
    "quickstart with LoRA, KL, two epochs, 25 iterations": (
        "-c configs/quickstart.yaml --model.max_iterations 25 --model.objective.kl_coef 0.02"
        " --model.lora.rank 8 --model.update.epochs_per_rollout 2 --trainer.val_check_interval 10 "
        + FEWER
    ),
    "calculator (episodes), 25 iterations": (
        "-c configs/calculator.yaml --model.max_iterations 25 " + FEWER
    ),
    "quickstart_sft (supervised), 120 iterations": (
        "-c configs/quickstart_sft.yaml --model.max_iterations 120"
    ),
    "quickstart, whole": "-c configs/quickstart.yaml",
}


def program(words: list[str]) -> tuple[float, int]:
    """Seconds of the processor and most bytes of `python -m litgrpo` with these words."""
    command = [sys.executable, "-m", "litgrpo", *words]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    said = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{said.decode()}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def measure(name: str) -> dict[str, Any]:
    """Everything about one recipe."""
    words = RECIPES[name].split()
    with TemporaryDirectory() as folder:
        counted, taken = Path(folder, "plan.json"), Path(folder, "measured.json")
        program(["plan", *words, "--chip", "cpu", "--report", str(counted)])
        program(["plan", *words, "--measure", "true", "--report", str(taken)])
        seconds, peak = program(["fit", *words, "--run_dir", f"{folder}/run"])
        plan, few = json.loads(counted.read_text()), json.loads(taken.read_text())
    return {
        "plan_bytes": plan["peak_bytes"],
        "plan_seconds": plan["seconds"],
        "measured": few["cpu"]["run"],
        "seconds": seconds,
        "bytes": peak,
    }


def off(planned: float, true: float) -> str:
    """By how much."""
    return f"{100 * (planned / true - 1):+.0f} %"


def time_table(results: dict[str, Any]) -> list[str]:
    """Extrapolated against whole runs."""
    lines = ["| recipe | `plan --measure` | whole run | off by | `plan` |", "|---|---|---|---|---|"]
    for name, found in results.items():
        low, high = found["plan_seconds"]
        lines.append(
            f"| {name} | {found['measured']:.0f} s | {found['seconds']:.0f} s | "
            f"{off(found['measured'], found['seconds'])} | {low:.0f} - {high:.0f} s |"
        )
    return lines


def memory_table(results: dict[str, Any]) -> list[str]:
    """Counted against peaks."""
    lines = ["| recipe | `plan --chip cpu` | peak of the run | off by |", "|---|---|---|---|"]
    for name, found in results.items():
        lines.append(
            f"| {name} | {found['plan_bytes'] / 1e9:.2f} GB | {found['bytes'] / 1e9:.2f} GB | "
            f"{off(found['plan_bytes'], found['bytes'])} |"
        )
    return lines


def write(page: Path, name: str, lines: list[str]) -> None:
    """Put lines between the marks of this name."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"{page} has no marks for {name}"
    page.write_text("\n".join([f"{before}{begin}", *lines, f"{end}{after}"]), encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="*", choices=list(RECIPES), help="plan, measure and run")
    asked = parser.parse_args().run
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [] if asked is None else asked or RECIPES:
        results[name] = measure(name)
        kept = {known: results[known] for known in RECIPES if known in results}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(name, results[name])
    if asked is None:
        write(PAGE, "time", time_table(results))
        write(PAGE, "memory", memory_table(results))


if __name__ == "__main__":
    main()
