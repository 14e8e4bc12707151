"""Changes of a recipe that need less memory, in the order to try them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from litgrpo.models.loading.load import LoRA
from litgrpo.plan.sizes import RecipeSizes

DEVICE_COUNTS = (1, 4, 8, 16, 32, 64)
MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
ROW_LIMITS = (64, 16, 4)  # rows decoded at once; others queue


def suggest_changes(recipe: RecipeSizes, number: int) -> Iterator[tuple[str, RecipeSizes]]:
    """Yield words of the command line and the changed recipe, each in addition to those before.

    Changes that keep the gradient come first; LoRA, which changes what is trained, comes last.

    Args:
        recipe: the recipe.
        number: devices; one process that splits micro-batches needs a row for each of them.
    """
    if not recipe.checkpointing:
        recipe = replace(recipe, checkpointing=True)
        yield "--model.precision.gradient_checkpointing true", recipe
    least = number if recipe.single_process else 1
    option = "model.update.micro_batch_size" if recipe.work.rollouts else "model.micro_batch_size"
    for rows in MICRO_BATCHES:
        if least <= rows < recipe.work.micro_rows:
            recipe = replace(recipe, work=replace(recipe.work, micro_rows=rows))
            yield f"--{option} {rows}", recipe
    for rows in ROW_LIMITS if recipe.can_queue else ():
        recipe = replace(recipe, work=replace(recipe.work, max_rows=rows))
        yield f"--model.engine.max_rows {rows}", recipe
    if recipe.lora is None and recipe.work.rollouts:
        lora = LoRA()
        yield f"--model.lora.rank {lora.rank}", recipe.with_lora(lora)
