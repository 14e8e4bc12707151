import re
import sqlite3
import sys
from importlib.util import find_spec

import pytest
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar import layout_pb2

from litgrpo.callbacks.loggers import (
    Hyperparameters,
    MetricsCSV,
    TensorBoard,
    Trackio,
    flatten,
    guard,
    hyperparameters,
    name_runs,
    overview_charts,
)
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.distributed import messages
from litgrpo.runs.summary import Summary
from tests.support.fitting import fit
from tests.support.raises import raises_for
from tests.support.standin import StandIn

CONFIG = """
model:
  class_path: litgrpo.GRPO
  init_args:
    group_size: 8
    lora: null
    optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001, betas: [0.9, 0.99]}}
"""
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


class Remembering(Logger):
    name, version = "", ""

    def __init__(self):
        self.params, self.numbers = {}, {}

    def log_metrics(self, metrics, step=None):
        self.numbers |= metrics

    def log_hyperparams(self, params, *_):
        self.params = dict(params)


def test_a_recipe_is_flat_and_plain():
    assert hyperparameters(CONFIG) == {
        "model.class_path": "litgrpo.GRPO",
        "model.group_size": 8,
        "model.lora": "null",
        "model.optimizer.class_path": "torch.optim.AdamW",
        "model.optimizer.lr": 0.001,
        "model.optimizer.betas": "[0.9, 0.99]",
    }


def test_every_logger_gets_the_recipe_and_what_changed(tmp_path):
    logger = Remembering()
    module = StandIn(1, scores=[0.25, 0.75])
    fit(tmp_path, Hyperparameters(CONFIG), Summary(), module=module, logger=logger)
    assert logger.params["model.optimizer.lr"] == 0.001
    numbers = {name: x for name, x in logger.numbers.items() if name.startswith("summary/avg@2")}
    # The stand-in's reports are made up; its prompts have equal results.
    assert numbers == {
        "summary/avg@2/before": 0.25,
        "summary/avg@2/after": 0.75,
        "summary/avg@2/change": 0.0,
    }


def test_a_resumed_run_logs_each_option_that_changed(tmp_path, caplog):
    caplog.set_level("INFO")
    for config, stop in (CONFIG, 1), (CONFIG, 2):
        last = tmp_path / "checkpoints/last.ckpt"
        callbacks = Hyperparameters(config), IterationCheckpoint(keep_best=0)
        resume = last if last.exists() else None
        fit(tmp_path, *callbacks, module=StandIn(stop), resume=resume)
    assert "Changed" not in caplog.text
    changed = CONFIG.replace("8", "4").replace("0.99]", "0.95]") + "data: {rows: 3}\n"
    callbacks = Hyperparameters(changed), IterationCheckpoint(keep_best=0)
    fit(tmp_path, *callbacks, module=StandIn(3), resume=last)
    lines = [line.partition(": ") for line in caplog.messages if line.startswith("Changed since")]
    assert [change for _, _, change in lines] == [
        "model.group_size 8 -> 4",
        "model.optimizer.betas [0.9, 0.99] -> [0.9, 0.95]",
        "data.rows null -> 3",
    ]


def test_tensorboard_has_an_overview_definitions_and_hyperparameters(tmp_path):
    board = TensorBoard(str(tmp_path))
    board.log_metrics({"val/avg@4": 0.25}, 0)
    board.log_hyperparams(hyperparameters(CONFIG))
    board.log_metrics({"reward/mean": 0.5, "mine": 1.0}, 1)
    board.log_metrics({"reward/mean": 0.75}, 2)
    board.finalize("success")
    events = EventMultiplexer()
    events.AddRunsFromDirectory(str(tmp_path))
    events.Reload()
    about = events.AllSummaryMetadata()["."]
    assert about["reward/mean"].summary_description.startswith("Mean total reward of the batch")
    assert about["Overview/val/avg@4"].summary_description.startswith("Fraction of correct")
    assert about["mine"].summary_description == ""
    assert [event.step for event in events.Tensors(".", "reward/mean")] == [1, 2]
    assert [event.step for event in events.Tensors(".", "Overview/reward/mean")] == [1, 2]
    kinds = {meta.plugin_data.plugin_name for meta in about.values()}
    assert {"hparams", "custom_scalars", "scalars"} <= kinds
    assert b"model.optimizer.lr" in about["_hparams_/session_start_info"].plugin_data.content
    assert b"val/avg@4" in about["_hparams_/experiment"].plugin_data.content


