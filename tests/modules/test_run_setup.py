import logging
import warnings
from functools import partial

import pytest
import torch
from lightning import Callback, Trainer

from litgrpo.data.modules import PromptData
from litgrpo.learning.optim import WarmupLinear
from litgrpo.learning.update_config import UpdateConfig
from litgrpo.models.loading.load import LoRA
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.run_setup import (
    GRPO_RATES,
    SFT_RATES,
    _warn_of_lost_updates,
    check_trainer_precision,
    resolve_run_length,
)
from litgrpo.modules.sft import SFT
from tests.support.models import prompt_batch, tiny_policy
from tests.support.raises import raises_for
from tests.support.training import batches, letters, loader, train
from tests.support.training import unchecked as module


class Asked:
    def __init__(self, pretrained="Qwen/Qwen3-1.7B", lora=None):
        self.pretrained, self.lora = pretrained, lora


@pytest.mark.parametrize(
    ("rates", "asked", "usual"),
    [
        (GRPO_RATES, Asked(), 1e-6),
        (GRPO_RATES, Asked(lora=LoRA()), 1e-5),
        (GRPO_RATES, Asked("builtin:tiny-gemma2"), 3e-4),
        (SFT_RATES, Asked(), 2e-5),
        (SFT_RATES, Asked(lora=LoRA()), 2e-4),
        (SFT_RATES, Asked(None), 1e-3),
    ],
)
def test_the_usual_learning_rate_depends_on_what_is_trained(rates, asked, usual):
    assert rates.select(asked)[0] == usual


def loader_of(num):
    return loader(prompt_batch("a", "b"), num)


def lr_of(grpo):
    return grpo.trainer.optimizers[0].param_groups[0]["lr"]


def test_without_an_optimizer_a_model_is_trained_at_a_low_rate_and_told_so(caplog):
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module()
    train(grpo, batches("a", "b"))
    assert lr_of(grpo) == 1e-6
    (line,) = [line for line in caplog.messages if line.startswith("Optimizer:")]
    assert "lr 1e-06 (default for full fine-tuning), weight decay 0.01" in line


def test_an_optimizers_own_default_that_ruins_a_model_is_named(caplog):
    caplog.set_level(logging.INFO, "litgrpo")
    train(module(optimizer=torch.optim.AdamW), batches("a", "b"))
    (line,) = [line for line in caplog.messages if line.startswith("Optimizer:")]
    assert "lr 0.001" in line
    assert "That lr is high: 1e-06" in line


def test_without_a_length_a_run_makes_three_passes_over_its_data(caplog):
    caplog.set_level(logging.INFO, "litgrpo")
    grpo = module(max_iterations=None, check_invariants=False)
    train(grpo, loader_of(2))
    assert grpo.iteration == 6
    assert any("6 iterations" in line for line in caplog.messages)


def test_what_else_ends_a_run_is_left_to_it():
    grpo = module(max_iterations=None, max_generated_tokens=1, check_invariants=False)
    train(grpo, loader_of(2))
    assert (grpo.iteration, grpo.max_iterations) == (1, None)


def test_the_trainers_own_length_counts_too():
    grpo = module(max_iterations=None, check_invariants=False)
    train(grpo, loader_of(2), max_epochs=1)
    assert (grpo.iteration, grpo.max_iterations) == (2, None)
    assert resolve_run_length(grpo) == 2


def test_a_schedule_takes_its_length_in_optimizer_steps_from_the_run():
    update = UpdateConfig(num_mini_batches=2)
    grpo = module(max_iterations=3, lr_scheduler=WarmupLinear, update=update)
    train(grpo, loader_of(1))
    (config,) = grpo.trainer.lr_scheduler_configs
    assert config.scheduler.total_steps == 6


@pytest.mark.parametrize(
    ("options", "total_steps"),
    [
        ({"max_steps": 3}, 4),  # the second iteration is finished
        ({"max_steps": 3, "max_epochs": 1}, 2),
        ({"max_steps": 3, "max_epochs": 9}, 4),
        ({"fast_dev_run": True}, 2),
    ],
)
def test_a_schedule_ends_at_the_trainers_limits(options, total_steps):
    update = UpdateConfig(num_mini_batches=2)
    grpo = module(max_iterations=None, lr_scheduler=WarmupLinear, update=update)
    runner = train(grpo, loader_of(1), **options)
    (config,) = runner.lr_scheduler_configs
    assert config.scheduler.total_steps == runner.global_step == total_steps


def optimize(optimizer, **schedule):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler} | schedule}


