"""Every logged number as a line of `metrics.csv`."""

from __future__ import annotations

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

Kind = TypeVar("Kind", bound=Logger)


def loggers_of(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    """The trainer's loggers of one class."""
    return [logger for logger in trainer.loggers if isinstance(logger, kind)]


class MetricsCSV(Logger):
    """Appends to `metrics.csv` in the run folder; a resumed run goes on in the same file.

    (Lightning's own CSVLogger deletes the file of the run that it resumes.)

    Args:
        save_dir: the run folder.
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(save_dir) / "metrics.csv"
        # Of the file; read at the first number, when an earlier run has been deleted.
        self.header: list[str] | None = None
        self._num_rows = 0

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
        header = self._known_header()
        if new := [name for name in row if name not in header]:
            rows = self._read()[1]
            header += new
            self._write(rows)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, header).writerow(row)
        self._num_rows += 1

    @property
    def num_rows(self) -> int:
        """How many lines there are below the header."""
        self._known_header()
        return self._num_rows

    def rewind(self, num_rows: int) -> None:
        """Keep the first lines only, as they were when a checkpoint was saved."""
        self.header, rows = self._read()
        self._num_rows = min(num_rows, len(rows))
        if self.header:
            self._write(rows[:num_rows])

    def _known_header(self) -> list[str]:
        if self.header is None:
            self.header, rows = self._read()
            self._num_rows = len(rows)
        return self.header

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
            writer = csv.DictWriter(file, self._known_header())
            writer.writeheader()
            writer.writerows(rows)
        unfinished.replace(self.path)
