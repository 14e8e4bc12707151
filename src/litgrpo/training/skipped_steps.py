"""Why an optimizer step was skipped: the rows whose numbers are not finite."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from litgrpo.distributed.fsdp.units import gathered
from litgrpo.types import TokenLogprobs, TrainingBatch

# Number [1] of a row -> the row alone, what the policy thinks of it, and its share of the loss.
OfRow = Callable[[Tensor], tuple[TrainingBatch, TokenLogprobs, Tensor]]


def not_finite(experience: TrainingBatch, of_row: OfRow, policy: nn.Module) -> dict[int, str]:
    """{row: which of its numbers is not finite}, found by learning from each row alone.

    A forward and a backward pass per row.

    Args:
        experience: M rows of the step.
        of_row: the loss of one of them.
        policy: has the gradients.
    """
    with gathered(policy):  # processes have unequal numbers of rows
        return _not_finite(experience, of_row, policy)


def _not_finite(experience: TrainingBatch, of_row: OfRow, policy: nn.Module) -> dict[int, str]:
    trained = [p for p in policy.parameters() if p.requires_grad]
    found = {}
    for row in (experience.weights != 0).any(1).nonzero():
        micro, new, loss = of_row(row)
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        numbers = {
            "advantage": micro.advantages,
            "log-probability at sampling": micro.sampler_logprobs,
            "log-probability": new.logprobs,
            "loss": loss,
            "gradient": torch.stack([g.abs().max() for g in gradients if g is not None]),
        }
        bad = [name for name, values in numbers.items() if not values.isfinite().all()]
        if bad:
            found[int(row)] = bad[0]
    return found