def test_no_chart_of_tensorboards_overview_has_two_lines(tmp_path):
    """All lines of one run have one color there, so two in a chart could not be told apart."""
    names = ["reward/mean", "policy/entropy", "completion/len_mean"]
    names += ["completion/truncated_frac", "val/easy/avg@4", "val/hard/avg@4"]
    names += ["val/easy/greedy", "val/hard/greedy", "val/easy/reward", "val/hard/reward"]
    board = TensorBoard(str(tmp_path))
    board.log_metrics(dict.fromkeys(names, 0.5), 0)
    board.finalize("success")
    events = EventMultiplexer()
    events.AddRunsFromDirectory(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors(".", "custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (overview,) = layout.category
    lines = [
        [name for name in names if any(re.match(tag, name) for tag in chart.multiline.tag)]
        for chart in overview.chart
    ]
    assert all(len(names_of_chart) <= 1 for names_of_chart in lines)
    assert sorted(name for chart in lines for name in chart) == sorted(names)


def test_a_run_is_called_as_its_folder_unless_the_recipe_names_it():
    def logger(path, **settings):
        return Namespace(
            class_path=f"lightning.pytorch.loggers.{path}", init_args=Namespace(**settings)
        )

    own, unnamed = logger("WandbLogger", name="mine"), logger("WandbLogger", name=None)
    mlflow, csv = logger("MLFlowLogger", run_name=None), logger("CSVLogger", name=None)
    name_runs([own, unnamed, csv], "seed=1")
    name_runs(mlflow, "seed=1")
    name_runs(True, "seed=1")
    found = [own.init_args.name, unnamed.init_args.name, mlflow.init_args.run_name]
    assert found == ["mine", "seed=1", "seed=1"]
    assert csv.init_args.name is None


def test_mlflow_gets_names_that_it_allows():
    class MLFlowLogger(Remembering):
        pass

    logger = guard(MLFlowLogger())
    logger.log_metrics({"val/avg@4_low": 1.0}, 0)
    assert logger.numbers == {"val/avg_at_4_low": 1.0}
    other = guard(Remembering())
    other.log_metrics({"val/avg@4": 1.0}, 0)
    assert other.numbers == {"val/avg@4": 1.0}


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_logs_offline(tmp_path, monkeypatch):
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(name="my_run", save_dir=tmp_path, project="litgrpo")
    fit(tmp_path, Hyperparameters(CONFIG), Summary(), module=StandIn(1), logger=logger)
    run = logger.experiment
    assert run.name == "my_run"
    assert run.config["model.group_size"] == 8
    assert run.summary["summary/avg@2/after"] == 0.1
    run.finish()
    assert "wandb" in sys.modules


def test_a_new_metric_adds_a_column_and_a_new_logger_appends_to_the_file(tmp_path):
    first = MetricsCSV(tmp_path)
    first.log_metrics({"b": 1.0, "a": 2.0}, step=1)
    first.log_metrics({"a": 3.0}, step=2)
    resumed = MetricsCSV(tmp_path)
    resumed.log_metrics({"a": 4.0, "c": 5.0}, step=3)
    written = (tmp_path / "metrics.csv").read_text().splitlines()
    assert written == ["step,a,b,c", "1,2.0,1.0,", "2,3.0,,", "3,4.0,,5.0"]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_lightnings_own_logger_still_deletes_what_it_resumes(tmp_path):
    # If this fails, MetricsCSV can go.
    for step in (1, 2):
        logger = CSVLogger(tmp_path, name="", version="")
        logger.log_metrics({"a": 1.0}, step=step)
        logger.save()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["a,step", "1.0,2"]


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
@pytest.mark.filterwarnings("ignore")  # of the package's own threads and sockets
def test_trackio_receives_metrics_and_settings_and_resumes(tmp_path, monkeypatch):
    import trackio.sqlite_storage as storage
    import trackio.utils

    for module in (storage, trackio.utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    for first in (0, 2):
        logger = Trackio(project="mine", name="run")
        logger.log_hyperparams({"model.group_size": 8})
        for step in (first, first + 1):
            logger.log_metrics({"val/avg@4": 0.25, "reward/mean": step / 10}, step)
        logger.finalize("success")
    logs = storage.SQLiteStorage.get_logs("mine", "run")
    assert [row["step"] for row in logs] == [0, 1, 2, 3]
    assert [row["reward/mean"] for row in logs] == [0.0, 0.1, 0.2, 0.3]
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as connection:
        ((settings,),) = connection.execute("select config from configs").fetchall()
    assert b"model.group_size" in bytes(settings)


def test_loggers_start_at_the_first_metric(monkeypatch):
    monkeypatch.setattr("litgrpo.callbacks.loggers.find_spec", lambda _: True)
    logger = Trackio(name="run")
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    assert (logger.name, logger.version, logger.settings) == ("litgrpo", "run", {"a": 1})


def test_a_missing_package_raises_with_its_extra(monkeypatch):
    monkeypatch.setattr("litgrpo.callbacks.loggers.find_spec", lambda _: None)
    with raises_for("pip install trackio"):
        Trackio()


class Broken(Logger):
    """Fails from its second call on."""

    name = version = "broken"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def log_hyperparams(self, *args, **kwargs) -> None:
        """Does nothing."""

    def log_metrics(self, metrics, step=None) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError(28, "No space left on device")


def test_a_logger_that_fails_warns_once_and_training_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "_warned", set())
    logger = Broken()
    with pytest.warns(UserWarning, match="Broken") as warned:
        module = fit(tmp_path, module=StandIn(4), logger=guard(logger))
    assert module.iteration == 4
    assert logger.calls > 3
    assert len([each for each in warned if "Broken" in str(each.message)]) == 1


def test_a_recipe_is_flattened_to_plain_values():
    recipe = {"model": {"group_size": 8, "lora": None}, "seeds": [1, 2]}
    values = {"model.group_size": 8, "model.lora": "null", "seeds": "[1, 2]"}
    assert dict(flatten(recipe)) == values


def test_several_validation_sets_have_a_chart_each():
    greedy = "held-out greedy accuracy"
    charts = overview_charts(["val/easy/greedy", "val/hard/greedy"])
    assert [f"{greedy}: val/{name}/greedy" in charts for name in ("easy", "hard")] == [True, True]
    assert greedy in overview_charts(["val/greedy"])
