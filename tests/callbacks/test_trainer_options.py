from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from litgrpo.callbacks.trainer_options import (
    check_accelerator,
    check_strategy,
    check_trainer_options,
    choose_accelerator,
    cluster_plugins,
    describe_rejected_callback,
    strategy_name,
)
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy
from tests.support.raises import raises_for

SOUND = {
    "strategy": "auto",
    "accelerator": "cpu",
    "devices": "auto",
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "overfit_batches": 0.0,
    "barebones": False,
    "callbacks": None,
}
MANUAL = SimpleNamespace(automatic_optimization=False)
AUTOMATIC = SimpleNamespace(automatic_optimization=True)


SWA = "lightning.pytorch.callbacks.StochasticWeightAveraging"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("StochasticWeightAveraging", "model.lr_scheduler"),
        ([SWA], "model.lr_scheduler"),
        ({"class_path": SWA, "swa_lrs": 0.1}, "model.lr_scheduler"),
        (["Timer", {"class_path": "GradientAccumulationScheduler"}], "data.batch_size"),
        ("BatchSizeFinder", "data.batch_size"),
        ("lightning.pytorch.callbacks.LearningRateFinder", "model.optimizer"),
    ],
)
def test_a_rejected_callback_is_named_before_its_missing_arguments(given, key):
    assert key in describe_rejected_callback(given)


@pytest.mark.parametrize("given", [None, [], "Timer", {"class_path": "my.Averaging"}, ["a.B", {}]])
def test_other_callbacks_are_not_rejected_by_name(given):
    assert describe_rejected_callback(given) == ""


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"strategy": "fsdp"}, ["trainer.strategy", "fsdp", "FSDP2Strategy"]),
        ({"strategy": "deepspeed_stage_3_offload"}, ["trainer.strategy", "deepspeed"]),
        ({"strategy": {"class_path": "a.ModelParallelStrategy"}}, ["ModelParallelStrategy"]),
        ({"strategy": "FSDPStrategy"}, ["trainer.strategy", "FSDPStrategy", "FSDP2Strategy"]),
        ({"strategy": "dpp"}, ["trainer.strategy", "dpp", "ddp"]),
        ({"strategy": "ddp_spawn"}, ["trainer.strategy", "ddp_spawn", "ddp"]),
        ({"accumulate_grad_batches": 2}, ["accumulate_grad_batches", "data.batch_size"]),
        ({"gradient_clip_val": 1.0}, ["gradient_clip_val", "model.update.max_grad_norm"]),
        ({"gradient_clip_algorithm": "value"}, ["gradient_clip_algorithm", "max_grad_norm"]),
        ({"overfit_batches": 1}, ["trainer.overfit_batches", "data.train.limit"]),
        ({"barebones": True}, ["trainer.barebones", "--tensorboard"]),
        ({"devices": "x"}, ["trainer.devices", "'x'"]),
        ({"devices": -1}, ["trainer.devices", "-1"]),
        ({"devices": "-1", "accelerator": "auto"}, ["trainer.devices", "-1"]),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, ["callbacks", "model.lr_scheduler"]),
        ({"callbacks": GradientAccumulationScheduler({0: 2})}, ["callbacks", "data.batch_size"]),
    ],
)
def test_options_that_do_not_work_are_rejected_with_a_remedy(given, keys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with raises_for(*keys):
        check_trainer_options(SOUND | given, MANUAL)


def test_other_options_pass():
    check_trainer_options(SOUND, MANUAL)
    check_trainer_options(SOUND | {"strategy": "ddp", "devices": 2}, MANUAL)
    check_trainer_options(SOUND | {"strategy": DDPStrategy()}, MANUAL)
    check_trainer_options(SOUND | {"devices": -1, "accelerator": "cuda"}, MANUAL)
    xla = {"class_path": "litgrpo.xla.strategy.XLASPMDStrategy"}
    check_trainer_options(SOUND | {"strategy": xla}, MANUAL)
    fsdp2 = {"class_path": "litgrpo.distributed.fsdp.strategy.FSDP2Strategy"}
    check_trainer_options(SOUND | {"strategy": fsdp2}, MANUAL)
    check_strategy(FSDP2Strategy())


def test_sft_accumulates_and_has_its_own_option_to_clip():
    check_trainer_options(SOUND | {"accumulate_grad_batches": 4}, AUTOMATIC)
    by_time = ModelCheckpoint(train_time_interval=timedelta(hours=1))
    check_trainer_options(SOUND | {"callbacks": [by_time]}, AUTOMATIC)
    with raises_for("train_time_interval", "every_n_iterations"):
        check_trainer_options(SOUND | {"callbacks": [by_time]}, MANUAL)
    with raises_for("gradient_clip_val", "model.max_grad_norm"):
        check_trainer_options(SOUND | {"gradient_clip_val": 1.0}, AUTOMATIC)


def test_in_python_a_strategy_without_checkpoints_is_rejected_before_training():
    trainer = SimpleNamespace(strategy=ModelParallelStrategy())
    with raises_for("trainer.strategy", "ModelParallelStrategy"):
        IterationCheckpoint().setup(trainer, None, "fit")
    assert strategy_name(DDPStrategy()) == "DDPStrategy"
    check_strategy(DDPStrategy())


def test_under_slurm_lightning_does_not_requeue(monkeypatch):
    assert cluster_plugins(None) == []
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    (slurm,) = cluster_plugins(None)
    assert isinstance(slurm, SLURMEnvironment)
    assert not slurm.auto_requeue
    own = LightningEnvironment()
    assert cluster_plugins(own) == [own]


def test_apples_gpu_is_rejected_and_auto_takes_the_cpu(monkeypatch, caplog):
    assert choose_accelerator("auto") == "auto"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level("INFO"):
        assert choose_accelerator("auto") == "cpu"
    assert "float64" in caplog.text
    assert choose_accelerator("cpu") == "cpu"
    for name in ("mps", "gpu"):
        with pytest.raises(ValueError, match=r"trainer\.accelerator: cpu"):
            check_accelerator(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_accelerator("auto") == "auto"
