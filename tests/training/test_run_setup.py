import logging

import pytest
import torch
from lightning import Callback, Trainer

from litgrpo.data.modules import PromptData
from litgrpo.models.loading import LoRA
from litgrpo.training.optim import WarmupLinear
from litgrpo.training.run_setup import GRPO_RATES, SFT_RATES, resolve_run_length
from litgrpo.training.update_config import UpdateConfig
from tests.support.models import prompt_batch, tiny_policy
from tests.support.raises import raises_for
from tests.support.training import batches, letters, loader, module, train


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
    """Without `max_iterations`, the run's length is counted before the data position is loaded."""

    def run(ckpt=None):
        grpo, saves = module(max_iterations=None), SavesAfter(4, tmp_path / "four.ckpt")
        data = PromptData(["ab", "cd", "what", "is", "this", "now"], batch_size=2)
        train(grpo, data, ckpt, max_epochs=epochs, callbacks=[saves])
        return saves.prompts, grpo

    prompts, whole = run()
    later_prompts, resumed = run(tmp_path / "four.ckpt")
    assert later_prompts == prompts[4:]
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)
