"""How often everything of a run happens: iterations, passes, evaluations, saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jsonargparse import Namespace

HELD_OUT = 500  # prompts, where nobody says how many
# Where the recipe sets no end: what is planned for.
ITERATIONS = 1000


@dataclass(frozen=True)
class Schedule:
    """How often everything of a run happens.

    Args:
        iterations: of the run.
        open_end: whether the recipe leaves their number to the data.
        validate_every: iterations between evaluations; 0: none at all.
        held_out: prompts of one evaluation.
        answers: completions of each of them.
        save_every: iterations between checkpoints; 0: the last only.
        whole_checkpoints: whether they hold moments, too.
        epochs_per_rollout: passes over a rollout.
        steps: optimizer steps of an iteration.
        scores_old: whether log-probabilities before the update are computed.
        scores_reference: whether those of a reference are.
        recorded: whether decoding replays what was recorded or compiled.
        supervised: pairs are learned and nothing is sampled.
    """

    iterations: int = ITERATIONS
    open_end: bool = False
    validate_every: int = 50
    held_out: int = HELD_OUT
    answers: int = 5
    save_every: int = 50
    whole_checkpoints: bool = True
    epochs_per_rollout: int = 1
    steps: int = 1
    scores_old: bool = False
    scores_reference: bool = False
    recorded: bool = False
    supervised: bool = False

    @property
    def evaluations(self) -> int:
        """One before training, one at each interval, one at the end."""
        every = self.validate_every
        return 1 + -(-self.iterations // every) if every else 0

    @property
    def saves(self) -> int:
        """One at each interval and one at the end."""
        return -(-self.iterations // (self.save_every or self.iterations))


def schedule_of(settings: Namespace, samples: bool) -> Schedule:
    """What a recipe says of it.

    Args:
        settings: the command line of `fit`, parsed.
        samples: whether it is GRPO.
    """
    model, trainer, data = settings.model.init_args, settings.trainer, settings.data.init_args
    given = (model.max_iterations, settings.get("iterations"))
    ends = [each for each in given if each]
    batches = trainer.limit_val_batches
    counted = isinstance(batches, int) and batches * (data.get("eval_batch_size") or 1)
    interval = trainer.val_check_interval
    common: dict[str, Any] = {
        "iterations": ends[-1] if ends else ITERATIONS,
        "open_end": not ends,
        "validate_every": interval if isinstance(interval, int) and batches != 0 else 0,
        "held_out": settings.get("val_prompts") or counted or HELD_OUT,
        "save_every": settings.checkpoint.every_n_iterations,
        "whole_checkpoints": not settings.checkpoint.save_weights_only,
    }
    return Schedule(**common, **(_of_grpo(model) if samples else {"supervised": True}))


def _of_grpo(model: Namespace) -> dict[str, Any]:
    update, engine = model["update"], model.engine
    steps = update.epochs_per_rollout * update.num_mini_batches
    given = engine.get("init_args", Namespace())
    name = engine.class_path.rpartition(".")[2]
    elsewhere = name not in ("LocalEngine", "StaticEngine")
    inexact = elsewhere or bool(given.get("dtype")) or bool(update.staleness)
    return {
        "answers": model.evaluation.samples + model.evaluation.greedy,
        "epochs_per_rollout": update.epochs_per_rollout,
        "steps": steps,
        # One exact step needs none; several take the sampler's own where these are exact.
        "scores_old": inexact,
        "scores_reference": bool(model.objective.kl_coef),
        "recorded": name != "LocalEngine",
    }
