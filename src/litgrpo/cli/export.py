"""`export`: from a checkpoint to a folder that plain transformers loads."""

from __future__ import annotations

from pathlib import Path

from litgrpo.arguments import require
from litgrpo.callbacks.run_folder import resolve_checkpoint
from litgrpo.cli.console import keep_quiet
from litgrpo.cli.lightning_cli import load_module
from litgrpo.models.export import export as write
from litgrpo.models.export import export_adapter as write_adapter
from litgrpo.models.loading import Dtype

ADVICE = "give a .ckpt file, or a run folder with a checkpoint in it"


def export(
    checkpoint: str,
    folder: str,
    dtype: Dtype | None = None,
    force: bool = False,
    adapter: bool = False,
) -> None:
    """Write the policy of a checkpoint as a folder that plain transformers loads.

    Args:
        checkpoint: a .ckpt file, or a run folder, of which the last checkpoint is taken.
        folder: where to write config, weights and tokenizer.
        dtype: of the weights; that of the training when not given.
        force: write into a folder that exists; files of the same names are replaced.
        adapter: write the adapter alone, in PEFT's format, instead of the merged weights.
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
    policy = load_module(path).policy
    try:
        write_adapter(policy, target) if adapter else write(policy, target, dtype)
    except OSError as error:
        raise ValueError(f"{target} is not complete: {error}. Remove it, and try again.") from error
    print(f"{path} is now {target}, in {'PEFT' if adapter else 'Hugging Face'} format")


def _cannot_be_written(folder: Path) -> str:
    """Why not, before a model is loaded for it; nothing where it can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".litgrpo.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
