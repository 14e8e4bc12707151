"""When a number is not finite, an optimizer step is skipped; when memory is short, it is halved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from litgrpo.learner.static_batches import Rows
from litgrpo.models.policy import Policy
from litgrpo.parallel.device import free_memory, is_out_of_memory
from litgrpo.rollout.engines.interface import RolloutEngine
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import Experience, PromptBatch, Rollout

if TYPE_CHECKING:
    from litgrpo.learner.learner import LearningModule


def drop_gradient(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make the optimizer step that comes change nothing: neither weights nor moments.

    Optimizers pass over a parameter that has no gradient, decay included.
    """
    for parameter in parameters:
        parameter.grad = None


def offending(module: LearningModule, experience: Experience) -> dict[int, str]:
    """{row: which of its numbers is not finite}, found by learning from each row alone.

    A forward and a backward pass per row: for the rare step that was skipped.

    Args:
        module: attached to its trainer.
        experience: M rows that shared the step.
    """
    whole, device = module._whole(experience), module.fixed_on
    micro_of = experience.select
    if device is not None:
        micro_of = Rows(experience, module.learning, device).micro
    trained = [p for p in module.parameters() if p.requires_grad]
    found = {}
    for row in range(len(experience)):
        if not bool((experience.weights[row] != 0).any()):
            continue
        alone = micro_of(torch.tensor([row], device=experience.weights.device))
        new = module._logprobs(alone)
        loss = module.objective.loss(new, alone, whole).loss
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        numbers = {
            "advantage": alone.advantages,
            "log-probability at sampling": alone.sampler_logprobs,
            "log-probability": new.logprobs,
            "loss": loss,
            "gradient": torch.stack([g.abs().max() for g in gradients if g is not None]),
        }
        bad = [name for name, values in numbers.items() if not all_finite(values)]
        if bad:
            found[row] = bad[0]
    return found


def all_finite(values: Tensor) -> bool:
    """Whether every number is one."""
    return bool(values.isfinite().all())


def halved(rows: int, error: BaseException, what: str, instead: str) -> int:
    """Half as many rows as memory did not suffice for.

    Args:
        rows: how many went through the model at once.
        error: what the device said.
        what: which part of the iteration.
        instead: what the user can do where nothing is left to halve.

    Raises:
        RuntimeError: it was one row.
    """
    if rows <= 1:
        raise RuntimeError(
            f"Out of memory in {what}, with a single row at once: {instead}."
        ) from error
    return rows // 2


def rollout_within_memory(
    engine: RolloutEngine,
    policy: Policy,
    prompts: PromptBatch,
    group_size: int,
    uniforms: Tensor,
    sampling: Sampling,
    lowered: dict[str, int],
) -> tuple[RolloutEngine, Rollout]:
    """A rollout, repeated with half the rows at once while memory is short.

    The completions stay the same: no row depends on its company.

    Args:
        engine: computes it; the eager one can be told to hold fewer rows.
        policy: and the others: as for `RolloutEngine.generate`.
        prompts: see there.
        group_size: see there.
        uniforms: see there.
        sampling: see there.
        lowered: gets the new limit.

    Returns:
        The engine that had enough memory, and the rollout.
    """
    while True:
        try:
            return engine, engine.generate(policy, prompts, group_size, uniforms, sampling)
        except (RuntimeError, MemoryError) as error:
            if not (is_out_of_memory(error) and isinstance(engine, LocalEngine)):
                raise
            rows = len(uniforms) if engine.max_rows is None else min(engine.max_rows, len(uniforms))
            instead = "lower model.max_completion_len, data.max_prompt_len or model.group_size"
            # Groups stay whole: they share the keys and values of their prompt.
            rows = halved(rows if rows > group_size else 1, error, "the rollout", instead)
            lowered["max_rows"] = max(rows, group_size)
            engine = replace(engine, max_rows=lowered["max_rows"])
        free_memory()
        rank_zero_warn(
            f"out of memory in the rollout: engine.max_rows is {engine.max_rows} from now on "
            "(the completions are the same)"
        )
