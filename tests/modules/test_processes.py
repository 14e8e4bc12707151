import json
import os
import subprocess
import sys
from pathlib import Path

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

ROOT = Path(__file__).parents[2]
TEXTS = ["a", "hello there", "xyz", "what is 3+4?", "b", "cd", "some more", "the end"]


def letters(prompts, completions):
    return [sum(letter.isalpha() for letter in text) / 6 for text in completions]


def train(num_processes, folder):
    """Two iterations of two epochs on four prompts; leaves the weights and the report."""
    grpo = GRPO(
        "",
        {"letters": Reward(letters)},
        group_size=4,
        max_completion_len=6,
        max_iterations=2,
        objective=Objective(kl_coef=0.1),
        reference="another",
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
    )
    trainer.fit(grpo, PromptData(TEXTS, val=["one", "two", "three"], batch_size=4))
    trainer.save_checkpoint(folder / f"{num_processes}.ckpt")
    report = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (folder / f"{num_processes}.json").write_text(json.dumps(report))


@pytest.mark.timeout(120)
def test_two_processes_learn_and_report_what_one_does(tmp_path):
    # In a process of one thread: a fork of one with several can wait for threads it does not have.
    code = "import sys, pathlib; from tests.modules.test_processes import train\n"
    code += "for num in (1, 2): train(num, pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, cwd=ROOT
    )
    one, two = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2))
    start = tiny_policy("qwen2").state_dict()
    for name, weight in one.items():
        moved = (weight - start[name.removeprefix("policy.")]).norm()
        assert (two[name] - weight).norm() <= 1e-4 * moved
    one_report, two_report = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    for name in ("val/avg@2", "val/avg@2_low", "val/letters", "reward/mean", "policy/kl"):
        assert two_report[name] == pytest.approx(one_report[name], rel=1e-4)
