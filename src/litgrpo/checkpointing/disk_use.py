"""How much of the disk a run's checkpoints take, before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from litgrpo.arguments import require

# Numbers that an optimizer keeps for each weight; of those not named here, two.
MOMENTS = {"SGD": 1, "Muon": 1, "Lion": 1, "Adagrad": 1, "RMSprop": 1, "Adafactor": 0}


def checkpoint_bytes(trainer: Any, pl_module: Any, *, weights_only: bool) -> int:
    """About how large a checkpoint is: the weights that it holds, and the optimizer's moments.

    Args:
        trainer: with its optimizers.
        pl_module: says by its `on_save_checkpoint` which weights it keeps.
        weights_only: whether moments are left out.
    """
    checkpoint: dict[str, Any] = {"state_dict": pl_module.state_dict()}
    pl_module.on_save_checkpoint(checkpoint)
    # Tied weights are in a file once.
    once = {id_of(weight): weight.nbytes for weight in checkpoint["state_dict"].values()}
    moments = 0
    for optimizer in [] if weights_only else trainer.optimizers:
        trained = [weight for group in optimizer.param_groups for weight in group["params"]]
        kept = MOMENTS.get(type(optimizer).__name__, 2)
        moments += kept * sum(weight.nbytes for weight in trained)
    return sum(once.values()) + moments


def id_of(weight: Tensor) -> int:
    """Equal for names of one weight; the shard of a divided one has an address, it has none."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).data_ptr()


def bytes_of(checkpoint: Path) -> int:
    """Size of a checkpoint, file or folder."""
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files)


def say_disk_use(folder: Path, size: int, kept: int) -> None:
    """Say what the checkpoints will take and what is free.

    Args:
        folder: where they go.
        size: bytes of one.
        kept: how many there are at most, with the one that is being written.

    Raises:
        ValueError: not even one fits.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    taken = sum(map(bytes_of, folder.glob("iteration=*.ckpt")))
    said = f"a checkpoint takes about {readable(size)}, up to {kept} are there at once"
    require(
        free >= size,
        f"{folder}: {said}, but {readable(free)} are free. Make room, choose another disk with "
        "--run_dir, or keep the weights alone with --checkpoint.save weights.",
    )
    say = rank_zero_info if free + taken >= size * kept else rank_zero_warn
    say(f"Disk: {said}; {readable(free)} are free ({folder})")


def readable(size: int) -> str:
    """Bytes as people read them.

    Example:
        >>> readable(3 * 2**19), readable(5 * 2**30)
        ('1.5 MiB', '5.0 GiB')
    """
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.1f} {name}"
