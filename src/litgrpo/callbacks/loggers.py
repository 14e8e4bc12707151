"""Loggers of a run: metrics.csv, TensorBoard with an overview, Trackio; what failures do."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import threading
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import Namespace as Settings
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning.pytorch.utilities import rank_zero_only

from litgrpo.arguments import as_list, require
from litgrpo.callbacks.metrics import definition
from litgrpo.distributed.messages import rank_zero_info, warn_once_on_failure
from litgrpo.files import write_text

Kind = TypeVar("Kind", bound=Logger)
# The option that names a run, for loggers that invent a name if none is given.
NAME_OPTION = {
    "WandbLogger": "name",
    "CometLogger": "name",
    "Trackio": "name",
    "MLFlowLogger": "run_name",
}
# {chart: metric}. One line each: TensorBoard gives all lines of a run the same color.
OVERVIEW = {
    "reward": r"reward/mean",
    "held-out accuracy": r"val/(.+/)?avg@\d+",
    "held-out greedy accuracy": r"val/(.+/)?greedy",
    "held-out reward": r"val/(.+/)?reward",
    "differences within groups": r"reward/group_std",
    "groups without a gradient": r"reward/zero_variance_groups_frac",
    "entropy": r"policy/entropy",
    "KL": r"policy/kl",
    "clipped below": r"policy/clip_low_frac",
    "clipped above": r"policy/clip_high_frac",
    "length": r"completion/len_mean",
    "truncated": r"completion/truncated_frac",
    "text": r"val/(.+/)?initial_perplexity",
}
MAIN_CHARTS = ("reward", "held-out accuracy", "held-out greedy accuracy", "held-out reward")
MAIN_METRICS = re.compile("|".join(OVERVIEW[chart] for chart in MAIN_CHARTS))
OVERVIEW_GROUP = "Overview"  # sorts before all other groups of cards


def loggers_of(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    """The trainer's loggers of one class."""
    return [logger for logger in trainer.loggers if isinstance(logger, kind)]


# --- failures ---


def guard(logger: Logger) -> Logger:
    """Let a logger warn once instead of raising, so that training continues; return it.

    It becomes a subclass of its class. MLflow, which rejects `@` in a name, gets `avg_at_4` for
    `avg@4`.

    Args:
        logger: any Lightning logger.
    """
    kind: Any = type(logger)
    source = f"logger {kind.__name__}"

    def experiment(self: Logger) -> Any:
        with warn_once_on_failure(source):
            return kind.experiment.__get__(self, kind)
        return DummyExperiment()

    def log_metrics(self: Logger, metrics: Mapping[str, float], step: int | None = None) -> None:
        if kind.__name__ == "MLFlowLogger":
            metrics = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        with warn_once_on_failure(source):
            kind.log_metrics(self, dict(metrics), step)

    methods = ("log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")
    members: dict[str, Any] = {name: _guarded(getattr(kind, name), source) for name in methods}
    if hasattr(kind, "experiment"):
        members["experiment"] = property(experiment)
    members |= {"log_metrics": log_metrics, "__module__": kind.__module__}
    logger.__class__ = type(kind.__name__, (kind,), members)
    return logger


