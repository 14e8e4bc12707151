"""A resumed run equals one that was never interrupted."""

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from litgrpo.callbacks.loggers import MetricsCSV
from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.resume import (
    LoggerState,
    OptimizerOptions,
    RngState,
    get_all_random_state,
    set_all_random_state,
)
from tests.support.fitting import fit
from tests.support.raises import raises_for
from tests.support.standin import StandIn


def drawn() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.normal(), float(torch.randn(()))]


def test_every_generator_continues_from_its_state():
    drawn()  # half a pair of normal numbers is left over
    state = get_all_random_state()
    expected = [drawn(), drawn()]
    set_all_random_state(state)
    assert [drawn(), drawn()] == expected


class Draws(StandIn):
    """Remembers what its training steps draw."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(drawn())
        return super().training_step(batch, batch_idx)


def test_a_resumed_run_draws_what_the_whole_run_drew(tmp_path):
    def run(iterations, folder, resume=None):
        module = Draws(iterations)
        fit(folder, IterationCheckpoint(2), RngState(), module=module, resume=resume)
        return module.seen

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    whole = run(5, tmp_path / "whole")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = run(2, tmp_path / "parts")
    drawn()
    second = run(5, tmp_path / "parts", tmp_path / "parts/checkpoints/last.ckpt")
    assert first + second == whole


ADAMW = partial(AdamW, lr=0.1)
STEPS = 3  # optimizer steps of an iteration of the stand-in


class Learns(StandIn):
    """Takes optimizer steps, and records the options of each."""

    gradient = torch.ones(2)

    def __init__(self, iterations, optimizer=ADAMW, schedule: LRSchedulerCallable = None):
        super().__init__(iterations)
        self.hparams.clear()  # a checkpoint holds no functions
        self.optimizer, self.schedule, self.seen = optimizer, schedule, []
        self.weight = torch.nn.Parameter(torch.ones(2))

    def configure_model(self):
        """Nothing to load."""

    def configure_optimizers(self):
        made = self.optimizer([self.weight])
        return [made] if self.schedule is None else ([made], [self.schedule(made)])

    def training_step(self, batch, batch_idx):
        for _ in range(STEPS):
            self.weight.grad = self.gradient.clone()
            self.seen.append({**self.optimizers().param_groups[0], "params": None})
            self.optimizers().step()
            if self.schedule is not None:
                self.lr_schedulers().step()
        return self._rest(batch)

    def _rest(self, batch):
        self.iteration += 1
        self.log("step", float(self.iteration))
        self.trainer.should_stop = self.iteration == self.max_iterations


def run(folder, *settings, iterations=4, resume=None):
    callbacks = (IterationCheckpoint(1, keep_last=9), OptimizerOptions())
    module = Learns(iterations, *settings)
    return fit(folder, *callbacks, module=module, resume=resume, limit_val_batches=0)


def half(folder):
    """Iteration 2 of a run."""
    return folder / "checkpoints" / "iteration=000002.ckpt"


CHANGES = {
    "lr": 0.01,
    "betas": (0.5, 0.6),
    "eps": 1e-3,
    "weight_decay": 0.5,
    "amsgrad": False,
    "maximize": True,
    "foreach": False,
    "capturable": False,
    "differentiable": False,
    "fused": False,
}


@pytest.mark.parametrize("option", CHANGES)
def test_each_option_of_the_optimizer_is_the_recipes(tmp_path, option):
    run(tmp_path, iterations=2)
    recipe = partial(AdamW, **{"lr": 0.1, option: CHANGES[option]})
    module = run(tmp_path, recipe, iterations=3, resume=half(tmp_path))
    (group,) = recipe([torch.nn.Parameter(torch.ones(2))]).param_groups
    assert module.seen == [{**group, "params": None}] * STEPS
    assert set(group) - {"params", "decoupled_weight_decay"} == set(CHANGES)
    (state,) = module.trainer.optimizers[0].state.values()
    assert state["step"] == 3 * STEPS  # the optimizer state is the checkpoint's


def test_changed_options_are_logged(tmp_path, caplog):
    run(tmp_path, iterations=2)
    run(tmp_path, iterations=3, resume=half(tmp_path))
    assert "->" not in caplog.text
    run(tmp_path, partial(AdamW, lr=1e-6), iterations=3, resume=half(tmp_path))
    assert "lr 0.1 -> 1e-06" in caplog.text


def warm_up_then_cosine(optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 8)]
    return SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES = {
    "linear": partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=9),
    "cosine": partial(CosineAnnealingLR, T_max=12),
    "one cycle": partial(OneCycleLR, max_lr=0.3, total_steps=13),
    "exponential": partial(ExponentialLR, gamma=0.9),
    "function": partial(LambdaLR, lr_lambda=lambda n: 1 / (1 + n)),
    "sequence": warm_up_then_cosine,
}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step|The epoch parameter")
@pytest.mark.parametrize(
    ("name", "before"),
    [*((name, None) for name in SCHEDULES), ("cosine", "linear"), ("sequence", "linear")],
)
def test_the_recipes_schedule_continues_at_the_runs_position(tmp_path, name, before):
    recipe = (partial(AdamW, lr=0.05), SCHEDULES[name])
    whole = run(tmp_path / "whole", *recipe)
    earlier = recipe if before is None else (partial(AdamW, lr=0.1), SCHEDULES[before])
    run(tmp_path, *earlier, iterations=2)
    resumed = run(tmp_path, *recipe, resume=half(tmp_path))
    assert resumed.seen == whole.seen[2 * STEPS :]


def test_a_schedule_shorter_than_the_run_raises(tmp_path):
    run(tmp_path, iterations=2)
    short = partial(OneCycleLR, max_lr=0.3, total_steps=4)
    with raises_for("lr_scheduler OneCycleLR", "6"):
        run(tmp_path, partial(AdamW, lr=0.1), short, resume=half(tmp_path))


def test_the_state_of_another_class_of_optimizer_is_dropped(tmp_path, caplog):
    run(tmp_path, iterations=2)
    module = run(tmp_path, partial(SGD, lr=0.1, momentum=0.9), resume=half(tmp_path))
    assert "AdamW" in caplog.text
    assert "SGD" in caplog.text
    (state,) = module.trainer.optimizers[0].state.values()
    assert list(state) == ["momentum_buffer"]


def test_another_number_of_parameter_groups_raises(tmp_path):
    run(tmp_path, iterations=2)

    def two_groups(parameters):
        return AdamW([{"params": parameters}, {"params": [torch.nn.Parameter(torch.ones(1))]}])

    with raises_for("optimizer", "1", "2"):
        run(tmp_path, two_groups, resume=half(tmp_path))


pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def run_with_loggers(folder: Path, module: StandIn, resume: Path | None = None) -> None:
    board = TensorBoardLogger(folder, name="", version="", default_hp_metric=False)
    callbacks = (IterationCheckpoint(2, keep_last=9), LoggerState(folder))
    loggers = [board, MetricsCSV(folder)]
    fit(folder, *callbacks, module=module, resume=resume, logger=loggers, val_check_interval=3)


def seen(folder: Path) -> tuple[list[str], dict[str, list[int]]]:
    """The lines of metrics.csv, and the steps of every curve, without purging."""
    events = EventAccumulator(str(folder), purge_orphaned_data=False)
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("checkpoint/")]
    curves = {tag: [event.step for event in events.Scalars(tag)] for tag in tags}
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [line.split(",")[0] for line in lines], curves


@pytest.mark.parametrize("cut", [2, 4])
def test_after_a_resume_each_iteration_is_logged_once(tmp_path, cut):
    run_with_loggers(tmp_path / "whole", StandIn(7))
    run_with_loggers(tmp_path / "parts", StandIn(5))
    resume = tmp_path / f"parts/checkpoints/iteration=00000{cut}.ckpt"
    again = StandIn(7)
    again.evaluations = 1 + cut // 3
    run_with_loggers(tmp_path / "parts", again, resume)
    whole, parts = seen(tmp_path / "whole"), seen(tmp_path / "parts")
    assert parts == whole
    assert whole[0] == ["step", "1", "2", "3", "3", "4", "5", "6", "6", "7", "7"]


class FailsLater(StandIn):
    """Fails in its second iteration."""

    def training_step(self, batch, batch_idx):
        if self.iteration == 1:
            raise RuntimeError("a bug")
        return super().training_step(batch, batch_idx)


def test_a_run_that_fails_after_its_start_keeps_its_log(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"):
        run_with_loggers(tmp_path, FailsLater(4))
    assert 1 in seen(tmp_path)[1]["reward/mean"]


def test_a_new_run_does_not_truncate_files(tmp_path):
    run_with_loggers(tmp_path, StandIn(2))
    first = seen(tmp_path)[0]
    run_with_loggers(tmp_path, StandIn(2))
    assert seen(tmp_path)[0] == [*first, *first[1:]]