@pytest.mark.parametrize(
    ("configure", "names"),
    [
        (lambda optimizer: None, ["returned 0 optimizers"]),
        (lambda optimizer: [optimizer, optimizer], ["returned 2 optimizers"]),
        (optimize, ["StepLR", '"interval": "step"']),
        (partial(optimize, interval="step", frequency=2), ["StepLR", '"interval": "step"']),
        (
            lambda optimizer: optimize(
                optimizer,
                scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                interval="step",
            ),
            ["ReduceLROnPlateau", "without a metric"],
        ),
    ],
)
def test_what_an_own_class_returns_is_rejected_if_it_would_not_be_used_so(
    configure, names, monkeypatch
):
    def configure_optimizers(self):
        return configure(torch.optim.SGD(self.parameters(), lr=0.1))

    monkeypatch.setattr(GRPO, "configure_optimizers", configure_optimizers)
    with warnings.catch_warnings(), raises_for("configure_optimizers", *names):
        warnings.filterwarnings("ignore", message=".*configure_optimizers. returned .None.")
        train(module(), batches("a", "b"))
    monkeypatch.setattr(
        GRPO,
        "configure_optimizers",
        lambda self: optimize(torch.optim.SGD(self.parameters(), lr=0.1), interval="step"),
    )
    assert train(module(), batches("a", "b")).global_step == 1


def test_a_constructor_that_refuses_is_heard_in_its_own_words():
    grpo = module(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=-1.0))
    with pytest.raises(ValueError, match=r"model\.optimizer: Invalid learning rate"):
        train(grpo, batches("a", "b"))


def test_a_stock_trainer_without_a_length_makes_three_passes():
    grpo = module(max_iterations=None, check_invariants=False, reward=letters)
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=False)
    trainer.fit(grpo, loader_of(1))
    assert grpo.iteration == 3


def test_an_eps_of_zero_in_float16_is_rejected():
    def half_precision(eps):
        grpo = module(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, eps=eps))
        grpo.policy = tiny_policy("qwen2").half()
        return grpo

    with raises_for("eps", "float16"):
        train(half_precision(1e-8), batches("a", "b"))


class SavesAfter(Callback):
    """Notes the prompts of each iteration, and saves a checkpoint after one of them."""

    def __init__(self, iteration, path):
        self.iteration, self.path, self.prompts = iteration, path, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.prompts.append(batch.prompts)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.iteration == self.iteration:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("epochs", [2, -1], ids=["max_epochs", "default length"])
def test_counting_the_batches_of_an_epoch_keeps_the_data_position_of_a_resume(epochs, tmp_path):
    """Without `max_iterations`, the run's length is counted before the data position is loaded.

    Each evaluation counts it again, to find out if it is the last one.
    """

    def run(ckpt=None):
        settings = {"group_size": 2, "max_completion_length": 4, "check_invariants": False}
        grpo = GRPO("builtin:tiny-gemma2", [letters], **settings)
        saves = SavesAfter(5, tmp_path / "five.ckpt")
        data = PromptData(["ab", "cd", "what", "is", "this", "now"], val=["yes"], batch_size=2)
        train(grpo, data, ckpt, max_epochs=epochs, callbacks=[saves], val_check_interval=1)
        return saves.prompts, grpo

    prompts, whole = run()
    later_prompts, resumed = run(tmp_path / "five.ckpt")
    assert later_prompts == prompts[5:]
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def optimizer_classes():
    """Every optimizer of torch, with the arguments that it requires."""
    found = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, torch.optim.Optimizer)}


def scheduler_classes():
    kinds = vars(torch.optim.lr_scheduler)
    base = torch.optim.lr_scheduler.LRScheduler
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, base) and not name.startswith("_")
    }


