"""The distance of the samples of an evaluation from the initial policy."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from litgrpo.distributed.collectives import all_gather_object
from litgrpo.distributed.device import backend
from litgrpo.distributed.fsdp.units import gathered
from litgrpo.distributed.memory import NotEnoughMemory, free_memory, is_out_of_memory
from litgrpo.distributed.messages import rank_zero_warn
from litgrpo.evaluation.evaluator import Evaluator
from litgrpo.learning.learner import Learner
from litgrpo.models.loading.load import Precision, load_reference
from litgrpo.models.policy import Policy
from litgrpo.models.reference import BaseModelReference, Reference
from litgrpo.modules.run_setup import ends_run, make_sharding
from litgrpo.types import Rollout


class EvaluatedModule(Protocol):
    """The parts of GRPO that measuring the initial policy needs."""

    iteration: int
    pretrained: Any
    reference_path: Any
    precision: Precision
    policy: Policy | None
    reference: Reference | None
    moves_reference: bool
    evaluator: Evaluator
    learner: Learner

    @property
    def device(self) -> torch.device:
        """Device of the policy."""


def measure_initial_distance(module: EvaluatedModule) -> None:
    """Measure the samples of an evaluation under the initial policy, if that is available.

    Before the first iteration the policy itself is the initial one, so the log-probabilities at
    sampling serve. Later it is the reference, if that is a fixed copy, or the model without its
    LoRA adapters. Otherwise it is loaded for the evaluation that ends a run, and released.

    At the end of a run nothing may be lost because of it: if it cannot be loaded, or memory is
    exhausted, all ranks skip these metrics together, with a warning.

    Args:
        module: after an evaluation, before its report.
    """
    evaluator, policy = module.evaluator, module.policy
    assert policy is not None
    if not evaluator.settings.text_quality:
        return
    if module.iteration == 0:
        evaluator.measure_initial_distance(_sampler_logprobs)
        return
    failure = ""
    try:
        initial = _find_initial_policy(module, policy)
        if initial is None:
            return
        with gathered(initial, policy):  # ranks have unequal numbers of batches
            evaluator.measure_initial_distance(partial(_logprobs_under, module, initial))
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        out_of_memory = is_out_of_memory(error) or isinstance(error, NotEnoughMemory)
        if isinstance(error, RuntimeError) and not out_of_memory:
            raise
        failure = "out of memory" if out_of_memory else str(error).splitlines()[0]
    initial = None
    if ends_run(module):  # it may have been loaded
        free_memory()
    # The report leaves out what a prompt lacks, so the other ranks need not know of a failure.
    if failures := list(filter(None, all_gather_object(failure))):
        rank_zero_warn(
            "initial_perplexity and initial_kl are not measured: the initial policy is not "
            f"available ({failures[0]})"
        )


def _find_initial_policy(module: EvaluatedModule, policy: Policy) -> Reference | None:
    reference = module.reference
    is_initial = module.reference_path is None and not module.moves_reference
    if reference is not None and is_initial:
        return reference
    if policy.has_adapter:
        return BaseModelReference(policy)
    # A model that was given as an object has no folder. On XLA devices a second model would need
    # new programs.
    if not module.pretrained or not ends_run(module) or backend(module.device).static_shapes:
        return None
    # A model that is loaded in a validation must not consist of inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        return load_reference(
            policy, None, module.pretrained, module.precision, sharding=make_sharding(module)
        ).to(module.device)


def _sampler_logprobs(rollout: Rollout) -> Tensor:
    return rollout.sampler_logprobs


def _logprobs_under(module: EvaluatedModule, reference: Reference, rollout: Rollout) -> Tensor:
    temperature = module.evaluator.sampling.policy_temperature
    return module.learner.logprobs_under(reference, rollout.tokens, temperature)
