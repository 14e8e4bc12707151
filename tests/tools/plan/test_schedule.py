"""How often everything happens, from recipes."""

from pathlib import Path

import pytest

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.schedule import schedule_of

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


@pytest.fixture(scope="module")
def settings():
    return PlanCLI(["-c", QUICKSTART]).config


@pytest.mark.parametrize(
    ("changed", "name", "value"),
    [
        ({}, "evaluations", 3),
        ({}, "answers", 5),
        ({}, "scores_old", False),
        ({"model.init_args.update.epochs_per_rollout": 2}, "steps", 2),
        ({"model.init_args.update.staleness": 1}, "scores_old", True),
        ({"model.init_args.objective.kl_coef": 0.1}, "scores_reference", True),
        ({"trainer.limit_val_batches": 2}, "held_out", 200),
        ({"trainer.limit_val_batches": 0}, "evaluations", 0),
        ({"val_prompts": 7}, "held_out", 7),
        ({"iterations": 10}, "saves", 1),
        ({"model.init_args.max_iterations": None}, "open_end", True),
        ({"checkpoint.save_weights_only": True}, "whole_checkpoints", False),
    ],
)
def test_a_recipe_says_how_often(settings, changed, name, value):
    found = settings.clone()
    for key, setting in changed.items():
        found[key] = setting
    assert getattr(schedule_of(found, samples=True), name) == value
