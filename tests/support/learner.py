"""Shared by tests of training.learner."""

from dataclasses import dataclass, replace

import torch

from litgrpo.algorithms.objective import Objective
from tests.support.models import prompt_batch


@dataclass(frozen=True)
class Broken(Objective):
    """The loss of rows that were asked `prompt`, and of one kind of number in it, is no number."""

    prompt: int = 0
    kind: str = "loss"
    value: float = float("nan")

    def loss(self, new, training_batch):
        output = super().loss(new, training_batch)
        asked = training_batch.tokens.prompt_ids[training_batch.tokens.prompt_of]
        if not bool((asked == self.prompt).any()):
            return output
        if self.kind == "loss":
            return replace(output, loss=output.loss * self.value)
        # The square root of 0 is 0, but its slope there is infinite.
        return replace(output, loss=output.loss + (new.logprobs * 0).sum().sqrt())


def first_token(text: str) -> int:
    """The token after the begin token."""
    return int(prompt_batch(text).prompt_ids[0, 1])


@dataclass(frozen=True)
class Tight(Objective):
    """Memory suffices for two rows."""

    def loss(self, new, training_batch):
        if len(training_batch) > 2:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
        return super().loss(new, training_batch)
