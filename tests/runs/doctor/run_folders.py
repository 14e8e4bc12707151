"""Write run folders with made-up metrics."""

import csv
import json
from pathlib import Path

import yaml


def write_run(folder: Path, config=None, samples=(), **columns) -> Path:
    """Write a run folder; `columns` are metrics by name, with `/` written as `__`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [name.replace("__", "/") for name in columns]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        for n, values in enumerate(zip(*columns.values(), strict=True), 1):
            writer.writerow([n, *values])
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if samples:
        (folder / "samples").mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in samples)
        (folder / "samples" / "iteration-000001.jsonl").write_text(lines)
    return folder
