"""`export`: from a checkpoint to a folder that plain transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import instantiate_module

from litgrpo.arguments import require
from litgrpo.checkpointing.shards import read_checkpoint
from litgrpo.cli.console import keep_quiet
from litgrpo.cli.recipes import recipe_file
from litgrpo.models.loading.export import export as write
from litgrpo.models.loading.export import export_adapter as write_adapter
from litgrpo.models.loading.load import Dtype
from litgrpo.modules.hyper_parameters import load_trained_policy
from litgrpo.run_folder import resolve_checkpoint

ADVICE = "give a .ckpt file, or a run folder with a checkpoint in it"


def export(
    checkpoint: str,
    folder: str,
    dtype: Dtype | None = None,
    force: bool = False,
    adapter: bool = False,
    recipe: str | None = None,
) -> None:
    """Write the policy of a checkpoint as a folder that plain transformers loads.

    Args:
        checkpoint: a .ckpt file, or a run folder, of which the last checkpoint is taken.
        folder: where to write config, weights and tokenizer.
        dtype: of the weights; that of the training when not given.
        force: write into a folder that exists; files of the same names are replaced.
        adapter: write the adapter alone, in PEFT's format, instead of the merged weights.
        recipe: construct the module of this recipe, such as RUN/config.yaml, which may run code;
            needed only for a class of module that is not part of litgrpo.
    """
    require(
        not (adapter and dtype),
        f"An adapter keeps the dtype of its training: leave --dtype {dtype} out, or export the "
        "merged weights (without --adapter).",
    )
    path, target = resolve_checkpoint(checkpoint, advice=ADVICE), Path(folder)
    require(
        force or not target.exists(),
        f"{target} exists: choose another folder, or let files of the same names be replaced with "
        "--force true.",
    )
    unwritable = _cannot_be_written(target)
    require(not unwritable, f"{target} cannot be written ({unwritable}): choose another folder.")
    keep_quiet()
    policy = load_trained_policy(path) if recipe is None else _load_module(path, recipe).policy
    try:
        write_adapter(policy, target) if adapter else write(policy, target, dtype)
    except OSError as error:
        raise ValueError(f"{target} is not complete: {error}. Remove it, and try again.") from error
    print(f"{path} is now {target}, in {'PEFT' if adapter else 'Hugging Face'} format")


def _cannot_be_written(folder: Path) -> str:
    """Why not, before a model is loaded for it; nothing where it can be."""
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".litgrpo.tmp"
        probe.touch()
        probe.unlink()
        if is_new:
            folder.rmdir()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _load_module(path: Path, recipe: str) -> Any:
    """Construct the module of a recipe, with the weights of a checkpoint."""
    content = yaml.safe_load(recipe_file(recipe).read_text(encoding="utf-8"))
    node: dict[str, Any] = (content if isinstance(content, dict) else {}).get("model") or {}
    require(
        "class_path" in node,
        f"--recipe {recipe} has no model.class_path: give the recipe of the run, such as "
        "RUN/config.yaml.",
    )
    module = instantiate_module(
        LightningModule, {"_class_path": node["class_path"], **(node.get("init_args") or {})}
    )
    checkpoint = read_checkpoint(path)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    return module
