from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from litgrpo.callbacks.trainer_options import (
    check_trainer_options,
    cluster_plugins,
    name_of,
    refuse_sharding,
)
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.distributed.fsdp.strategy import FSDP2Strategy

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
BY_HAND = SimpleNamespace(automatic_optimization=False)
BY_LIGHTNING = SimpleNamespace(automatic_optimization=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"strategy": "fsdp"},
            r"strategy is fsdp. FSDP1, tensor .*take .*FSDP2Strategy",
        ),
        ({"strategy": "deepspeed_stage_3_offload"}, "trainer.strategy is deepspeed_stage_3_off"),
        (
            {"strategy": {"class_path": "a.ModelParallelStrategy"}},
            "is ModelParallelStrategy. FSDP1",
        ),
        ({"strategy": "FSDPStrategy"}, "trainer.strategy is FSDPStrategy. FSDP1"),
        ({"strategy": "dpp"}, r"trainer.strategy is 'dpp' \(did you mean 'ddp'\?\)"),
        ({"strategy": "ddp_spawn"}, "trainer.strategy is ddp_spawn, .* Take trainer.strategy ddp"),
        ({"accumulate_grad_batches": 2}, "data.batch_size, .* model.update.micro_batch_tokens"),
        ({"gradient_clip_val": 1.0}, "is 1.0. Give model.update.max_grad_norm instead"),
        ({"gradient_clip_algorithm": "value"}, "is value. Give model.update.max_grad_norm"),
        ({"overfit_batches": 1}, "overfit_batches is 1. .* give data.train.limit"),
        ({"barebones": True}, "barebones is True. .* give --tensorboard false"),
        ({"devices": -1}, "devices is -1. A CPU has no number of devices"),
        ({"devices": "-1", "accelerator": "auto"}, "devices is -1. A CPU has no number"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "model.lr_scheduler lower the"),
        ({"callbacks": GradientAccumulationScheduler({0: 2})}, "its size is data.batch_size"),
    ],
)
def test_what_fights_our_modules_is_refused_with_our_key(given, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        check_trainer_options(SOUND | given, BY_HAND)


def test_what_goes_with_them_passes():
    check_trainer_options(SOUND, BY_HAND)
    check_trainer_options(SOUND | {"strategy": "ddp", "devices": 2}, BY_HAND)
    check_trainer_options(SOUND | {"strategy": DDPStrategy()}, BY_HAND)
    check_trainer_options(SOUND | {"devices": -1, "accelerator": "cuda"}, BY_HAND)
    xla = {"class_path": "litgrpo.xla.strategy.XLASPMDStrategy"}
    check_trainer_options(SOUND | {"strategy": xla}, BY_HAND)
    ours = {"class_path": "litgrpo.distributed.fsdp.strategy.FSDP2Strategy"}
    check_trainer_options(SOUND | {"strategy": ours}, BY_HAND)
    refuse_sharding(FSDP2Strategy())


def test_supervised_training_accumulates_and_clips_by_a_key_of_its_own():
    check_trainer_options(SOUND | {"accumulate_grad_batches": 4}, BY_LIGHTNING)
    with pytest.raises(ValueError, match=r"Give model\.max_grad_norm instead"):
        check_trainer_options(SOUND | {"gradient_clip_val": 1.0}, BY_LIGHTNING)


def test_in_python_a_run_that_could_not_be_saved_is_refused_before_it_trains():
    trainer = SimpleNamespace(strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"ModelParallelStrategy\. FSDP1"):
        IterationCheckpoint().setup(trainer, None, "fit")
    assert name_of(DDPStrategy()) == "DDPStrategy"
    refuse_sharding(DDPStrategy())


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
