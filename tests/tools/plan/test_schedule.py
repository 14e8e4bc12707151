"""The schedule of a recipe."""

from pathlib import Path

import pytest
from jsonargparse import Namespace

from litgrpo.tools.plan.command import PlanCLI
from litgrpo.tools.plan.schedule import read_schedule

OTB = "litgrpo.algorithms.advantages.OptimalTokenBaseline"
REMAX = "litgrpo.algorithms.advantages.ReMax"
M2PO = "litgrpo.algorithms.losses.M2PO"
SERVER = Namespace(class_path="litgrpo.ServerEngine", init_args=Namespace(urls=["http://a:1"]))
WHITENED = "litgrpo.algorithms.advantages.Whitened"
WHITENED_REMAX = Namespace(
    class_path=WHITENED, init_args=Namespace(advantages=Namespace(class_path=REMAX))
)
REMAX_OF_A_TASK = Namespace(class_path="x.TaskAdvantages", tasks={"a": {"class_path": REMAX}})
DATA = {"model.init_args.data_completions": {"column": "solution", "on_policy_frac": 0.4}}
OBJECTIVE, UPDATE = "model.init_args.objective", "model.init_args.update"
QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


@pytest.fixture(scope="module")
def settings():
    return PlanCLI(["-c", QUICKSTART]).config


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({}, "evaluations", 3),
        ({}, "val_completions", 5),
        ({}, "scores_old", False),
        ({"model.init_args.update.epochs_per_rollout": 2}, "steps", 2),
        ({"model.init_args.update.staleness": 1}, "scores_old", True),
        ({"model.init_args.objective.advantages.class_path": OTB}, "scores_old", True),
        ({"model.init_args.objective.kl_coef": 0.1}, "scores_reference", True),
        ({}, "greedy", False),
        ({f"{OBJECTIVE}.advantages.class_path": REMAX}, "greedy", True),
        ({f"{OBJECTIVE}.advantages": WHITENED_REMAX}, "greedy", True),
        ({f"{OBJECTIVE}.advantages": REMAX_OF_A_TASK}, "greedy", True),
        ({"model.init_args.stored_rollouts": "runs/demo"}, "scores_old", True),
        ({"model.init_args.environment": Namespace(class_path="a.B")}, "scores_old", True),
        ({"model.init_args.precision.dtype": "bfloat16"}, "scores_old", True),
        ({"model.init_args.precision.autocast_dtype": "bfloat16"}, "scores_old", True),
        ({"model.init_args.engine.init_args.dtype": "bfloat16"}, "scores_old", True),
        ({"model.init_args.update.max_staleness": 1}, "scores_old", True),
        ({"trainer.precision": "bf16-mixed"}, "scores_old", True),
        ({"model.init_args.engine": SERVER}, "scores_old", True),
        ({"trainer.precision": 32}, "scores_old", False),
        ({"trainer.precision": None}, "scores_old", False),
        ({}, "scorings", 0),
        ({f"{OBJECTIVE}.surrogate.class_path": M2PO}, "scorings", 250),
        (
            {f"{OBJECTIVE}.surrogate.class_path": M2PO, f"{UPDATE}.epochs_per_rollout": 3},
            "scorings",
            750,
        ),
        ({f"{OBJECTIVE}.top_entropy_quantile": 0.2}, "scorings", 250),
        ({f"{OBJECTIVE}.kl_coef": 0.1}, "scorings", 250),
        (DATA, "sampled", 100),
        (DATA, "scorings", 150),
        ({"trainer.limit_val_batches": 2}, "val_prompts", 200),
        ({"trainer.limit_val_batches": 0}, "evaluations", 0),
        ({"val_prompts": 7}, "val_prompts", 7),
        ({"iterations": 10}, "saves", 1),
        ({"model.init_args.max_iterations": None}, "open_ended", True),
        ({"checkpoint.save_weights_only": True}, "saves_optimizer", False),
    ],
)
def test_the_schedule_follows_the_recipe(settings, changes, name, value):
    found = settings.clone()
    for key, setting in changes.items():
        found[key] = setting
    assert getattr(read_schedule(found, is_grpo=True), name) == value
