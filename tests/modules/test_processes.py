import pytest
import torch
from lightning import Trainer

from litgrpo.data.prompts import PromptData
from litgrpo.modules.grpo import GRPO
from litgrpo.modules.settings import Evaluation, Learning
from litgrpo.objectives.objective import Objective
from litgrpo.policies.reference import FrozenModel
from litgrpo.rewards.composite import Reward
from tests.conftest import tiny_policy

TEXTS = ["a", "hello there", "xyz", "what is 3+4?", "b", "cd", "some more", "the end"]


def letters(prompts, completions):
    return [sum(letter.isalpha() for letter in text) / 6 for text in completions]


def train(num_processes, folder):
    """Weights and report after two iterations of two epochs on four prompts."""
    grpo = GRPO(
        "",
        {"letters": Reward(letters)},
        group_size=4,
        max_completion_len=6,
        max_iterations=2,
        objective=Objective(kl_coef=0.1),
        learning=Learning(inner_epochs=2, micro_batch_size=3),
        evaluation=Evaluation(samples=2, pass_at=[1], threshold=0.3),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    )
    grpo.policy = tiny_policy("qwen2")
    grpo.reference = FrozenModel(tiny_policy("qwen2", seed=1))
    trainer = Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy="ddp_fork" if num_processes > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=-1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(grpo, PromptData(TEXTS, val=["one", "two", "three"], batch_size=4))
    trainer.save_checkpoint(folder / f"{num_processes}.ckpt")
    weights = torch.load(folder / f"{num_processes}.ckpt", weights_only=True)["state_dict"]
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.timeout(120)
def test_two_processes_learn_and_report_what_one_does(tmp_path):
    one, one_report = train(1, tmp_path)
    two, two_report = train(2, tmp_path)
    start = tiny_policy("qwen2").state_dict()
    for name, weight in one.items():
        moved = (weight - start[name.removeprefix("policy.")]).norm()
        assert (two[name] - weight).norm() <= 1e-4 * moved
    for name in ("val/avg@2", "val/avg@2_low", "val/letters", "reward/mean", "policy/kl"):
        assert two_report[name] == pytest.approx(one_report[name], rel=1e-4)
