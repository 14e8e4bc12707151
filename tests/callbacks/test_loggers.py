import sys
from importlib.util import find_spec

import pytest
from jsonargparse import Namespace
from lightning.pytorch.loggers import Logger
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from litgrpo.callbacks.loggers import (
    Board,
    Hyperparameters,
    hyperparameters,
    name_runs,
    with_allowed_names,
)
from litgrpo.callbacks.summary import Summary
from tests.callbacks.fitting import fit
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
    assert numbers == {"summary/avg@2/before": 0.25, "summary/avg@2/after": 0.75}


def test_the_board_has_a_first_page_definitions_and_hyperparameters(tmp_path):
    board = Board(str(tmp_path))
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
    assert about["Overview/val/avg@4"].summary_description.startswith("Share of right")
    assert about["mine"].summary_description == ""
    assert [event.step for event in events.Tensors(".", "reward/mean")] == [1, 2]
    assert [event.step for event in events.Tensors(".", "Overview/reward/mean")] == [1, 2]
    kinds = {meta.plugin_data.plugin_name for meta in about.values()}
    assert {"hparams", "custom_scalars", "scalars"} <= kinds
    assert b"model.optimizer.lr" in about["_hparams_/session_start_info"].plugin_data.content
    assert b"val/avg@4" in about["_hparams_/experiment"].plugin_data.content


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

    logger = with_allowed_names(MLFlowLogger())
    logger.log_metrics({"val/avg@4_low": 1.0}, 0)
    assert logger.numbers == {"val/avg_at_4_low": 1.0}
    other = with_allowed_names(Remembering())
    other.log_metrics({"val/avg@4": 1.0}, 0)
    assert other.numbers == {"val/avg@4": 1.0}


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_takes_it_offline(tmp_path, monkeypatch):
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
