"""Samples of the initial policy, which probes of open text and of episodes are compared with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from litgrpo.arguments import require
from litgrpo.audit.cases import Problem
from litgrpo.audit.episodes import audit_episodes
from litgrpo.audit.open_text import audit_open_text
from litgrpo.audit.report import AuditReport
from litgrpo.audit.score import evenly
from litgrpo.cli.console import keep_quiet
from litgrpo.cli.parser import build_data
from litgrpo.data.modules import PromptData
from litgrpo.data.prompts import PromptSet
from litgrpo.data.sources import read_rows
from litgrpo.environments.agent import Agent
from litgrpo.environments.base import EpisodeStart
from litgrpo.environments.workers import EpisodeWorkers
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards import Scorer
from litgrpo.rollout.episodes import RolloutKey, episode_seed
from litgrpo.rollout.rollouter import Rollouter
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import Rollout

MOST_ROWS, SAMPLES = 32, 4
WORKERS = 8
# Settings that change the episodes of the initial policy; the others concern the update.
SAMPLING_SETTINGS = (
    *("pretrained", "rewards", "max_completion_length", "sampling", "precision", "lora"),
    *("scoring", "environment", "episode", "seed"),
)


def instantiate_data(recipe: Mapping[str, Any]) -> PromptData:
    """Build the data of a recipe.

    Raises:
        ValueError: the recipe has data of another class.
    """
    data = build_data(recipe["data"])
    if not isinstance(data, PromptData):
        raise ValueError(f"audit requires data of class PromptData, got {type(data).__name__}")
    return data


def named_policy(settings: Mapping[str, Any]) -> str:
    """Return the name of the initial policy."""
    name = settings.get("pretrained")
    require(bool(name), "audit samples the initial policy: set model.pretrained")
    return str(name)


# --- open text ---


def audit_open(recipe: Mapping[str, Any], scorer: Scorer, limit: int) -> AuditReport:
    """Try exploits on rewards of open text, and compare them with samples."""
    from litgrpo.models.loading.load import load_policy, load_tokenizer

    settings, data = recipe["model"]["init_args"], instantiate_data(recipe)
    name = named_policy(settings)
    tokenizer = load_tokenizer(name)
    rows = data.reader.read(data.sources["train"] or [], data.prompt_format.template.required)
    prompts = PromptSet(
        rows.select(evenly(range(len(rows)), min(limit or MOST_ROWS, MOST_ROWS))),
        "audit",
        prompt_format=data.prompt_format,
        limit=data.limit,
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )
    rollouter = Rollouter(
        load_policy(name, tokenizer=tokenizer),
        SAMPLES,
        int(settings.get("max_completion_length", 256)),
        sampling=Sampling(**(settings.get("sampling") or {})),
    )
    print(f"sampling {SAMPLES} completions of {len(prompts)} prompts by {name}")
    rollout = rollouter.generate(prompts[list(range(len(prompts)))], "predict")
    texts = rollout.completions
    samples = [texts[start : start + SAMPLES] for start in range(0, len(texts), SAMPLES)]
    problems = [
        Problem(text, None, {name: values[n] for name, values in prompts.columns.items()})
        for n, text in enumerate(prompts.texts)
    ]
    return audit_open_text(scorer, problems, samples)


# --- episodes ---


class RolloutRecorder(Callback):
    """Keep the rollouts of a validation and their rewards."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any, **__: Any
    ) -> None:
        self.outputs.append(outputs)


