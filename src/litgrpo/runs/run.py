"""A run as its folder tells it: metrics, config, samples, evaluations, summary, audit.

A run may have been killed while it wrote, so a last line without its line break is left out, and
lines that are not complete JSON objects are counted instead of raising.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litgrpo.arguments import require
from litgrpo.callbacks.evaluation_files import FOLDER
from litgrpo.files import read_text
from litgrpo.run_folder import COMMAND, CONFIG
from litgrpo.runs.config import RunConfig, is_number, read_config
from litgrpo.runs.other_trainers import TRAINER_STATE, find_trainer_state, read_trl, read_verl
from litgrpo.text.secrets import mask_known

if TYPE_CHECKING:
    import pandas as pd

METRICS, SUMMARY, AUDIT, SAMPLES = "metrics.csv", "summary.json", "audit.json", "samples"
MAX_SAMPLE_FILES = 3  # that are read: the first and the last ones
MAX_EVALUATIONS = 5  # that are read: the first, the last, and some between them
EVALUATION_FIELDS = {"index", "prompt", "samples"}
Row = dict[str, Any]


class Run:
    """A run: finished, running, or killed. Each part is read when it is first needed.

    Parts are empty if their file is missing. Sentences about what could not be read are in `notes`.

    Args:
        folder: the run folder; None for a run without one.
        parts: {name: value} of parts that are not read from the folder.

    Attributes:
        metrics: DataFrame with a column per metric (docs/reference/metrics.md) and a row per
            iteration. NaN: not logged. Logged values that are not finite are infinite.

    Raises:
        ValueError: there is no such folder.

    Example:
        >>> run = Run(metrics=table_of([{"step": 1, "reward/mean": 0.25}, {"step": 2}]))
        >>> run["reward/mean"].to_dict(), "policy/kl" in run
        ({1: 0.25}, False)
    """

    def __init__(self, folder: str | Path | None = None, **parts: Any) -> None:
        self.folder = None if folder is None else Path(folder)
        require(
            self.folder is None or self.folder.is_dir(),
            f"there is no run folder {folder}; a run writes to runs/<recipe>",
        )
        self.notes: list[str] = []
        self._series: dict[str, pd.Series] = {}
        vars(self).update(parts)  # where cached properties keep their values

    @classmethod
    def read(cls, path: str | Path) -> Run:
        """Open a run of litgrpo, TRL or verl.

        Args:
            path: a run folder, a `metrics.csv`, TRL's `trainer_state.json` (or a folder with one),
                or a console log of verl.

        Raises:
            ValueError: there is no run to read, or it has no metrics.
        """
        file = Path(path)
        require(file.exists(), f"{file} does not exist; give a run folder or a log file")
        if file.is_dir():
            file = _metrics_file(file)
        if file.name == METRICS:
            run = cls(file.parent)
        elif file.name == TRAINER_STATE:
            run = cls(metrics=table_of(read_trl(file)))
        elif file.suffix == ".csv":
            run = cls(metrics=read_metrics(file))
        else:
            run = cls(metrics=table_of(read_verl(file)))
        require(
            not run.metrics.empty,
            f"{file} has no metrics; a run that stopped before its first iteration logs none",
        )
        return run

    # --- metrics ---

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Logged numbers; see the class."""
        if self.folder is None:
            return table_of([])
        table = read_metrics(self.folder / METRICS)
        if num_infinite := int((table.abs() == math.inf).sum().sum()):
            self.notes.append(
                f"{num_infinite} logged values are not finite; curves leave them out."
            )
        return table

    def __getitem__(self, name: str) -> pd.Series:
        """Return the finite values of a metric by iteration; empty if it was not logged."""
        import pandas as pd

        if name not in self._series:
            values = self.metrics[name] if name in self.metrics else pd.Series(dtype=float)
            self._series[name] = values[values.abs() < math.inf]
        return self._series[name]

    def __contains__(self, name: str) -> bool:
        """Return whether a finite value of this metric was logged."""
        return name in self.names

    @cached_property
    def names(self) -> list[str]:
        """Metrics with a finite value, sorted."""
        is_finite = (self.metrics.abs() < math.inf).any()
        return sorted(is_finite.index[is_finite])

    @cached_property
    def iterations(self) -> int:
        """Finished iterations."""
        trained = [name for name in self.metrics if not name.startswith("val/")]
        logged = self.metrics[trained].notna().any(axis=1)
        return int(logged.index[logged].max()) if trained else 0

    @cached_property
    def reward_components(self) -> list[str]:
        """Names of the reward functions: those with a mean and a spread."""
        spreads = [re.fullmatch("reward/(.+)_std", name) for name in self.names]
        return [match[1] for match in spreads if match and f"reward/{match[1]}" in self]

    @property
    def correctness(self) -> str:
        """The reward that decides correctness; without a config, the first one."""
        return self.config.success_rewards.get("", [*self.reward_components, ""][0])

    @cached_property
    def held_out_accuracy(self) -> str:
        """Name of the held-out accuracy, such as `val/avg@4`; "" if it was not logged."""
        accuracies = [name for name in self.names if re.fullmatch(r"val/.*avg@\d+", name)]
        return [*accuracies, ""][0]

    # --- other files ---

    @property
    def name(self) -> str:
        """Name of the folder."""
        return "" if self.folder is None else self.folder.resolve().name

    @property
    def run_dir(self) -> str:
        """The run folder as the config names it."""
        return str(self.config.get("run_dir") or f"runs/{self.name}")

    @cached_property
    def config(self) -> RunConfig:
        """The config with all defaults.

        Raises:
            ValueError: the file is not YAML.
        """
        return RunConfig() if self.folder is None else read_config(self.folder / CONFIG)

    @cached_property
    def config_text(self) -> str:
        """Text of `config.yaml`, with secrets masked."""
        return "" if self.folder is None else mask_known(read_text(self.folder / CONFIG))

    @cached_property
    def command(self) -> str:
        """Shell command that started the run, in the second line of the config; or ""."""
        lines = [line for line in self.config_text.splitlines()[1:2] if COMMAND in line]
        return lines[0].removeprefix(COMMAND).strip() if lines else ""

    @cached_property
    def summary(self) -> Row:
        """Content of `summary.json`, written when a run ends."""
        return self._read_json(SUMMARY)

    @cached_property
    def audit(self) -> Row:
        """Content of `audit.json`, written by `audit --report`."""
        return self._read_json(AUDIT)

    @cached_property
    def samples(self) -> list[Row]:
        """Completions of training with their rewards, of the first and the last files."""
        files = list(self.sample_files.values())
        read_files = [*files[:1], *files[1:][1 - MAX_SAMPLE_FILES :]]
        rows = [row for file in read_files for row in read_json_lines(file)[0]]
        # Readers look into these two, which may be null.
        return [
            row | {name: row.get(name) or {} for name in ("rewards", "columns")} for row in rows
        ]

    @property
    def sample_files(self) -> dict[int, Path]:
        """{iteration: file}, sorted."""
        return self._numbered_files(SAMPLES)

    @cached_property
    def evaluation_files(self) -> dict[int, Path]:
        """{iteration: file}, sorted."""
        return self._numbered_files(FOLDER)

    @cached_property
    def evaluations(self) -> dict[int, list[Row]]:
        """{iteration: rows of held-out prompts}, at most five, with the first and the last."""
        evaluations = {}
        files = self.evaluation_files
        for iteration in spread(list(files), MAX_EVALUATIONS):
            rows, num_broken = read_evaluation(files[iteration])
            if num_broken:
                name = files[iteration].name
                self.notes.append(f"{name}: {num_broken} lines could not be read.")
            if rows:
                evaluations[iteration] = rows
        return evaluations

    def _numbered_files(self, folder: str) -> dict[int, Path]:
        files = [] if self.folder is None else (self.folder / folder).glob("iteration-*.jsonl")
        numbers = {path.stem.removeprefix("iteration-"): path for path in files}
        return dict(sorted((int(n), path) for n, path in numbers.items() if n.isdecimal()))

    def _read_json(self, name: str) -> Row:
        if self.folder is None:
            return {}
        try:
            content = json.loads(read_text(self.folder / name) or "{}")
        except (ValueError, RecursionError):
            self.notes.append(f"{name} is not valid JSON and was ignored.")
            return {}
        return content if isinstance(content, dict) else {}


