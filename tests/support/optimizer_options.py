"""A stand-in that takes optimizer steps."""

from functools import partial

import torch
from lightning.pytorch.cli import LRSchedulerCallable
from torch.optim import AdamW

from tests.support.standin import StandIn

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
