"""What a resumed run learns with: moments of the checkpoint, everything else of the recipe."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from litgrpo.checkpointing.callback import IterationCheckpoint
from litgrpo.checkpointing.recipe_settings import RecipeSettings
from tests.callbacks.fitting import fit
from tests.support.recipe_settings import STEPS, Learns


def run(folder, *settings, iterations=4, resume=None):
    callbacks = (IterationCheckpoint(1, keep_last=9), RecipeSettings())
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
    assert state["step"] == 3 * STEPS  # the moments are those of the checkpoint


def test_what_differs_is_said(tmp_path, caplog):
    run(tmp_path, iterations=2)
    run(tmp_path, iterations=3, resume=half(tmp_path))
    assert "by the recipe" not in caplog.text
    run(tmp_path, partial(AdamW, lr=1e-6), iterations=3, resume=half(tmp_path))
    assert "The optimizer now, by the recipe: lr 0.1 -> 1e-06" in caplog.text


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
@pytest.mark.parametrize("before", [None, "linear"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_recipes_schedule_goes_on_where_the_run_stands(tmp_path, name, before):
    recipe = (partial(AdamW, lr=0.05), SCHEDULES[name])
    whole = run(tmp_path / "whole", *recipe)
    earlier = recipe if before is None else (partial(AdamW, lr=0.1), SCHEDULES[before])
    run(tmp_path, *earlier, iterations=2)
    resumed = run(tmp_path, *recipe, resume=half(tmp_path))
    assert resumed.seen == whole.seen[2 * STEPS :]


def test_a_schedule_that_ends_before_the_run_does_is_refused(tmp_path):
    run(tmp_path, iterations=2)
    short = partial(OneCycleLR, max_lr=0.3, total_steps=4)
    with pytest.raises(ValueError, match="OneCycleLR cannot be where this run is, after 6 opt"):
        run(tmp_path, partial(AdamW, lr=0.1), short, resume=half(tmp_path))


def test_another_class_of_optimizer_begins_anew_and_says_so(tmp_path, caplog):
    run(tmp_path, iterations=2)
    module = run(tmp_path, partial(SGD, lr=0.1, momentum=0.9), resume=half(tmp_path))
    assert "optimizer is AdamW, the recipe's SGD: its state (moments) begins anew" in caplog.text
    (state,) = module.trainer.optimizers[0].state.values()
    assert list(state) == ["momentum_buffer"]


def test_another_number_of_groups_is_refused(tmp_path):
    run(tmp_path, iterations=2)

    def two_groups(parameters):
        return AdamW([{"params": parameters}, {"params": [torch.nn.Parameter(torch.ones(1))]}])

    with pytest.raises(ValueError, match="has 1 groups of parameters, the recipe's 2"):
        run(tmp_path, two_groups, resume=half(tmp_path))