def _metrics_file(folder: Path) -> Path:
    if (folder / METRICS).is_file():
        return folder / METRICS
    if file := find_trainer_state(folder):
        return file
    raise ValueError(
        f"{folder} has neither {METRICS} (litgrpo) nor {TRAINER_STATE} (TRL); give the console log "
        "of a verl run as a file"
    )


# --- tables ---


def read_metrics(path: Path) -> pd.DataFrame:
    """Read a `metrics.csv`; see `Run.metrics`. Columns without a value are left out."""
    import pandas as pd

    # NUL bytes appear where a machine lost power while the file grew.
    lines = read_text(path).replace("\0", "").rpartition("\n")[0]
    try:
        # Of an empty cell and of "nan" only the first is missing.
        cells = pd.read_csv(
            StringIO(lines),
            keep_default_na=False,
            na_values=[""],
            index_col=False,
            on_bad_lines="skip",
        )
    except (pd.errors.EmptyDataError, pd.errors.ParserError):
        return table_of([])
    return _by_iteration(cells)


def table_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows {metric: number, "step": iteration} as a table; see `Run.metrics`.

    An iteration that was logged twice, after a resume, keeps its later values.

    Example:
        >>> table_of([{"step": 1, "a": "0.5"}, {"step": 2, "a": ""}, {"step": 3, "a": "x"}])["a"]
        step
        1    0.5
        3    inf
        Name: a, dtype: float64
    """
    import pandas as pd

    numbers = [{k: _number(x) for k, x in row.items() if x not in ("", None)} for row in rows]
    return _by_iteration(pd.DataFrame(numbers))


def _number(cell: Any) -> float:
    """Return a finite number or infinity; NaN is a missing cell of a table."""
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.inf
    return number if math.isfinite(number) else math.inf


def _by_iteration(cells: pd.DataFrame) -> pd.DataFrame:
    """Turn cells into finite or infinite numbers, with one row per iteration."""
    import pandas as pd

    for name in cells.select_dtypes(exclude="number"):
        numbers = pd.to_numeric(cells[name], errors="coerce")
        cells[name] = numbers.mask(numbers.isna() & cells[name].notna(), math.inf)
    if "step" not in cells:
        return pd.DataFrame(index=pd.Index([], dtype=int, name="step"))
    cells = cells[cells["step"].abs() < math.inf]
    table = cells.groupby(cells.pop("step").astype(int)).last()
    return table.dropna(axis=1, how="all").dropna(how="all")


# --- lines of JSON ---


def read_json_lines(path: Path) -> tuple[list[Row], int]:
    """Read a file with a JSON object per line.

    Returns:
        The objects, and how many lines could not be read, or have values of another kind.
    """
    # Not splitlines(): U+2028 and other separators may be part of a text.
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    parsed = map(_parse_object, lines)
    rows = [row for row in parsed if row is not None]
    return rows, len(lines) - len(rows)


def _parse_object(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _has_known_kinds(row) else None


def _has_known_kinds(row: Any) -> bool:
    """Return whether a row and those in it have values of the kinds that are written."""
    return isinstance(row, dict) and all(
        is_kind(row[name]) for name, is_kind in KINDS.items() if name in row
    )


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_score(value: Any) -> bool:
    return value is None or is_number(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _are_scores(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_score, value.values())))


def _are_calls(value: Any) -> bool:
    """Return whether a value is {tool: [calls, failed calls]}."""
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(counts, list) for counts in value.values())
        and all([*map(is_number, counts)] == [True, True] for counts in value.values())
    )


def _is_list_of(is_kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_kind, value))


KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("set", "prompt", "completion", "failed"), _is_text),
    **dict.fromkeys(("reward", "correct", "advantage", "length"), _is_score),
    **dict.fromkeys(("index", "iteration"), is_number),
    "rewards": _are_scores,
    "calls": _are_calls,
    **dict.fromkeys(
        ("columns", "definitions"), lambda value: value is None or isinstance(value, dict)
    ),
    "messages": _is_list_of(_is_message),
    "turn_rewards": _is_list_of(_is_score),
    "samples": _is_list_of(_has_known_kinds),
    "greedy": lambda value: value is None or _has_known_kinds(value),
}


def read_evaluation(path: Path) -> tuple[list[Row], int]:
    """Return the rows of an evaluation with completions, and how many lines are not complete."""
    rows, num_broken = read_json_lines(path)
    complete = [row for row in rows if row.keys() >= EVALUATION_FIELDS]
    num_broken += len(rows) - len(complete)
    return [row for row in complete if _has_completions(row)], num_broken


def _has_completions(row: Row) -> bool:
    samples = row["samples"]
    if not isinstance(samples, list) or not samples or not isinstance(row["index"], int):
        return False
    return all(isinstance(sample, dict) and "completion" in sample for sample in samples)


# --- values ---


def spread(values: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` values, evenly spread, with the first and the last.

    Example:
        >>> spread([0, 10, 20, 30, 40, 50, 60], 3), spread([1, 2], 5)
        ([0, 30, 60], [1, 2])
    """
    if len(values) <= most:
        return list(values)
    return [values[round(position * (len(values) - 1) / (most - 1))] for position in range(most)]


def finite_numbers(values: Iterable[Any]) -> list[float]:
    """Pick the finite numbers of some values.

    Example:
        >>> finite_numbers([1, None, "a", 0.5, float("nan")])
        [1.0, 0.5]
    """
    numbers = [float(x) for x in values if is_number(x)]
    return [x for x in numbers if math.isfinite(x)]
