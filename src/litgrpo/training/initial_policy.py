"""Log-probabilities under the initial policy, which evaluations compare samples with."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.memory import NotEnoughMemory, free_memory, is_out_of_memory
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.evaluation.evaluator import Evaluator, InitialLogprobs
from litgrpo.models.loading import Precision, load_reference
from litgrpo.models.policy import Policy
from litgrpo.models.reference import BaseModelReference, Reference
from litgrpo.training.controllers import FixedCoefficients
from litgrpo.training.learner import Learner
from litgrpo.training.run_setup import make_sharding
from litgrpo.types import Rollout


class EvaluatedModule(Protocol):
    """The parts of GRPO that measuring the initial policy needs."""

    iteration: int
    pretrained: Any
    reference_path: Any
    precision: Precision
    policy: Policy | None
    reference: Reference | None
    coefficients: FixedCoefficients
    evaluator: Evaluator
    learner: Learner

    @property
    def device(self) -> torch.device:
        """Device of the policy."""


def initial_logprobs(module: EvaluatedModule) -> InitialLogprobs | None:
    """Return a function of log-probabilities under the initial policy, if it needs no extra model.

    Before the first iteration the policy itself is the initial one, so the log-probabilities at
    sampling serve. Later it is the reference, if that is a fixed copy, or the model without its
    LoRA adapters.

    Args:
        module: after `configure_model`.

    Returns:
        None if the initial policy would have to be loaded again.
    """
    policy, reference = module.policy, module.reference
    assert policy is not None
    if module.iteration == 0:
        return _sampler_logprobs
    moves = module.coefficients.moves_reference
    if reference is not None and module.reference_path is None and not moves:
        return partial(_logprobs_under, module, reference)
    if policy.has_adapter:
        return partial(_logprobs_under, module, BaseModelReference(policy))
    return None


def _sampler_logprobs(rollout: Rollout) -> Tensor:
    return rollout.sampler_logprobs


def _logprobs_under(module: EvaluatedModule, reference: Reference, rollout: Rollout) -> Tensor:
    temperature = module.evaluator.sampling.policy_temperature
    return module.learner.logprobs_under(reference, rollout.tokens, temperature)


def measure_initial_policy(module: EvaluatedModule) -> dict[str, float]:
    """Load the initial policy, and complete the metrics of the last evaluation that need it.

    At the end of a run nothing may be lost because of it: if it cannot be loaded, or memory is
    exhausted, all ranks skip these metrics together, with a warning.

    Args:
        module: after an evaluation.

    Returns:
        {stage/name: number}; {} if nothing is missing or the initial policy is not available.
    """
    evaluator, device, policy = module.evaluator, module.device, module.policy
    # On XLA devices a second model would need new programs.
    if not evaluator.is_incomplete or backend(device).static_shapes:
        return {}
    assert policy is not None
    failure = ""
    try:
        initial = load_reference(
            policy,
            None,
            module.pretrained,
            module.precision,
            sharding=make_sharding(module),
        ).to(device)
        with gathered(initial, policy):  # ranks have unequal numbers of batches
            evaluator.measure_initial_distance(partial(_logprobs_under, module, initial))
        del initial
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        out_of_memory = is_out_of_memory(error) or isinstance(error, NotEnoughMemory)
        if isinstance(error, RuntimeError) and not out_of_memory:
            raise
        failure = "out of memory" if out_of_memory else str(error).splitlines()[0]
    free_memory()
    if module.learner.comm.max(torch.tensor(float(bool(failure)))):
        rank_zero_warn(
            "initial_perplexity and initial_kl are not measured: the initial policy is not "
            f"available ({failure or 'on another rank'})"
        )
        return {}
    return evaluator.complete()
