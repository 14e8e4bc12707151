"""What a recipe's own data say, where they are at hand: lengths of rows and of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import instantiate_module

from litgrpo.arguments import import_by_path, require
from litgrpo.data.pairs import PairSet
from litgrpo.data.prompts import PromptSet
from litgrpo.tools.plan.training import Training, row_length
from litgrpo.training.defaults import PASSES


def sets_of(settings: Namespace) -> dict[str, Any]:
    """{train, val: tokenized rows} of a recipe.

    Args:
        settings: the command line of `fit`, parsed.

    Raises:
        ValueError: the data or the model's tokenizer are not here.
    """
    node, given = settings.model, settings.data
    module = instantiate_module(
        LightningModule, {"_class_path": node.class_path, **node.init_args.as_dict()}
    )
    data = import_by_path(given.class_path)(**given.init_args.as_dict())
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    data.trainer = module.trainer = trainer
    data.setup("fit")
    found: dict[str, Any] = data.sets
    return found


def told_by(sets: dict[str, Any], training: Training) -> Training:
    """A recipe with what its data say.

    Args:
        sets: see `sets_of`.
        training: what the recipe says.
    """
    train, work, plan = sets["train"], training.work, training.schedule
    lengths = row_lengths(train)
    longest = min(max(lengths), work.prompt_len)
    held_out = len(sets.get("val", ())) or plan.held_out
    if plan.supervised:
        work = replace(work, prompt_len=longest, completion_len=longest, length=longest)
        each = work.micro_rows
    else:
        rows = row_length(longest, work.completion_len, work.sharing)
        # As many tokens go through the model at once as before: more rows where they are shorter.
        micro = min(work.step_rows, work.micro_rows * work.length // rows)
        work = replace(work, prompt_len=longest, length=rows, micro_rows=micro)
        each = work.rollouts[0][0]
    iterations = PASSES * len(lengths) // each if plan.open_end else plan.iterations
    schedule = replace(plan, held_out=held_out, iterations=iterations, open_end=False)
    return training.changed(work=work, schedule=schedule)


def row_lengths(rows: Any) -> list[int]:
    """Tokens of each row.

    Raises:
        ValueError: they stay on disk.
    """
    require(
        isinstance(rows, PromptSet | PairSet),
        "the training rows stay on disk (streaming: true), and nobody knows their lengths: give "
        "--read_data false",
    )
    return [len(ids) for ids in rows.ids]
