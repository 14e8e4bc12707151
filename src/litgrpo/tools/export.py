"""`export`: from a checkpoint to a folder that plain transformers loads."""

from __future__ import annotations

from litgrpo.callbacks.run_folder import checkpoint_file
from litgrpo.cli.trainer_cli import load_module
from litgrpo.models.loading import export as write
from litgrpo.models.loading import export_adapter as write_adapter


def export(checkpoint: str, folder: str, adapter: bool = False) -> None:
    """Write the policy of a checkpoint as a folder that plain transformers loads.

    Args:
        checkpoint: a .ckpt file, or a run folder, of which the last checkpoint is taken.
        folder: where to write config, weights and tokenizer.
        adapter: write the adapter alone, in PEFT's format, instead of the merged weights.
    """
    path = checkpoint_file(checkpoint)
    policy = load_module(path).policy
    write_adapter(policy, folder) if adapter else write(policy, folder)
    form = "PEFT's" if adapter else "Hugging Face"
    print(f"{path} is now {folder}, in {form} format")
