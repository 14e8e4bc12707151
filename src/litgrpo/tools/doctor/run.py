"""Load a run for the rules: metrics as series, sampled completions, config.

Runs of litgrpo (a run folder), TRL (`trainer_state.json`) and verl (a console log) can be read.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from litgrpo.arguments import require
from litgrpo.callbacks.files import read_text
from litgrpo.callbacks.metrics import TRL, VERL
from litgrpo.callbacks.run_folder import CONFIG
from litgrpo.evaluation.evaluator import format_success_rule
from litgrpo.rewards.reward import find_success_rewards
from litgrpo.text.program import program_name
from litgrpo.tools.run_folder import (
    METRICS,
    Columns,
    columns_of,
    read_json_lines,
    read_metrics,
    read_yaml,
    reward_components,
)

Numbers = NDArray[np.float64]
Samples = tuple[dict[str, Any], ...]
WINDOW = 10  # iterations of a moving average; the start and the end of a run are judged by as many
SHORT_WINDOW = 3  # the same for metrics whose start may be over after a few iterations
MEAN_LAG = 2  # iterations by which the mean of WINDOW values crosses a threshold late
SIGNIFICANT_SIGMAS = 3.0  # standard errors from which on a change is more than noise
TRAINER_STATE = "trainer_state.json"
MAX_SAMPLE_FILES = 3  # the first and the last ones


# --- series of one metric ---


@dataclass(frozen=True)
class MetricSeries:
    """Values of one metric over the iterations that logged it.

    Args:
        steps: [K] iterations, increasing.
        values: [K] values; NaN or infinite where the logged number was not finite.

    Example:
        >>> series = MetricSeries(np.array([1.0, 2.0, 3.0]), np.array([0.1, np.nan, 0.3]))
        >>> len(series), series.finite.values
        (3, array([0.1, 0.3]))
    """

    steps: Numbers
    values: Numbers

    def __len__(self) -> int:
        """Return how often the metric was logged."""
        return len(self.steps)

    @property
    def finite(self) -> MetricSeries:
        """The series without values that are not finite."""
        kept = np.isfinite(self.values)
        return MetricSeries(self.steps[kept], self.values[kept])

    def first(self, count: int = WINDOW) -> Numbers:
        """Return the first finite values."""
        return self.finite.values[:count]

    def last(self, count: int = WINDOW) -> Numbers:
        """Return the last finite values."""
        return self.finite.values[-count:]

    @property
    def start_mean(self) -> float:
        """Mean of the first three values."""
        return float(np.mean(self.first(SHORT_WINDOW)))

    def recent_mean(self, width: int = WINDOW) -> float:
        """Return the mean of the last values."""
        return float(np.mean(self.last(width)))

    def moving_average(self, width: int = WINDOW) -> MetricSeries:
        """Average `width` neighbors; each mean has the iteration of its last value.

        Returns:
            A series of K - width + 1 values, empty if K < width.

        Example:
            >>> series = MetricSeries(np.arange(1.0, 5.0), np.array([0.0, 2.0, 4.0, 9.0]))
            >>> series.moving_average(2).values
            array([1. , 3. , 6.5])
        """
        finite = self.finite
        if len(finite) < width:
            return MetricSeries(finite.steps[:0], finite.values[:0])
        sums = np.convolve(finite.values, np.ones(width), "valid")
        return MetricSeries(finite.steps[width - 1 :], sums / width)

    def first_step_of_last_run(self, condition: NDArray[np.bool_]) -> int:
        """Return where the last unbroken run of a condition begins.

        Args:
            condition: [K] for each iteration; a single False between two True does not break a run.

        Example:
            >>> series = MetricSeries(np.arange(1.0, 7.0), np.zeros(6))
            >>> series.first_step_of_last_run(np.array([1, 0, 0, 1, 0, 1]) > 0)
            4
        """
        where = np.flatnonzero(condition)
        if not len(where):
            return int(self.steps[-1])
        longest_step = 2  # one False in between
        breaks = [later for earlier, later in pairwise(where) if later - earlier > longest_step]
        return int(self.steps[breaks[-1] if breaks else where[0]])

    def onset(self, condition: NDArray[np.bool_]) -> int:
        """Return the iteration at which a condition on a moving average of WINDOW began.

        Args:
            condition: [K] of each mean.
        """
        step = self.first_step_of_last_run(condition)
        if step == int(self.steps[0]):
            # It held for the first mean of all, so it began with the run.
            return max(1, step - WINDOW + 1)
        return max(1, step - MEAN_LAG)

    def describe_change(self, name: str) -> str:
        """Write the mean at the start and the recent mean as a sentence."""
        return f"{name}: {self.start_mean:.3g} at the start, {self.recent_mean():.3g} recently"


EMPTY_SERIES = MetricSeries(np.zeros(0), np.zeros(0))


@dataclass(frozen=True)
class Trend:
    """Change of a metric between the start and the end of a run.

    Args:
        first: mean of the first values.
        last: mean of the last values.
        error: standard error of their difference, from the differences of neighbors.

    Example:
        >>> trend = Trend(first=0.25, last=0.75, error=0.02)
        >>> trend.change, trend.rose, trend.fell
        (0.5, True, False)
    """

    first: float
    last: float
    error: float

    @property
    def change(self) -> float:
        """Difference of the two means."""
        return self.last - self.first

    @property
    def rose(self) -> bool:
        """True if it rose by more than noise explains."""
        return self.change > SIGNIFICANT_SIGMAS * self.error

    @property
    def fell(self) -> bool:
        """True if it fell by more than noise explains."""
        return self.change < -SIGNIFICANT_SIGMAS * self.error


def measure_trend(series: MetricSeries, width: int = WINDOW) -> Trend:
    """Compare the start and the end of a series.

    Args:
        series: at least two values.
        width: values per mean; half of the series if that is shorter.
    """
    count = max(1, min(width, len(series.finite) // 2))
    return Trend(
        float(np.mean(series.first(count))),
        float(np.mean(series.last(count))),
        estimate_noise(series) * float(np.sqrt(2 / count)),
    )


def estimate_noise(series: MetricSeries) -> float:
    """Estimate the standard deviation around a trend from the differences of neighbors.

    For normal noise of deviation s, a difference of neighbors has deviation s * sqrt(2), and the
    median of its absolute value is 0.6745 * s * sqrt(2). The median ignores outliers.

    Example:
        >>> round(estimate_noise(MetricSeries(np.arange(4.0), np.array([0.0, 1.0, 0.0, 1.0]))), 2)
        1.05
    """
    steps = np.abs(np.diff(series.finite.values))
    return float(np.median(steps) / (0.6745 * np.sqrt(2))) if len(steps) else 0.0


# --- all metrics of a run ---


@dataclass(frozen=True)
class RunMetrics:
    """All metrics of a run.

    Args:
        series: {name as in docs/reference/metrics.md: series}.

    Example:
        >>> metrics = RunMetrics.from_rows([{"step": 1, "reward/mean": 0.25}])
        >>> metrics["reward/mean"].values, "policy/kl" in metrics, metrics.iterations
        (array([0.25]), False, 1)
    """

    series: Mapping[str, MetricSeries] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> RunMetrics:
        """Build from rows {metric: number} with the iteration as `step`."""
        return cls.from_columns(columns_of(rows))

    @classmethod
    def from_columns(cls, columns: Columns) -> RunMetrics:
        """Build from {metric: {iteration: value}}."""
        return cls(
            {
                name: MetricSeries(
                    np.array(sorted(values), dtype=float),
                    np.array([values[step] for step in sorted(values)], dtype=float),
                )
                for name, values in columns.items()
                if values
            }
        )

    def __contains__(self, name: str) -> bool:
        """Return whether a finite value of this metric was logged."""
        return len(self[name].finite) > 0

    def __getitem__(self, name: str) -> MetricSeries:
        """Return the series of a metric, an empty one if it was not logged."""
        return self.series.get(name, EMPTY_SERIES)

    @property
    def iterations(self) -> int:
        """Finished iterations of the run."""
        return int(max((each.steps[-1] for each in self.series.values() if len(each)), default=0))

    def reward_components(self) -> list[str]:
        """Return the names of the reward functions that scored a completion."""
        return reward_components(name for name in self.series if name in self)

    def held_out_accuracy(self) -> str:
        """Return the name of the held-out accuracy, such as `val/avg@4`; "" if not logged."""
        for name in sorted(self.series):
            bound = name.endswith(("_low", "_high"))
            if name.startswith("val/") and "avg@" in name and not bound and name in self:
                return name
        return ""


# --- the config of a run ---


@dataclass(frozen=True)
class RunConfig:
    """Resolved config of a run, with defaults.

    Args:
        values: content of `config.yaml`; empty if there is none.
        path: path of that file, for commands; "" if there is none.

    Example:
        >>> config = RunConfig({"model": {"init_args": {"group_size": 8}}}, "runs/a/config.yaml")
        >>> config.get("model.group_size")
        8
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key, which may leave out `init_args`.

        None counts as missing.
        """
        found: Any = self.values
        for word in key.split("."):
            inside = found.get("init_args") if isinstance(found, Mapping) else None
            for mapping in (found, inside):
                if isinstance(mapping, Mapping) and word in mapping:
                    found = mapping[word]
                    break
            else:
                return default
        return default if found is None else found

    def number(self, key: str, default: float) -> float:
        """Return the number of a key; the default if it is missing or not a number."""
        found = self.get(key, default)
        return float(found) if isinstance(found, int | float) else default

    @property
    def success_rewards(self) -> dict[str, str]:
        """{task: the reward that decides whether a completion is correct}, "" for all others.

        Empty if it is not known.
        """
        named = self.get("model.evaluation.success_reward")
        rewards = self.get("model.rewards", {})
        if not isinstance(rewards, Mapping):
            return {"": str(named)} if named else {}
        weights = {name: self.get(f"model.rewards.{name}.weight", 1.0) for name in rewards}
        tasks = {name: self.get(f"model.rewards.{name}.tasks", []) for name in rewards}
        known = {n: float(w) for n, w in weights.items() if isinstance(w, int | float)}
        found = find_success_rewards(known, tasks, named)
        return found if found[""] else {}

    @property
    def success_rule(self) -> str:
        """Rule by which a completion is correct, in words; "" if it is not known."""
        deciding = self.success_rewards
        threshold = self.number("model.evaluation.success_threshold", 1.0)
        return format_success_rule(deciding, threshold) if deciding else ""

    @property
    def steps_per_iteration(self) -> float:
        """Optimizer steps per iteration; infinite if there is no config."""
        if not self.values:
            return math.inf
        epochs = self.number("model.update.epochs_per_rollout", 1)
        return epochs * self.number("model.update.num_mini_batches", 1)

    def fix_command(self, setting: str, value: str) -> str:
        """Return the command that trains again with one setting changed, or audits the rewards.

        Returns:
            "" if there is no config, or nothing to set.
        """
        if not self.path:
            return ""
        if value:
            folder = str(self.path).rpartition("/")[0] or "."
            words = ["-c", self.path, "--run_dir", f"{folder}-changed", f"--{setting}", value]
            return f"{program_name()} fit {shlex.join(words)}"
        if setting.startswith("model.rewards"):
            return f"{program_name()} audit -c {shlex.quote(self.path)}"
        return ""


# --- runs ---


@dataclass(frozen=True)
class RunLog:
    """Everything that the rules read of a run.

    Args:
        metrics: its metrics.
        samples: completions with their rewards, in the order of iterations; may be empty.
        config: its config; may be empty.

    Example:
        >>> metrics = RunMetrics.from_rows([{"step": 1, "reward/mean": 0.25}])
        >>> run = RunLog(
        ...     metrics,
        ...     samples=({"iteration": 1, "prompt": "1+1?", "completion": "2", "reward": 1.0},),
        ...     config=RunConfig({"model": {"init_args": {"group_size": 8}}}),
        ... )
    """

    metrics: RunMetrics
    samples: Samples = ()
    config: RunConfig = field(default_factory=RunConfig)


def read_run(path: str | Path) -> RunLog:
    """Read a run.

    Args:
        path: a run folder, a `metrics.csv`, TRL's `trainer_state.json` (or a folder with one), or a
            console log of verl.

    Raises:
        ValueError: there is no run to read.
    """
    given = Path(path)
    require(given.exists(), f"{given} does not exist; give a run folder or a log file")
    file = given if given.is_file() else _metrics_file(given)
    if file.name == METRICS:
        samples = _read_samples(file.parent / "samples")
        run = RunLog(
            RunMetrics.from_columns(read_metrics(file)), samples, read_config(file.parent / CONFIG)
        )
    elif file.name == TRAINER_STATE:
        run = RunLog(_read_trl(file))
    elif file.suffix == ".csv":
        run = RunLog(RunMetrics.from_columns(read_metrics(file)))
    else:
        run = RunLog(_read_verl(file))
    require(
        bool(run.metrics.series),
        f"{file} has no metrics; a run that stopped before its first iteration logs none",
    )
    return run


def _metrics_file(folder: Path) -> Path:
    checkpoints = sorted(
        folder.glob(f"checkpoint-*/{TRAINER_STATE}"),
        key=lambda file: (len(file.parent.name), file.parent.name),  # by step
    )
    for file in (folder / METRICS, folder / TRAINER_STATE, *reversed(checkpoints)):
        if file.is_file():
            return file
    raise ValueError(
        f"{folder} has neither {METRICS} (litgrpo) nor {TRAINER_STATE} (TRL); give the console log "
        "of a verl run as a file"
    )


def read_config(file: Path) -> RunConfig:
    """Read the config of a run; an empty one if the file does not exist.

    Raises:
        ValueError: the file is not YAML.
    """
    values = read_yaml(file)
    return RunConfig(values, str(file)) if values else RunConfig()


def _read_samples(folder: Path) -> Samples:
    files = sorted(folder.glob("iteration-*.jsonl"))
    chosen = [*files[:1], *files[1:][1 - MAX_SAMPLE_FILES :]]
    rows = [row for file in chosen for row in read_json_lines(file)[0]]
    # The rules look into these two, which may be null.
    return tuple(
        row | {name: row.get(name) or {} for name in ("rewards", "columns")} for row in rows
    )


def _read_trl(file: Path) -> RunMetrics:
    try:
        state = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error.msg} in line {error.lineno}") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError(f"{file} has no log_history; expected the trainer_state.json of TRL")
    rows = [row for row in history if isinstance(row, dict)]
    return RunMetrics.from_rows(translate_names(row, TRL) for row in rows)


# `name:value` in a line of verl's console, such as `step:3 - actor/lr:1e-06`.
VERL_METRIC = re.compile(
    r"([A-Za-z][\w/@.-]*):(?:np\.\w+\()?(-?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?"
)
# Names of TRL and verl that contain a name of the run, or are of older versions.
NAME_PATTERNS = (
    (r"actor/entropy_loss", "policy/entropy"),
    (r"val-core/(.+)/reward/mean@\d+", "val/reward"),
    (r"rewards/(.+)/mean", r"reward/\1"),
    (r"rewards/(.+)/std", r"reward/\1_std"),
    (r"val-core/(.+)/acc/mean@(\d+)", r"val/avg@\2"),
)


def _read_verl(file: Path) -> RunMetrics:
    lines = [line for line in read_text(file).splitlines() if "step:" in line]
    rows = [dict(VERL_METRIC.findall(line)) for line in lines]
    return RunMetrics.from_rows(translate_names(row, VERL) for row in rows)


def translate_names(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Rename another trainer's metrics to litgrpo's; unknown ones keep their names.

    Example:
        >>> translate_names({"reward": 0.5, "rewards/format/mean": 1.0}, {"reward": "reward/mean"})
        {'reward/mean': 0.5, 'rewards/format/mean': 1.0, 'reward/format': 1.0}
    """
    translated = {names.get(name, name): value for name, value in row.items()}
    for name, value in row.items():
        for pattern, replacement in NAME_PATTERNS:
            if match := re.fullmatch(pattern, name):
                translated[match.expand(replacement)] = value
    return translated
