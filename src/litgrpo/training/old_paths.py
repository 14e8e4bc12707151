"""Import paths of the previous version, for this version only."""

from __future__ import annotations

from collections.abc import Mapping

# Import paths, whole or as far as they changed, and short names of classes; the longest row counts.
# Old paths of reward functions are known to `rewards.lookup`, which Python callers use, too.
PATHS = {
    "EagerEngine": "LocalEngine",
    "ProcessGuard": "ProcessRunner",
    "InProcessGuard": "InProcessRunner",
    "litgrpo.training.grpo.GRPO": "litgrpo.GRPO",
    "litgrpo.training.sft.SFT": "litgrpo.SFT",
    "litgrpo.training.settings.Learning": "litgrpo.training.update_config.UpdateConfig",
    "litgrpo.training.settings.Evaluation": "litgrpo.evaluation.settings.Evaluation",
    "litgrpo.training.controllers": "litgrpo.training.controllers",
    "litgrpo.data.prompts.PromptData": "litgrpo.PromptData",
    "litgrpo.data.pairs.PairData": "litgrpo.PairData",
    "litgrpo.objectives": "litgrpo.algorithms",
    **{
        f"litgrpo.{room}.loss_aggregation.{name}": f"litgrpo.algorithms.losses.{name}"
        for room in ("objectives", "algorithm")
        for name in ("SequenceMean", "TokenMean")
    },
    **{
        f"litgrpo.{room}.advantages.{name}": f"litgrpo.algorithms.estimators.{name}"
        for room in ("objectives", "algorithm")
        for name in ("DecoupledNormalized", "TopShare")
    },
    **{
        f"litgrpo.algorithms.losses.{name}": f"litgrpo.algorithms.loss_aggregation.{name}"
        for name in ("Constant", "MicroBatchTokenMean")
    },
    "litgrpo.objectives.surrogates.Clipped": "litgrpo.algorithms.losses.Clipped",
    "litgrpo.algorithms.surrogates.Clipped": "litgrpo.algorithms.losses.Clipped",
    "litgrpo.policies": "litgrpo.models",
    "litgrpo.rollout.eager_engine.EagerEngine": "litgrpo.rollout.engines.local.LocalEngine",
    "litgrpo.rollout.static_engine": "litgrpo.rollout.engines.static",
    "litgrpo.rollout.engine": "litgrpo.rollout.engines.base",
    "litgrpo.rollout.engines.interface": "litgrpo.rollout.engines.base",
    "litgrpo.rollout.environment": "litgrpo.rollout.engines.base",
    "litgrpo.strategies.xla": "litgrpo.xla.strategy",
    "litgrpo.rewards.composite.Composite": "litgrpo.rewards.Scorer",
    "litgrpo.rewards.composite.Reward": "litgrpo.rewards.Reward",
    "litgrpo.rewards.Composite": "litgrpo.rewards.Scorer",
    "litgrpo.rewards.guard.Guard": "litgrpo.rewards.RewardRunner",
    "litgrpo.rewards.guard.InProcessGuard": "litgrpo.rewards.InProcessRunner",
    "litgrpo.rewards.guard.RewardFailure": "litgrpo.rewards.RewardFailure",
    "litgrpo.rewards.process_guard.ProcessGuard": "litgrpo.rewards.ProcessRunner",
    "litgrpo.rewards.Guard": "litgrpo.rewards.RewardRunner",
    "litgrpo.rewards.InProcessGuard": "litgrpo.rewards.InProcessRunner",
    "litgrpo.rewards.ProcessGuard": "litgrpo.rewards.ProcessRunner",
    "litgrpo.rewards.calls": "litgrpo.rewards.runner.calls",
    "litgrpo.callbacks.checkpoint": "litgrpo.checkpointing.callback",
    "litgrpo.callbacks.checkpoint_io": "litgrpo.checkpointing.io",
    "litgrpo.callbacks.journal": "litgrpo.checkpointing.logger_state",
    "litgrpo.callbacks.exact_resume": "litgrpo.checkpointing.rng_state",
}


def current_path(path: str) -> str:
    """An import path or the short name of a class, as it is now.

    Example:
        >>> current_path("litgrpo.objectives.kl.k1")
        'litgrpo.algorithms.kl.k1'
    """
    row = longest_row(path, PATHS)
    return PATHS[row] + path.removeprefix(row) if row else path


def longest_row(name: str, rows: Mapping[str, str]) -> str:
    """The longest row that is the dotted name or begins it; nothing if there is none."""
    parts = name.split(".")
    heads = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((head for head in heads if head in rows), "")
