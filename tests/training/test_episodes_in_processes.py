"""Two processes, each with an environment in worker processes, learn what one process does."""

import json

import pytest
import torch

from litgrpo.algorithms.losses import Objective
from litgrpo.data.modules import PromptData
from litgrpo.models.reference import FrozenReference
from litgrpo.rewards.reward import Reward
from litgrpo.rewards.runner import InProcessRunner
from litgrpo.rollout.episodes import EpisodeSettings
from litgrpo.training.grpo import GRPO
from litgrpo.training.update_config import UpdateConfig
from tests.support.algorithms import DISTILLING, PUBLISHED
from tests.support.echo import Echo
from tests.support.models import tiny_policy
from tests.support.processes import TEXTS, Gradients, in_a_process_of_one_thread, letters, trainer

COMPARED = (
    "env/turns",
    "env/reward",
    "reward/mean",
    "completion/observation_frac",
    "optim/grad_norm",
)
COMPARED += ("policy/loss", "completion/len_mean")


class GradientsFirst(Gradients):
    """Takes the gradients of all algorithms, and then learns by one of them."""

    def training_step(self, prompts, batch_idx):
        if self.iteration:
            return GRPO.training_step(self, prompts, batch_idx)
        (group,) = self.optimizers().param_groups
        rate, group["lr"] = group["lr"], 0.0
        super().training_step(prompts, batch_idx)
        group["lr"] = rate
        self.coefficients.objective = PUBLISHED["gtpo"]
        return None


def learn(num_processes, folder):
    """Run three turns; observations are read in the decoding loop and in one forward pass."""
    grpo = GradientsFirst(
        "",
        {"letters": Reward(letters), "environment": Reward(weight=0.3)},
        group_size=4,
        max_completion_length=70,
        max_iterations=3,
        environment=Echo((2, 40)),
        episode=EpisodeSettings(
            turn_format="inline",
            num_workers=2,
            max_turns=3,
            max_turn_tokens=4,
            close_truncated_turns=True,
        ),
        objective=Objective(kl_coef=0.1),
        reference="another",
        check_invariants=False,
        reward_runner=InProcessRunner(),
        update=UpdateConfig(epochs_per_rollout=2, micro_batch_size=3, max_grad_norm=None),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    grpo.policy = tiny_policy("qwen2")
    grpo.policy.eos_ids = tuple(range(2, 60))
    grpo.reference = FrozenReference(tiny_policy("qwen2", seed=1))
    grpo.file = folder / f"gradients {num_processes}.pt"
    runner = trainer(num_processes)
    runner.fit(grpo, PromptData(TEXTS, batch_size=4))
    runner.save_checkpoint(folder / f"{num_processes}.ckpt")
    report = {name: float(value) for name, value in runner.callback_metrics.items()}
    (folder / f"{num_processes}.json").write_text(json.dumps(report))


@pytest.mark.timeout(900)
def test_two_processes_with_environments_in_workers_learn_what_one_does(tmp_path):
    in_a_process_of_one_thread(learn, tmp_path)
    one, two = (torch.load(tmp_path / f"gradients {n}.pt", weights_only=True) for n in (1, 2))
    errors = {name: float((two[name] - one[name]).norm() / one[name].norm()) for name in one}
    assert errors.keys() == (PUBLISHED | DISTILLING).keys() - {"bnpo"}
    assert max(errors.values()) < 1e-5, errors
    one, two = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2))
    start = tiny_policy("qwen2").state_dict()
    moved = sum(float((one[f"policy.{n}"] - w).square().sum()) for n, w in start.items()) ** 0.5
    off = sum(float((two[name] - weight).square().sum()) for name, weight in one.items()) ** 0.5
    assert moved > 1e-3
    assert off < 1e-4 * moved
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2))
    assert second.keys() == first.keys()
    for name in COMPARED:
        assert second[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), name
