"""Numbers of iterations, optimizer steps, evaluations and checkpoints of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace

from litgrpo.algorithms.losses import StepSurrogate
from litgrpo.arguments import import_by_path
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.served_reference import SERVER_SCHEMES
from litgrpo.training.run_setup import DEFAULT_EPOCHS, given_epochs
from litgrpo.training.settings_checks import can_reuse_sampler_logprobs
from litgrpo.training.update_config import UpdateConfig

DEFAULT_VAL_PROMPTS = 500
DEFAULT_ITERATIONS = 1000  # if the recipe sets no limit
LOCAL_ENGINES = ("LocalEngine", "StaticEngine")


@dataclass(frozen=True)
class Schedule:
    """Numbers of iterations, optimizer steps, evaluations and checkpoints of a run.

    Args:
        iterations: iterations of the run.
        open_ended: the recipe leaves their number to the data.
        epochs: passes over the data of an open-ended run.
        validate_every: iterations between evaluations; 0: no evaluations.
        val_prompts: prompts of one evaluation.
        val_completions: completions of each of them.
        save_every: iterations between checkpoints; 0: only the last.
        saves_optimizer: checkpoints contain the optimizer state.
        epochs_per_rollout: epochs over a rollout.
        steps: optimizer steps per iteration.
        scores_old: old log-probabilities are computed before the update.
        scores_reference: reference log-probabilities or hidden states are computed.
        selection_passes: forward passes over a rollout that select tokens (Clip-Cov, KL-Cov, M2PO,
            `top_entropy_quantile`).
        greedy: each training prompt gets a greedy completion as well (ReMax).
        on_policy_frac: fraction of iterations that sample; the others train on data.
        replays_graph: decoding replays a recorded or compiled program on every device.
        records_on_cuda: decoding replays a CUDA graph if the model has a fused decoder.
        is_sft: supervised training, without rollouts.

    Example:
        >>> schedule = Schedule(iterations=250, validate_every=125, save_every=50)
        >>> schedule.evaluations, schedule.saves
        (3, 5)
    """

    iterations: int = DEFAULT_ITERATIONS
    open_ended: bool = False
    epochs: int = DEFAULT_EPOCHS
    validate_every: int = 50
    val_prompts: int = DEFAULT_VAL_PROMPTS
    val_completions: int = 5
    save_every: int = 50
    saves_optimizer: bool = True
    epochs_per_rollout: int = 1
    steps: int = 1
    scores_old: bool = False
    scores_reference: bool = False
    selection_passes: int = 0
    greedy: bool = False
    on_policy_frac: float = 1.0
    replays_graph: bool = False
    records_on_cuda: bool = False
    is_sft: bool = False

    @property
    def evaluations(self) -> int:
        """Evaluations: one before training, one at each interval, one at the end."""
        if not self.validate_every:
            return 0
        return 1 + -(-self.iterations // self.validate_every)

    @property
    def sampled(self) -> int:
        """Iterations that sample their completions."""
        return round(self.iterations * self.on_policy_frac)

    @property
    def scorings(self) -> int:
        """Forward passes over a rollout outside of the update, in the whole run."""
        passes = self.scores_old + self.scores_reference + self.selection_passes
        return self.iterations * passes + self.iterations - self.sampled

    @property
    def saves(self) -> int:
        """Checkpoints: one at each interval and one at the end."""
        return -(-self.iterations // (self.save_every or self.iterations))


def has_advantages(model: Namespace, name: str) -> bool:
    """Return True if the advantages, or an estimator inside of them, are of this class."""
    values, names = [model.objective.advantages], []
    while values:
        value = values.pop()
        if isinstance(value, Namespace | dict):
            fields = vars(value) if isinstance(value, Namespace) else value
            names.append(str(fields.get("class_path")).rpartition(".")[2])
            values += fields.values()
    return name in names


def reuses_sampler_logprobs(model: Namespace, trainer_precision: object) -> bool:
    """Return True if the sampler's log-probabilities serve as those before the update."""
    engine = model.engine
    is_local = engine.class_path.rpartition(".")[2] in LOCAL_ENGINES
    dtype = engine.get("init_args", Namespace()).get("dtype")
    stale: dict[str, int] = {name: model["update"][name] for name in ("staleness", "max_staleness")}
    given = str(trainer_precision)
    return can_reuse_sampler_logprobs(
        "32-true" if given in ("None", "32") else given,
        model.precision,
        LocalEngine(dtype=dtype if is_local else "bfloat16"),  # servers are not exact either
        model.environment,
        UpdateConfig(**stale),
        model.stored_rollouts,
    )


def selects_tokens(model: Namespace) -> bool:
    """Return True if tokens are selected by a forward pass before each optimizer step."""
    surrogate: Any = import_by_path(model.objective.surrogate.class_path)
    return issubclass(surrogate, StepSurrogate) or model.objective.top_entropy_quantile < 1


def needs_reference(model: Namespace) -> bool:
    """Return True if the trainer computes log-probabilities under a reference, not servers."""
    given = model.reference
    served = isinstance(given, Namespace) or (given or "").startswith(SERVER_SCHEMES)
    return not served and bool(model.objective.kl_coef or model.objective.get("kl_in_reward"))


def read_schedule(settings: Namespace, is_grpo: bool) -> Schedule:
    """Read the schedule of a recipe.

    Args:
        settings: the command line of `fit`, parsed.
        is_grpo: the recipe trains with GRPO, not SFT.
    """
    model, trainer, data = settings.model.init_args, settings.trainer, settings.data.init_args
    iterations = settings.get("iterations") or model.max_iterations
    batches, interval = trainer.limit_val_batches, trainer.val_check_interval
    val_prompts = settings.get("val_prompts")
    if not val_prompts and isinstance(batches, int):
        val_prompts = batches * (data.get("eval_batch_size") or 1)
    common: dict[str, Any] = {
        "iterations": iterations or DEFAULT_ITERATIONS,
        "open_ended": not iterations,
        "epochs": given_epochs(trainer.max_epochs) or DEFAULT_EPOCHS,
        "validate_every": interval if isinstance(interval, int) and batches != 0 else 0,
        "val_prompts": val_prompts or DEFAULT_VAL_PROMPTS,
        "save_every": settings.checkpoint.every_n_iterations,
        "saves_optimizer": not settings.checkpoint.save_weights_only,
    }
    if not is_grpo:
        return Schedule(**common, is_sft=True)
    update, engine = model["update"], model.engine
    name = engine.class_path.rpartition(".")[2]
    return Schedule(
        **common,
        val_completions=model.evaluation.num_samples + model.evaluation.greedy,
        epochs_per_rollout=update.epochs_per_rollout,
        steps=update.epochs_per_rollout * update.num_mini_batches,
        scores_old=not reuses_sampler_logprobs(model, trainer.precision)
        or has_advantages(model, "OptimalTokenBaseline"),
        scores_reference=needs_reference(model),
        selection_passes=update.epochs_per_rollout * selects_tokens(model),
        greedy=has_advantages(model, "ReMax"),
        on_policy_frac=(model.get("data_completions") or {}).get("on_policy_frac", 1.0),
        replays_graph=name != "LocalEngine",
        records_on_cuda=name == "LocalEngine" and model.environment is None,
    )
