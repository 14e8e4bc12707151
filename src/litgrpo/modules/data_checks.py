"""Checks of the data of a run against its model, batch, rewards and reference, before a fit."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning import LightningModule

from litgrpo.algorithms.objective import Objective
from litgrpo.arguments import did_you_mean
from litgrpo.data.modules import SourceData
from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet
from litgrpo.models.limits import check_lengths, check_tokens
from litgrpo.models.policy import Policy
from litgrpo.rewards.scorer import Scorer
from litgrpo.rollout.servers.reference import ServedReference
from litgrpo.types import TASK

# Of a rollout's token: its id (8 bytes), random number, log-probability and masks.
BYTES_PER_TOKEN = 18


def check_batch(module: LightningModule, group_size: int, completion: int, steps: int) -> None:
    """Check that a rollout fits this machine, and that each optimizer step gets a group.

    Args:
        module: attached to its trainer.
        group_size: G.
        completion: C, the limit on the tokens of a completion.
        steps: optimizer steps of a pass over the rollout.

    Raises:
        ValueError: it does not.
    """
    trainer: Any = module.trainer
    prompts = getattr(trainer.datamodule, "batch_size", None)
    if not isinstance(prompts, int):  # a loader or data of the user's own
        return
    prompts = max(1, prompts // trainer.world_size)
    if steps > prompts:
        raise ValueError(
            f"model.update.num_mini_batches is {steps}, but a batch has {prompts} groups per "
            "process (data.batch_size), and a mini-batch takes whole groups. Set num_mini_batches "
            f"to at most {prompts}, or raise data.batch_size."
        )
    needed = prompts * group_size * completion * BYTES_PER_TOKEN
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > total:
        raise ValueError(
            f"A rollout of {prompts} prompts (data.batch_size) x {group_size} completions "
            f"(model.group_size) x {completion:,} tokens (model.max_completion_length) needs at "
            f"least {needed / 2**30:,.0f} GiB, but this machine has {total / 2**30:,.0f} GiB. "
            "Lower one of them."
        )


def check_tasks(
    trained: Collection[str], sets: Sequence[Mapping[str, Sequence[Any]]], scorer: Scorer
) -> None:
    """Check that the tasks that rewards name are tasks of the data.

    Args:
        trained: tasks of the training prompts; empty if they are not known.
        sets: {column: values} of the sets of prompts.
        scorer: has the rewards.

    Raises:
        ValueError: a reward names another task.
    """
    tasks_of_data = {*trained, *(str(task) for columns in sets for task in columns.get(TASK, []))}
    for name, reward in scorer.components.items():
        for task in reward.tasks if trained else ():
            if task not in tasks_of_data:
                raise ValueError(
                    f"model.rewards.{name}.tasks has {task!r}, but no prompt is of that task"
                    f"{did_you_mean(task, tasks_of_data)}. The tasks of the data are "
                    f"{', '.join(sorted(tasks_of_data))}."
                )


def check_reference_prompts(
    module: LightningModule, objective: Objective, environment: object | None
) -> None:
    """Check that a reference reads the prompts that the data have for it.

    Raises:
        ValueError: there is no KL term, or an environment adds to the policy's prompts.
    """
    trainer: Any = module.trainer
    data = trainer.datamodule
    if not isinstance(data, SourceData) or data.prompt_format.reference is None:
        return
    if not objective.needs_reference:
        raise ValueError(
            "data.reference_template is set, but there is no KL term that compares with a "
            "reference. Set model.objective.kl_coef, or leave out reference_template."
        )
    if environment is not None:
        raise ValueError(
            "data.reference_template replaces the prompts, but model.environment adds its first "
            "observation to them. Leave out one of the two."
        )


def check_served_reference(module: LightningModule, reference: object, completion: int) -> None:
    """Check before a fit that servers can compute the reference of the data's rows.

    Args:
        module: attached to its trainer.
        reference: of the KL term; only a `ServedReference` is checked.
        completion: limit on the tokens of a completion.

    Raises:
        RuntimeError: no server responds, or one has another tokenizer or a shorter context.
    """
    trainer: Any = module.trainer
    if not isinstance(reference, ServedReference) or trainer.state.fn != "fit":
        return
    longest, data = 0, trainer.datamodule
    if isinstance(data, SourceData) and isinstance(data.sets["train"], PromptSet):
        rows = data.sets["train"]
        longest = max(rows.max_tokens, rows.max_reference_tokens) + completion
    reference.check(longest)


def check_data_fits_model(
    module: LightningModule, policy: Policy, completion: int, key: str
) -> None:
    """Check tokens and lengths of the data against the model's embeddings and positions.

    Loaders that were passed to the trainer without a data module are not checked.

    Args:
        module: attached to its trainer.
        policy: reads the data.
        completion: limit on the tokens of a completion; 0 if the data contain the completions.
        key: option that limits the length of a row.

    Raises:
        ValueError: the model has no embedding of a token or of a position.
    """
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, SourceData):
        return
    kinds = (PromptSet, PairSet)
    sets = {name: rows for name, rows in data.sets.items() if isinstance(rows, kinds)}
    check_tokens(policy, {name: rows.ids for name, rows in sets.items()})
    longest = {name: rows.max_tokens for name, rows in sets.items()}
    check_lengths(policy, longest, completion, key)
