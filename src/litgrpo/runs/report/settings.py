"""Setup of a run: its environment, and the commands that repeat it."""

from __future__ import annotations

import shlex
from typing import Any

from litgrpo.runs.config import is_number
from litgrpo.runs.run import Run
from litgrpo.text.visible import visible

MAX_VALUE_CHARS = 300


def describe_environment(run: Run) -> list[tuple[str, str]]:
    """Return seed, hardware, time, memory and versions of a run, if they are known."""
    facts: dict[str, Any] = {
        "seed": run.summary.get("seed", run.config.get("seed_everything")),
        "accelerator": run.config.get("trainer.accelerator"),
        "devices": run.config.get("trainer.devices"),
        "iterations": f"{run.iterations:,}",
    }
    facts = {name: value for name, value in facts.items() if value not in (None, "auto")}
    seconds = run.summary.get("seconds")
    if is_number(seconds):
        facts["training"] = f"{seconds:,.0f} s"
    if "perf/generated_tokens" in run:
        tokens = run["perf/generated_tokens"].iloc[-1]
        facts["tokens generated for training"] = f"{tokens:,.0f}"
    if "perf/peak_memory_gib" in run:
        facts["peak memory"] = f"{run['perf/peak_memory_gib'].iloc[-1]:.2f} GiB"
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        facts |= versions
    return [(visible(name, 60), visible(value, MAX_VALUE_CHARS)) for name, value in facts.items()]


def repeat_commands(run: Run) -> list[str]:
    """Return commands that repeat the run: the original one, and one from its own config."""
    if not run.config.values:
        return []
    program = "litgrpo" if run.command.startswith("litgrpo") else "python cli.py"
    words = ["fit", "-c", f"{run.run_dir}/config.yaml", "--run_dir", f"{run.run_dir}-again"]
    from_config = f"{program} {shlex.join(words)}"
    return [run.command, from_config] if run.command else [from_config]
