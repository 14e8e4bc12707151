"""Every logged number as a line of `metrics.csv`."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class MetricsCSV(Logger):
    """Appends to `metrics.csv` in the run folder; a resumed run goes on in the same file.

    (Lightning's own CSVLogger deletes the file of the run that it resumes.)

    Args:
        save_dir: the run folder.
    """

    def __init__(self, save_dir: str | Path) -> None:
        """Nothing is opened before the first number."""
        super().__init__()
        self.path = Path(save_dir) / "metrics.csv"
        self.header: list[str] = []

    @property
    def name(self) -> str:
        """Runs have no name beside their folder."""
        return ""

    @property
    def version(self) -> str:
        """Runs have no version beside their folder."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Nothing to do: the run folder holds `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one line; a name seen for the first time adds a column."""
        row = {"step": step, **{name: metrics[name] for name in sorted(metrics)}}
        if not self.header:
            self.header = self._read()[0]
        if new := [name for name in row if name not in self.header]:
            self._widen(new)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.header).writerow(row)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        if not self.path.exists():
            return [], []
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), list(reader)

    def _widen(self, new: list[str]) -> None:
        rows = self._read()[1]
        self.header += new
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.header)
            writer.writeheader()
            writer.writerows(rows)