def audit_environment(
    recipe: Mapping[str, Any], scorer: Scorer, reference_source: str | None, limit: int
) -> AuditReport:
    """Sample episodes of the initial policy, and play the same rows with scripted policies.

    Args:
        recipe: settings of model and data.
        scorer: its rewards.
        reference_source: rows to use instead of the training data.
        limit: maximum number of rows; 0 or more than 32: 32.
    """
    settings = dict(recipe["model"]["init_args"])
    name = named_policy(settings)
    data = build_rows(recipe, reference_source, limit)
    module = build_module({key: settings[key] for key in SAMPLING_SETTINGS if key in settings})
    require(
        not isinstance(module.environment, Agent),
        "audit plays an environment with scripted turns; an Agent cannot be played that way. Test "
        "it with a server that returns fixed replies.",
    )
    rollout, rewards = sample_episodes(module, data, name)
    starts = episode_starts(rollout, data, module.seed)
    episode = module.episode
    pool = EpisodeWorkers(
        module.environment,
        num_workers=min(WORKERS, episode.num_workers or WORKERS),
        timeout_s=episode.timeout_s,
        max_observation_chars=episode.max_observation_chars,
    )
    size = rollout.group_size
    turn_texts = [episode.assistant_texts for episode in rollout.episodes]
    groups = [turn_texts[first : first + size] for first in range(0, len(turn_texts), size)]
    with closing(pool):
        turns, environment = episode.max_turns, module.environment
        return audit_episodes(pool, environment, scorer, starts, rewards, groups, max_turns=turns)


def build_rows(recipe: Mapping[str, Any], reference_source: str | None, limit: int) -> PromptData:
    """Build the recipe's data with a few training rows as the validation set."""
    data = instantiate_data(recipe)
    source: Any = data.sources["train"] if reference_source is None else reference_source
    require(source is not None, "the recipe has no training data; give rows: --problems rows.jsonl")
    few = evenly(read_rows(source), min(limit or MOST_ROWS, MOST_ROWS))
    rows = [row.values for row in few]
    data.sources = dict.fromkeys(data.sources)
    data.sources["val"] = rows
    data.eval_batch_size = len(rows)
    return data


def build_module(settings: Mapping[str, Any]) -> GRPO:
    """Build a GRPO that samples a few episodes of each row in its validation."""
    # The environment may be any object and is passed on as parsed settings, so the parser must not
    # see it; options that are not set keep the defaults of GRPO.
    parser = ArgumentParser(exit_on_error=False)
    parameters = {*inspect.signature(GRPO).parameters}
    parsed = {name: value for name, value in settings.items() if name != "environment"}
    skipped = parameters - parsed.keys()
    parser.add_class_arguments(GRPO, "model", skip=skipped, instantiate=False)
    arguments = parser.instantiate(parser.parse_object({"model": parsed})).model
    evaluation = Evaluation(num_samples=SAMPLES, greedy=False, text_quality=False)
    return GRPO(**arguments.as_dict(), environment=settings["environment"], evaluation=evaluation)


def sample_episodes(module: GRPO, data: PromptData, name: str) -> tuple[Rollout, Tensor]:
    """Return episodes of the initial policy and their total rewards [B, k]; NaN if failed."""
    print(f"playing {SAMPLES} episodes of {data.eval_batch_size} rows by {name}")
    keep_quiet()
    recorder = RolloutRecorder()
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options: dict[str, Any] = {**quiet, "num_sanity_val_steps": 0}
    trainer = Trainer(callbacks=[recorder], devices=1, **options)
    trainer.validate(module, data, verbose=False)
    (outputs,) = recorder.outputs
    table = outputs["rewards"]
    return outputs["rollout"], table.total.masked_fill(~table.valid, torch.nan)


def episode_starts(rollout: Rollout, data: PromptData, seed: int) -> list[EpisodeStart]:
    """Return starts of the same episodes as a rollout's, with the prompts before `reset`."""
    prompts, texts = rollout.prompts, data.sets["val"].texts
    key = RolloutKey(seed, "val", 0, 0)
    numbers = {index: position for position, index in enumerate(data.sets["val"].index)}
    return [
        EpisodeStart(
            {name: values[row] for name, values in prompts.columns.items()}
            | {"prompt": texts[numbers[index]]},
            seed=episode_seed(key, index),
            key=(0, 0, index, 0),
        )
        for row, index in enumerate(prompts.index.tolist())
    ]
