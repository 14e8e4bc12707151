"""What loggers get besides numbers: the recipe, a name, a first page, what the numbers mean."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml
from jsonargparse import Namespace as Settings
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from litgrpo.callbacks.metric_table import definition

# The argument that names a run, of loggers that make a name up where none is given.
NAMED_BY = {"WandbLogger": "name", "CometLogger": "name", "Trackio": "name"}
NAMED_BY |= {"MLFlowLogger": "run_name"}
# What one wants to see first; a chart has lines for all names that fit one of its expressions.
OVERVIEW = {
    "reward": [r"reward/mean"],
    "held-out accuracy": [r"val/(.+/)?avg@\d+", r"val/(.+/)?greedy"],
    "held-out reward": [r"val/(.+/)?reward"],
    "entropy": [r"policy/entropy"],
    "length": [r"completion/len_mean", r"completion/terminated_len_mean"],
    "text": [r"val/(.+/)?start_perplexity"],
}
FIRST = ("reward", "held-out accuracy", "held-out reward")
SHOWN = re.compile("|".join(line for chart in FIRST for line in OVERVIEW[chart]))
HEAD = "Overview"  # sorts before all other groups of cards


def flat(values: Any, name: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """The leaves of a configuration under dotted names, as plain values.

    Example:
        >>> dict(flat({"model": {"group_size": 8, "lora": None}, "seeds": [1, 2]}))
        {'model.group_size': 8, 'model.lora': 'null', 'seeds': '[1, 2]'}
    """
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flat(value, f"{name}.{key}" if name else str(key))
    else:
        plain = isinstance(values, str | int | float | bool)
        yield (
            name,
            values if plain else yaml.safe_dump(values, default_flow_style=True).split("\n")[0],
        )


def hyperparameters(config: str) -> dict[str, str | int | float | bool]:
    """{key of the recipe: value} of a run; `init_args` is left out of the names.

    Args:
        config: the resolved configuration as YAML text.
    """
    leaves = flat(yaml.safe_load(config))
    return {name.replace(".init_args", ""): value for name, value in leaves}


class Hyperparameters(Callback):
    """Gives the recipe to every logger when training starts.

    Args:
        config: the resolved configuration as YAML text.
    """

    def __init__(self, config: str) -> None:
        self.config = config

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Log it; by now the names of the evaluation's numbers are known."""
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters(self.config))


def name_runs(given: Any, name: str) -> None:
    """Call the runs of loggers in a recipe by a name, where the recipe gives none.

    Args:
        given: what a recipe has under `trainer.logger`; is changed.
        name: of the run.
    """
    for node in given if isinstance(given, list) else [given]:
        if isinstance(node, Settings):
            key = NAMED_BY.get(node.class_path.rpartition(".")[2])
            if key is not None and node.init_args.get(key) is None:
                node.init_args[key] = name


def with_allowed_names(logger: Logger) -> Logger:
    """The same logger; MLflow, which refuses `@` in a name, gets `avg_at_4` for `avg@4`."""
    if type(logger).__name__ != "MLFlowLogger":
        return logger
    log_metrics: Callable[..., None] = logger.log_metrics

    def renamed(metrics: Mapping[str, float], step: int | None = None) -> None:
        log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)

    logger.log_metrics = renamed  # type: ignore[method-assign]
    return logger


class Board(TensorBoardLogger):
    """TensorBoard with reward and held-out accuracy first, and what each number means on its card.

    Its *custom scalars* begin with a page of a few charts; the same numbers head the other tabs, in
    the group `Overview`. The *hparams* tab compares runs by their recipes.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="", default_hp_metric=False)
        self.known: set[str] = set()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers; the first of each name brings its definition."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        if not self.known:
            charts = {name: ["Multiline", [f"^{x}$" for x in x_]] for name, x_ in OVERVIEW.items()}
            self.experiment.add_custom_scalars({HEAD: charts})
        first = {f"{HEAD}/{name}": x for name, x in metrics.items() if SHOWN.fullmatch(name)}
        numbers = {name: float(value) for name, value in {**metrics, **first}.items()}
        for name in numbers.keys() - self.known:
            text = definition(name.removeprefix(f"{HEAD}/"))
            about = SummaryMetadata(summary_description=text)
            about.plugin_data.plugin_name = "scalars"
            value = Summary.Value(tag=name, simple_value=numbers.pop(name), metadata=about)
            self.experiment._get_file_writer().add_summary(Summary(value=[value]), step)
            self.known.add(name)
        super().log_metrics(numbers, step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Write the recipe for the *hparams* tab, beside the numbers that runs are compared by."""
        from torch.utils.tensorboard.summary import hparams

        given = vars(params) if isinstance(params, Namespace) else params
        values = dict(flat(given))
        self.hparams.update(values)
        compared = {name for name in self.known if SHOWN.fullmatch(name)} | {"reward/mean"}
        metrics = dict.fromkeys(sorted(compared), 0.0)
        for summary in hparams(values, metrics):
            self.experiment._get_file_writer().add_summary(summary)
