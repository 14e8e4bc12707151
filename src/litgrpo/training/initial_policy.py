"""What the weights that training started from say of completions; they are loaded when needed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.memory import free_memory, is_out_of_memory
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.evaluation.evaluator import StartLogprobs
from litgrpo.models.loading import load_reference
from litgrpo.models.reference import BaseModelReference, Reference
from litgrpo.training.assembly import make_sharding
from litgrpo.types import Rollout


def start_logprobs(module: Any) -> StartLogprobs | None:
    """The start of training, where it costs no second model; None where it has to be loaded.

    Before the first iteration it is the policy itself, so what the engine said at sampling is
    taken. Then it is the reference, if that is a copy of the start that stays, or with LoRA the
    weights under the adapters.

    Args:
        module: a `GRPO` whose model is configured.
    """
    if module.iteration == 0:
        return as_sampled
    reference, policy = module.reference, module.policy
    moves = module.coefficients.moves_reference
    if reference is not None and module.reference_path is None and not moves:
        return partial(asked, module, reference)
    return partial(asked, module, BaseModelReference(policy)) if policy.has_adapter else None


def as_sampled(rollout: Rollout) -> Tensor:
    """[N, C] log-probabilities under the policy that sampled, as its engine said."""
    return rollout.sampler_logprobs


def asked(module: Any, reference: Reference, rollout: Rollout) -> Tensor:
    """[N, C] log-probabilities of a rollout under a frozen model, at the evaluation's temperature.

    Args:
        module: its learner knows how many rows fit into memory at once.
        reference: the frozen model.
        rollout: N completions.
    """
    sampling = module.evaluator.sampling
    return module.learner.logprobs_under(reference, rollout.tokens, sampling.policy_temperature)


def complete(module: Any) -> dict[str, float]:
    """What the last evaluation lacks: the start of training is loaded, asked and let go.

    At the end of a run nothing may be lost for it: where the start cannot be loaded, or memory is
    short, one line says so, on all processes together.

    Args:
        module: a `GRPO` after an evaluation.

    Returns:
        {stage/name: number}; nothing where nothing is missing or the start cannot be asked.
    """
    evaluator, device = module.evaluator, module.device
    # A device that compiles programs would need new ones for the second model.
    if not evaluator.waiting or backend(device).static_shapes:
        return {}
    failure = ""
    try:
        policy, precision = module.policy, module.settings.precision
        sharding = make_sharding(module)
        start = load_reference(policy, None, module.pretrained, precision, sharding=sharding).to(
            device
        )
        with gathered(start, policy):  # processes have unequal numbers of batches
            evaluator.score(partial(asked, module, start))
        del start
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        failure = "memory is short" if is_out_of_memory(error) else str(error).splitlines()[0]
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
    free_memory()
    if module.learner.comm.max(torch.tensor(float(bool(failure)))):
        rank_zero_warn(
            "start_perplexity and start_kl are not measured: the weights that training started "
            f"from cannot be asked ({failure or 'on another process'})"
        )
        return {}
    return evaluator.complete()
