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
        self._num_rows: int | None = None

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
        before = self.num_rows
        if not self.header:
            self.header = self._read()[0]
        if new := [name for name in row if name not in self.header]:
            rows = self._read()[1]
            self.header += new
            self._write(rows)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.header).writerow(row)
        self._num_rows = before + 1

    @property
    def num_rows(self) -> int:
        """How many lines there are below the header."""
        if self._num_rows is None:
            self._num_rows = len(self._read()[1])
        return self._num_rows

    def rewind(self, num_rows: int) -> None:
        """Keep the first lines only, as they were when a checkpoint was saved."""
        self.header, rows = self._read()
        if self.header:
            self._write(rows[:num_rows])
        self._num_rows = min(num_rows, len(rows))

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        if not self.path.exists():
            return [], []
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), list(reader)

    def _write(self, rows: list[dict[str, str]]) -> None:
        """Replace the whole file in one step: a process killed on the way leaves the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f".{self.path.name}.tmp")
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.header)
            writer.writeheader()
            writer.writerows(rows)
        unfinished.replace(self.path)
