"""A module and its data that keep the promises callbacks rely on, and learn nothing."""

import torch
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from litgrpo.distributed.collectives import SingleProcess
from litgrpo.evaluation.evaluator import Evaluated
from litgrpo.metrics import average_over_ranks, reward_stats, rollout_stats
from litgrpo.types import (
    Experience,
    Iteration,
    PromptBatch,
    RewardTable,
    Rollout,
    RolloutLogprobs,
    StepReport,
)
from tests.support.models import tiny_policy

GROUP_SIZE = 2
STEPS_PER_ITERATION = 3


def rollout_of(prompts: PromptBatch, group_size: int = GROUP_SIZE) -> Rollout:
    """Every completion is `<answer>N</answer>` for row N, three tokens long."""
    rows = len(prompts) * group_size
    ids = torch.arange(3).expand(rows, 3)
    texts = [f"<answer>{row}</answer>" for row in range(rows)]
    mask = torch.ones_like(ids, dtype=torch.bool)
    flags = torch.zeros(rows, dtype=torch.bool)
    return Rollout(prompts, group_size, ids, mask, -torch.ones(rows, 3), flags, texts)


def rewards_of(rollout: Rollout) -> RewardTable:
    """The first completion of a group is right, the others are not; row 0 gets no format reward."""
    right = torch.zeros(len(rollout.prompts), rollout.group_size, dtype=torch.float64)
    right[:, 0] = 1
    form = torch.ones_like(right)
    form[0, 0] = torch.nan
    parts = {"correct": right, "format": form}
    valid = torch.ones_like(right, dtype=torch.bool)
    return RewardTable(parts, {"correct": 1.0, "format": 0.0}, right, valid)


def prompts(*texts: str, first: int = 0) -> PromptBatch:
    """Prompts of two tokens each, numbered from `first`."""
    ids = torch.ones(len(texts), 2, dtype=torch.long)
    columns = {"answer": [str(n) for n in range(len(texts))]}
    return PromptBatch(ids, ids.bool(), list(texts), columns, first + torch.arange(len(texts)))


def iteration_of(
    number: int, rollout: Rollout, rewards: RewardTable, steps: list[StepReport]
) -> Iteration:
    """An iteration without a training batch; advantages are the rewards minus a half."""
    experience = Experience(rollout.prompts, rollout, rewards, RolloutLogprobs())
    return Iteration(number, experience, None, rewards.total - 0.5, steps)


class StandIn(LightningModule):
    """Takes three optimizer steps per iteration and gets better by a tenth at each evaluation.

    Args:
        max_iterations: when to stop.
        group_size: at least 2.
        seed: only remembered.
        scores: what the evaluations give, one after the other.
    """

    def __init__(
        self,
        max_iterations: int | None = 4,
        group_size: int = GROUP_SIZE,
        seed: int = 0,
        scores: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.max_iterations = max_iterations
        self.group_size = group_size
        self.seed = seed
        self.scores = scores or [0.1 * n for n in range(20)]
        self.iteration = 0
        self.evaluations = 0
        self.evaluation_report: dict[str, float] = {}
        self.success: dict[str, object] = {"rewards": {"": "correct"}, "threshold": 1.0}
        self.policy = None

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = tiny_policy("llama")

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        if self.iteration == self.max_iterations:
            self.trainer.should_stop = True

    def training_step(self, batch: PromptBatch, batch_idx: int):
        for _ in range(STEPS_PER_ITERATION):
            self.optimizers().step()
        rollout = rollout_of(batch)
        rewards = rewards_of(rollout)
        self.iteration += 1
        self.log("step", float(self.iteration))
        seen = reward_stats(rewards) | rollout_stats(rollout)
        logged = average_over_ranks(seen, [], SingleProcess(), torch.device("cpu"))
        self.log_dict(logged, batch_size=len(batch))
        if self.iteration == self.max_iterations:
            self.trainer.should_stop = True
        steps = [StepReport(lr=0.1)] * STEPS_PER_ITERATION
        return {"iteration": iteration_of(self.iteration, rollout, rewards, steps)}

    def validation_step(self, batch: PromptBatch, batch_idx: int):
        rollout = rollout_of(batch)
        rewards = rewards_of(rollout)
        return vars(Evaluated(rollout, rewards, rewards.total >= 1))

    def on_validation_epoch_end(self) -> None:
        score = self.scores[self.evaluations]
        self.evaluations += 1
        interval = {"avg@2": score, "avg@2_low": score - 0.1, "avg@2_high": score + 0.1}
        self.evaluation_report = interval | {"greedy": score, "correct": 0.5, "format": 1.0}
        self.log("step", float(self.iteration))
        self.log_dict({f"val/{name}": value for name, value in self.evaluation_report.items()})

    def predict_step(self, batch: PromptBatch, batch_idx: int):
        said = zip(batch.prompts, rollout_of(batch, 1).completions, strict=True)
        return [dict(prompt=p, completion=c, reasoning="", answer=c[8:-9]) for p, c in said]

    def on_save_checkpoint(self, checkpoint) -> None:
        checkpoint["iteration"] = self.iteration

    def on_load_checkpoint(self, checkpoint) -> None:
        self.iteration = checkpoint["iteration"]


class OtherModel(StandIn):
    """Another architecture."""

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = tiny_policy("gpt2")


class FailsToStart(StandIn):
    """Has a bug in its first evaluation."""

    def validation_step(self, batch: PromptBatch, batch_idx: int):
        raise RuntimeError("a bug")


class WithoutWeights(StandIn):
    """Cannot load its model."""

    def configure_model(self) -> None:
        raise RuntimeError("no weights")


class StandInData(LightningDataModule):
    """Prompts A, B, C, D in two batches.

    Args:
        prompts: for predict.
        seed: only remembered.
        broken: has no batches, by a bug.
    """

    def __init__(
        self, prompts: list[str] | None = None, seed: int = 0, broken: bool = False
    ) -> None:
        super().__init__()
        self.prompts = prompts or ["A", "B", "C", "D"]
        self.seed, self.broken = seed, broken

    def train_dataloader(self):
        if self.broken:
            raise ValueError("a bug")
        return DataLoader(self.prompts, batch_size=2, collate_fn=self.collate)

    def collate(self, texts: list[str]) -> PromptBatch:
        return prompts(*texts, first=self.prompts.index(texts[0]))

    val_dataloader = predict_dataloader = test_dataloader = train_dataloader
