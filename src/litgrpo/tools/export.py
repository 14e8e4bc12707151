"""`export`: from a checkpoint to a folder that plain transformers loads."""

from __future__ import annotations

from litgrpo.callbacks.run_folder import checkpoint_file
from litgrpo.cli.trainer_cli import load_module
from litgrpo.models.loading import export as write


def export(checkpoint: str, folder: str) -> None:
    """Write the policy of a checkpoint as a folder that plain transformers loads.

    Args:
        checkpoint: a .ckpt file, or a run folder, of which the last checkpoint is taken.
        folder: where to write config, weights and tokenizer.
    """
    path = checkpoint_file(checkpoint)
    write(load_module(path).policy, folder)
    print(f"{path} is now {folder}, in Hugging Face format")
