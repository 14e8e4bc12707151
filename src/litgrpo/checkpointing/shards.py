"""Checkpoints of weights that are divided over processes: a folder, of which each writes its part.

`rest.pt` holds everything but divided tensors, of which it has shape and dtype, and the manifest:
digests of its parts, and of every other file of the folder. These are written and read by
torch.distributed.checkpoint, so that any number of processes can go on, one too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from litgrpo.callbacks.run_folder import REST
from litgrpo.checkpointing.manifest import (
    MANIFEST,
    Damaged,
    check_finite,
    manifest_of,
    opened,
    rebuilt,
)

FILES = "files"  # of a manifest
CHUNK = 2**24  # bytes hashed at once


def remove(path: Path) -> None:
    """Remove a checkpoint, a folder in such a way that no half of it keeps the name."""
    if path.is_dir():
        shutil.rmtree(_renamed(path))
    else:
        path.unlink(missing_ok=True)


def _renamed(folder: Path) -> Path:
    """A folder under a name that says that nobody wants it."""
    unwanted = folder.with_name(f".{folder.name}.old.tmp")
    shutil.rmtree(unwanted, ignore_errors=True)
    return folder.rename(unwanted)


def whole_room(tensor: Tensor) -> Tensor:
    """Room for all of a tensor, of which shape and dtype are given."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested value, in the order of `rebuilt`, each with where it stands."""
    if isinstance(value, Tensor):
        yield path, value
    inner = value.items() if isinstance(value, Mapping) else ()
    listed = enumerate(value) if isinstance(value, list | tuple) else inner
    for key, each in listed:
        yield from tensors_of(each, f"{path}.{key}" if path else str(key))


# --- writing ---


def write_folder(checkpoint: dict[str, Any], path: Path, then: Callable[[Path], None]) -> list[int]:
    """Write a checkpoint as a folder, which gets its name when all of it is on the disk.

    Args:
        checkpoint: with tensors that are divided over processes; every process calls this.
        path: of the folder.
        then: what the first process does with the complete folder.

    Returns:
        Bytes of the folder, on the first process.

    Raises:
        OSError: on all processes, if the disk of one refused.
    """
    unfinished, first = path.with_name(f".{path.name}.tmp"), dist.get_rank() == 0
    divided = {name: each for name, each in tensors_of(checkpoint) if isinstance(each, DTensor)}
    _together(lambda: _emptied(unfinished) if first else None)
    try:
        dcp.save(divided, storage_writer=dcp.FileSystemWriter(unfinished))
    except CheckpointException as error:  # the same on all processes
        raise _reason(error) from error
    mine = sorted(unfinished.glob(f"__{dist.get_rank()}_*"))
    digests = _together(lambda: {each.name: sha256_of(each) for each in mine})

    def complete() -> None:
        metadata = unfinished / ".metadata"
        files = {metadata.name: sha256_of(metadata)}
        for each in digests:
            files |= each
        rest = rebuilt(checkpoint, _outline)
        _write_rest({**rest, MANIFEST: manifest_of(rest, **{FILES: files})}, unfinished / REST)
        before = _renamed(path) if path.is_dir() else path.with_name(f".{path.name}.old.tmp")
        unfinished.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(before, ignore_errors=True)
        then(path)

    _together(lambda: complete() if first else None)
    return [sum(each.stat().st_size for each in path.iterdir())] if first else []


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _outline(tensor: Tensor) -> Tensor:
    """Shape and dtype of a divided tensor; others as they are, in the host's memory."""
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().cpu()


def _write_rest(content: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a new name survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: CheckpointException) -> OSError:
    """What the disk said to the first process that failed."""
    failed = [each[0] for each in error.failures.values()]
    said = [each for each in failed if isinstance(each, OSError)]
    return said[0] if said else OSError(str(failed[0]).partition("\n")[0])


def _together(function: Callable[[], Any]) -> list[Any]:
    """What a function returns on each process; if it fails on one, it fails on all.

    Raises:
        OSError: of the first process that failed.
        Damaged: likewise.
    """
    result: tuple[Any, Exception | None]
    try:
        result = function(), None
    except (OSError, Damaged) as error:
        result = None, error
    results = [result]
    if dist.is_initialized():
        results = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(results, result)
    errors = [error for _, error in results if error is not None]
    if errors:
        raise errors[0]
    return [each for each, _ in results]


# --- reading ---


def read_any(
    path: Path,
    needs: tuple[str, ...] = (),
    fits: Callable[[dict[str, Any]], None] = lambda _: None,
    shards_for: Callable[[Tensor], Tensor] = whole_room,
) -> dict[str, Any]:
    """A checkpoint, file or folder, that holds what its manifest says, without the manifest.

    Args:
        path: of the file, or of the folder, which every process reads.
        needs: parts that must be there.
        fits: raises a ValueError for the checkpoint of another run, before shards are read: of
            these it sees shape and dtype.
        shards_for: where this process wants its share of a divided tensor.

    Raises:
        Damaged: it does not, on all processes; the message names the part or the file.
    """
    folder = path.is_dir()
    checkpoint = opened(path / REST if folder else path, needs)
    manifest = checkpoint.pop(MANIFEST)
    if folder:
        _together(lambda: _verify_files(path, manifest[FILES]))
    fits(checkpoint)
    return _filled(checkpoint, path, shards_for) if folder else checkpoint


def _verify_files(folder: Path, digests: dict[str, str]) -> None:
    """Compare files with the manifest; processes share the work."""
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name in sorted(digests)[rank::processes]:
        file = folder / name
        if not file.is_file():
            raise Damaged(f"{folder}: {name} is missing")
        if sha256_of(file) != digests[name]:
            raise Damaged(f"{folder}: {name} is damaged (its sha256 is not the manifest's)")


def _filled(
    checkpoint: dict[str, Any], folder: Path, shards_for: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """The checkpoint with this process's shards in place of shapes."""
    room = {name: shards_for(each) for name, each in tensors_of(checkpoint) if each.is_meta}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*load in a single process")  # it is meant to
            reader = dcp.FileSystemReader(folder)
            dcp.load(room, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        said = str(_reason(error)).partition("\n")[0]
        raise Damaged(f"{folder} cannot be read: it is no whole checkpoint ({said:.90})") from error
    places = iter(tensors_of(checkpoint))

    def fill(_: Tensor) -> Tensor:
        name, tensor = next(places)
        return room.get(name, tensor)

    found = rebuilt(checkpoint, fill)
    weights = {
        name: each.to_local() if isinstance(each, DTensor) else each
        for name, each in found.get("state_dict", {}).items()
    }
    _together(lambda: check_finite(weights, folder))
    return dict(found)


def sha256_of(file: Path) -> str:
    """Of a file, a part at a time."""
    content = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(CHUNK):
            content.update(part)
    return content.hexdigest()