TORCH_OPTIMIZERS = optimizer_classes()
TORCH_SCHEDULERS = scheduler_classes()
REJECTED_OPTIMIZERS = {"LBFGS", "SparseAdam", "Optimizer", "Muon"}
ARGUMENTS = {
    "LambdaLR": lambda o: {"lr_lambda": lambda step: 0.5**step},
    "MultiplicativeLR": lambda o: {"lr_lambda": lambda step: 0.5},
    "StepLR": lambda o: {"step_size": 2},
    "MultiStepLR": lambda o: {"milestones": [1]},
    "ExponentialLR": lambda o: {"gamma": 0.9},
    "CosineAnnealingLR": lambda o: {"T_max": 3},
    "CosineAnnealingWarmRestarts": lambda o: {"T_0": 2},
    "CyclicLR": lambda o: {"base_lr": 0.1, "max_lr": 0.2},
    "OneCycleLR": lambda o: {"max_lr": 0.1, "total_steps": 10},
    "SequentialLR": lambda o: {
        "schedulers": [torch.optim.lr_scheduler.ConstantLR(o) for _ in range(2)],
        "milestones": [1],
    },
}
REJECTED_SCHEDULERS = {"ReduceLROnPlateau", "LRScheduler"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_every_optimizer_of_torch_trains_or_is_one_error_at_the_start(name):
    def build(parameters):
        kind = TORCH_OPTIMIZERS[name]
        return kind(parameters, {}) if name == "Optimizer" else kind(parameters, lr=0.1)

    grpo = module(optimizer=build, max_iterations=2)
    check_trains_or_is_rejected(grpo, "model.optimizer", is_rejected=name in REJECTED_OPTIMIZERS)


def check_trains_or_is_rejected(grpo, option, *, is_rejected):
    if is_rejected:
        with raises_for(option):
            train(grpo, batches("a", "b"))
    else:
        train(grpo, batches("a", "b"))
    assert grpo.iteration == (0 if is_rejected else 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TORCH_SCHEDULERS)
def test_every_schedule_of_torch_trains_or_is_one_error_at_the_start(name):
    def build(optimizer):
        kind = TORCH_SCHEDULERS[name]
        given = ARGUMENTS.get(name, lambda _: {})(optimizer)
        if name == "ChainedScheduler":
            return kind([torch.optim.lr_scheduler.ConstantLR(optimizer)])
        return kind(optimizer, **given)

    grpo = module(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lr_scheduler=build,
        max_iterations=2,
    )
    check_trains_or_is_rejected(grpo, "model.lr_scheduler", is_rejected=name in REJECTED_SCHEDULERS)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"lr_scheduler": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=3)},
            "OneCycleLR fails at optimizer step",
        ),
        (
            {"lr_scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 - n)},
            "learning rate to -",
        ),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True)}, "Nesterov"),
        ({"optimizer": lambda p: {}["lr"]}, "Could not construct model.optimizer"),
    ],
)
def test_an_optimizer_or_schedule_that_would_fail_later_is_rejected(settings, named):
    given = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "max_iterations": 20} | settings
    grpo = module(**given)
    with raises_for(named):
        train(grpo, batches("a", "b"))
    assert grpo.iteration == 0


def test_the_adafactor_of_transformers_needs_a_learning_rate():
    from transformers.optimization import Adafactor

    with raises_for("Adafactor", "optimizer.lr", "relative_step: false"):
        train(module(optimizer=Adafactor), batches("a", "b"))
    grpo = module(
        optimizer=lambda p: Adafactor(p, lr=1e-3, relative_step=False, scale_parameter=False),
        max_iterations=2,
    )
    train(grpo, batches("a", "b"))
    assert grpo.iteration == 2


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan")])
def test_a_gradient_limit_of_zero_is_rejected_with_the_way_to_turn_it_off(value):
    with raises_for("update.max_grad_norm", "null"):
        UpdateConfig(max_grad_norm=value)
    with raises_for("max_grad_norm", "null"):
        SFT(pretrained="x", max_grad_norm=value)


@pytest.mark.parametrize(
    ("dtype", "lr", "warns"),
    [("bfloat16", 1e-6, True), ("bfloat16", 1e-2, False), ("float32", 1e-6, False)],
)
def test_a_learning_rate_that_low_precision_rounds_away_is_named(dtype, lr, warns, caplog):
    weight = torch.nn.Parameter(torch.randn(64, 64).to(getattr(torch, dtype)))
    _warn_of_lost_updates(torch.optim.AdamW([weight], lr=lr))
    assert ("precision.dtype is bfloat16" in caplog.text) is warns


@pytest.mark.parametrize(
    ("lost", "unchanged", "share"),
    [
        ([100], [10] * 20, None),  # a third of the weights, in one tensor of many
        ([10] * 20, [100], "67%"),
        ([20_000], [15_000], "57%"),  # sampled: every second number, and every number
        ([15_000], [20_000], None),
        ([30_000, 10], [10], "100%"),
        ([60], [0, 40], "60%"),
    ],
)
def test_the_share_of_lost_updates_is_that_of_the_weights(lost, unchanged, share, caplog):
    # In bfloat16, steps of 0.001 are lost next to 1, whose neighbour is 2^-8 away, not to 0.01.
    weights = [torch.full((size,), 1.0) for size in lost]
    weights += [torch.full((size,), 0.01) for size in unchanged]
    parameters = [torch.nn.Parameter(weight.bfloat16()) for weight in weights]
    _warn_of_lost_updates(torch.optim.AdamW(parameters, lr=1e-3))
    if share is None:
        assert not caplog.text
    else:
        assert f"in {share} of the weights" in caplog.text


def test_a_step_of_half_the_distance_between_two_numbers_is_not_lost(caplog):
    start = 1 + 2**-7  # in bfloat16 the next numbers are 2^-7 away; ties go to the even one
    weight = torch.nn.Parameter(torch.full((8, 8), start, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=2**-8, weight_decay=0.0)
    _warn_of_lost_updates(optimizer)
    assert not caplog.text
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert (weight != start).all()


def test_precisions_that_would_convert_prompts_are_rejected():
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        check_trainer_precision(precision)
    with raises_for("trainer.precision", "16-true"):
        check_trainer_precision("16-true")