def _guarded(method: Callable[..., Any], source: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with warn_once_on_failure(source):
            return method(*args, **kwargs)

    return call


# --- the recipe ---


def flatten(values: Any, name: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield the leaves of a configuration under dotted names, as plain values."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, str | int | float | bool):
        yield name, values
    else:
        one_line = yaml.safe_dump(values, default_flow_style=True, width=math.inf)
        yield name, one_line.split("\n")[0]


def hyperparameters(config: str) -> dict[str, str | int | float | bool]:
    """{option: value} of a recipe; `init_args` is removed from the names."""
    leaves = flatten(yaml.safe_load(config))
    return {name.replace(".init_args", ""): value for name, value in leaves}


class Hyperparameters(Callback):
    """Logs the recipe to every logger when training starts, and what a resumed run changes."""

    def __init__(self, config: str) -> None:
        self.config = config
        self.saved: dict[str, str | int | float | bool] | None = None  # of the checkpoint's run

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        # The names of the evaluation's metrics are known by now.
        options, saved = hyperparameters(self.config), self.saved
        for logger in trainer.loggers:
            logger.log_hyperparams(options)
        if saved is not None:
            for name in dict.fromkeys([*saved, *options]):
                old, new = (values.get(name, "null") for values in (saved, options))
                if old != new:
                    change = f"{name} {old!s:.60} -> {new!s:.60}"
                    rank_zero_info(f"Changed since the checkpoint: {change}")

    def state_dict(self) -> dict[str, Any]:
        return hyperparameters(self.config)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict


def name_runs(loggers: Any, name: str) -> None:
    """Name the runs of a recipe's loggers, if the recipe does not."""
    for node in as_list(loggers):
        if isinstance(node, Settings):
            option = NAME_OPTION.get(node.class_path.rpartition(".")[2])
            if option is not None and node.init_args.get(option) is None:
                node.init_args[option] = name


# --- metrics.csv ---


class MetricsCSV(Logger):
    """Appends to `metrics.csv` in the run folder; a resumed run continues the file.

    (Lightning's CSVLogger deletes the file of the run that it resumes.)
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(save_dir) / "metrics.csv"
        # Read at the first number, when --overwrite has moved an earlier run.
        self.header: list[str] | None = None
        self._num_rows = 0

    @property
    def name(self) -> str:
        # A run is identified by its folder.
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Do nothing: the run folder holds `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": step, **{name: metrics[name] for name in sorted(metrics)}}
        header = self._load_header()
        new = [name for name in row if name not in header]
        if new:
            rows = self._read()[1]
            self.header = [*header, *new]
            try:
                self._write(rows)
            except OSError:
                self.header = header  # the file is as before
                raise
            header = self.header
        elif not self.path.exists():  # the run folder was removed or renamed
            self._write([])
        size = self.path.stat().st_size
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, header).writerow(row)
        except OSError:
            os.truncate(self.path, size)  # a full disk takes a part of the row
            raise
        self._num_rows += 1

    @property
    def num_rows(self) -> int:
        """Number of rows below the header."""
        self._load_header()
        return self._num_rows

    def truncate(self, num_rows: int) -> None:
        """Keep only the first rows."""
        self.header, rows = self._read()
        self._num_rows = min(num_rows, len(rows))
        if self.header and num_rows < len(rows):
            self._write(rows[:num_rows])

    def _load_header(self) -> list[str]:
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
        """Replace the file in one step: a process that is killed meanwhile leaves the old one."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._load_header())
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())


# --- TensorBoard ---


class TensorBoard(TensorBoardLogger):
    """TensorBoard with reward and held-out accuracy first, and a definition on each card.

    *Custom scalars* begins with an overview of a few charts; the same metrics are the group
    `Overview` of the other tabs. The *hparams* tab compares runs by their recipes.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False)
        self.logged_names: set[str] = set()
        threading.excepthook = without_writer_errors(threading.excepthook)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        try:
            self._log_metrics(metrics, step)
        except OSError:
            # The writer's thread has ended, perhaps within a record, so it cannot be used again.
            self._experiment = None
            self.logged_names = set()
            raise

    def _log_metrics(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Log numbers; the first of each name carries its definition."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        if not self.logged_names:
            lines = overview_charts(metrics)
            charts = {chart: ["Multiline", [f"^{line}$"]] for chart, line in lines.items()}
            self.experiment.add_custom_scalars({OVERVIEW_GROUP: charts})
        numbers = {name: float(value) for name, value in metrics.items()}
        for name, value in metrics.items():
            if MAIN_METRICS.fullmatch(name):
                numbers[f"{OVERVIEW_GROUP}/{name}"] = float(value)
        for name in numbers.keys() - self.logged_names:
            text = definition(name.removeprefix(f"{OVERVIEW_GROUP}/"))
            metadata = SummaryMetadata(summary_description=text)
            metadata.plugin_data.plugin_name = "scalars"
            first = Summary.Value(tag=name, simple_value=numbers.pop(name), metadata=metadata)
            self.experiment.file_writer.add_summary(Summary(value=[first]), step)
            self.logged_names.add(name)
        super().log_metrics(numbers, step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        from torch.utils.tensorboard.summary import hparams

        values = dict(flatten(vars(params) if isinstance(params, Namespace) else params))
        self.hparams.update(values)
        metrics = {name for name in self.logged_names if MAIN_METRICS.fullmatch(name)} | {
            "reward/mean"
        }
        for summary in hparams(values, dict.fromkeys(sorted(metrics), 0.0)):
            self.experiment.file_writer.add_summary(summary)


def overview_charts(names: Collection[str]) -> dict[str, str]:
    """{chart: expression of its metric}; several validation sets have a chart each.

    Args:
        names: metrics of the first log, usually the evaluation before training.
    """
    charts: dict[str, str] = {}
    for chart, line in OVERVIEW.items():
        matches = [name for name in names if re.fullmatch(line, name)]
        several = {f"{chart}: {name}": re.escape(name) for name in matches}
        charts |= several if len(several) > 1 else {chart: line}
    return charts


def without_writer_errors(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Wrap `threading.excepthook`: TensorBoard raises errors of its thread again in the next call.

    The hook would print a traceback in addition.
    """

    def show(args: Any) -> None:
        is_writer = type(args.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
        if not (is_writer and isinstance(args.exc_value, OSError)):
            hook(args)

    show.hides_writer_errors = True  # type: ignore[attr-defined]
    return hook if hasattr(hook, "hides_writer_errors") else show


# --- Trackio ---


class Trackio(Logger):
    """Logs to Trackio, a local dashboard; files are in `TRACKIO_DIR` or the Hugging Face cache.

    A run of the same project and name continues the same curves.

    Args:
        project: group of runs.
        name: of the run; default: name of the run folder.

    Raises:
        ValueError: the package is not installed.

    Example:
        `Trainer(logger=Trackio(project="math", name="lr-1e-6"))`
    """

    name = version = ""  # of the project; of the run

    def __init__(self, project: str = "litgrpo", name: str | None = None) -> None:
        super().__init__()
        require(
            find_spec("trackio") is not None,
            "trainer.logger is Trackio, whose package is not installed: pip install trackio",
        )
        self.name, self.version = project, name or ""
        self.settings: dict[str, Any] = {}

    @cached_property
    def run(self) -> Any:
        """Trackio's run; created with the first number, when the settings are known."""
        import trackio

        options = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        run_name = self.version or None
        return trackio.init(self.name, name=run_name, config=self.settings, **options)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        self.settings |= vars(params) if isinstance(params, Namespace) else dict(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.run.log({name: float(value) for name, value in metrics.items()}, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if "run" in vars(self):
            self.run.finish()
