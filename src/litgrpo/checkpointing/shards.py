"""Checkpoints of sharded weights: a folder to which every rank writes its shards.

`rest.pt` holds everything except the sharded tensors, of which it has shape and dtype, and the
SHA-256 of every other file of the folder. The others are safetensors, written and read by
torch.distributed.checkpoint, so that a run can resume on any number of ranks. Nothing in them can
name code.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from litgrpo.models.loading.sharded_weights import assign_files, silence_loader
from litgrpo.run_folder import REST
from litgrpo.tensor_files import (
    DamagedCheckpoint,
    check_finite,
    map_tensors,
    put_in_place,
    read_file,
    report_damage,
    write_synced,
)

FILES = "files"  # part of rest.pt: {name: SHA-256}


def allocate_whole(tensor: Tensor) -> Tensor:
    """Allocate memory for a whole tensor of the given shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def iterate_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value with their dotted paths, in the order of `map_tensors`.

    Example:
        >>> [name for name, _ in iterate_tensors({"a": [torch.zeros(1), {"b": torch.zeros(1)}]})]
        ['a.0', 'a.1.b']
    """
    if isinstance(value, Tensor):
        yield path, value
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, item in inner:
        yield from iterate_tensors(item, f"{path}.{key}" if path else str(key))


# --- writing ---


def write_folder(
    checkpoint: dict[str, Any], path: Path, when_done: Callable[[Path], None] | None = None
) -> int | None:
    """Write a checkpoint as a folder, which gets its name once all of it is on the disk.

    Args:
        checkpoint: with sharded tensors; every rank calls this.
        path: final name of the folder.
        when_done: called by rank 0 with the complete folder.

    Returns:
        Bytes of the folder on rank 0, else None.

    Raises:
        OSError: on all ranks, if the write of one failed.
    """
    unfinished, is_rank_zero = path.with_name(f".{path.name}.tmp"), dist.get_rank() == 0
    sharded = {
        name: tensor for name, tensor in iterate_tensors(checkpoint) if isinstance(tensor, DTensor)
    }

    def prepare() -> None:
        if is_rank_zero:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    _run_on_all_ranks(prepare)
    try:
        writer = HuggingFaceStorageWriter(
            str(unfinished), assign_files(sharded), save_distributed=True
        )
        dcp.save(sharded, storage_writer=writer)
    except CheckpointException as error:  # the same on all ranks
        raise _cause(error) from error
    shard_files = sorted(unfinished.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
    digests = _run_on_all_ranks(lambda: {file.name: hash_file(file) for file in shard_files})

    def complete() -> None:
        if not is_rank_zero:
            return
        files = {name: sha256 for of_rank in digests for name, sha256 in of_rank.items()}
        rest = map_tensors(checkpoint, _without_shards)
        write_synced({**rest, FILES: files}, unfinished / REST)
        put_in_place(unfinished, path)
        if when_done is not None:
            when_done(path)

    _run_on_all_ranks(complete)
    return sum(file.stat().st_size for file in path.iterdir()) if is_rank_zero else None


def _without_shards(tensor: Tensor) -> Tensor:
    """Return shape and dtype of a sharded tensor, and a copy of any other on the host."""
    if isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().cpu()


def _cause(error: CheckpointException) -> OSError:
    """Return the disk's error on the first rank that failed."""
    failures = [failure[0] for failure in error.failures.values()]
    for failure in failures:
        if isinstance(failure, OSError):
            return failure
    return OSError(str(failures[0]).partition("\n")[0])


def _run_on_all_ranks(function: Callable[[], Any]) -> list[Any]:
    """Call a function on every rank and gather what it returns; a failure on one fails all.

    (Ranks that continued alone would wait for the failed one in their next collective.)

    Raises:
        OSError: of the first rank that failed.
        DamagedCheckpoint: of the first rank that failed.
    """
    result: tuple[Any, Exception | None]
    try:
        result = function(), None
    except (OSError, DamagedCheckpoint) as error:
        result = None, error
    results = [result]
    if dist.is_initialized():
        results = [None] * dist.get_world_size()  # type: ignore[list-item]
        dist.all_gather_object(results, result)
    errors = [error for _, error in results if error is not None]
    if errors:
        raise errors[0]
    return [value for value, _ in results]


# --- reading ---


def read_checkpoint(
    path: Path,
    required: tuple[str, ...] = (),
    check_fits: Callable[[dict[str, Any]], None] | None = None,
    shards_for: Callable[[Tensor], Tensor] = allocate_whole,
) -> dict[str, Any]:
    """Read and verify a checkpoint, a file or a folder, which every rank reads.

    Args:
        path: the file or folder.
        required: parts that must be there.
        check_fits: raises a ValueError for the checkpoint of another run. It is called before
            shards are read, of which it sees shape and dtype.
        shards_for: allocates this rank's shard of a sharded tensor.

    Raises:
        DamagedCheckpoint: on all ranks, with the name of the part or the file.
        FileNotFoundError: there is no such file.
    """
    checkpoint = verify_checkpoint(path, required)
    if check_fits is not None:
        check_fits(checkpoint)
    return _read_shards(checkpoint, path, shards_for) if path.is_dir() else checkpoint


def verify_checkpoint(path: Path, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a checkpoint, file or folder, and compare its content with its digests.

    Of sharded tensors it has only shape and dtype.

    Raises:
        DamagedCheckpoint: on all ranks, with the name of the part or the file.
        FileNotFoundError: there is no such file.
    """
    with report_damage(path):
        is_folder = path.is_dir()
        if is_folder:
            _check_file(path, REST)
        checkpoint = read_file(path / REST if is_folder else path, required)
        digests = checkpoint.pop(FILES, None)
        if is_folder != (digests is not None):
            belongs = "of a file" if is_folder else f"the {REST} of a folder"
            raise DamagedCheckpoint(f"{path}: its content is {belongs}")
        for name in checkpoint.get("state_dict", {}):
            if not isinstance(name, str):
                raise DamagedCheckpoint(f"{path}: {name!r:.60} is not the name of a weight")
        sizes = {name: t.numel() for name, t in iterate_tensors(checkpoint) if t.is_meta}
        if sizes and not is_folder:
            raise DamagedCheckpoint(f"{path}: {min(sizes)!r:.60} has no values")
        if is_folder:
            _run_on_all_ranks(lambda: _verify_files(path, digests, sizes))
    return checkpoint


def _verify_files(folder: Path, digests: dict[str, str], sizes: dict[str, int]) -> None:
    """Check names and sizes of files, then compare their digests; the ranks share that work.

    Args:
        folder: the checkpoint, which anybody may have written.
        digests: {file name: SHA-256}.
        sizes: {tensor: number of its values in all files}.
    """
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name in digests:
        if not isinstance(name, str) or re.fullmatch(r"\w[\w.-]*", name) is None:
            raise DamagedCheckpoint(f"{folder}: {name!r:.60} is not a plain file name")
        _check_file(folder, name)
    unlisted = {path.name for path in folder.glob("*.safetensors")} - digests.keys()
    if unlisted:
        raise DamagedCheckpoint(f"{folder}: {min(unlisted)!r} is not a part of it")
    stored = _count_values(folder, digests)
    for name in stored.keys() | sizes.keys():
        if stored[name] != sizes.get(name, 0):
            raise DamagedCheckpoint(
                f"{folder}: {name!r:.60} has {stored[name]:,} values in its files, and "
                f"{sizes.get(name, 0):,} in {REST}"
            )
    for name in sorted(digests)[rank::processes]:
        if hash_file(folder / name) != digests[name]:
            raise DamagedCheckpoint(f"{folder}: {name} is damaged (its sha256 differs)")


def _check_file(folder: Path, name: str) -> None:
    """Reject links, which may lead outside, and devices or pipes, which could be read for ever."""
    file = folder / name
    if not file.exists() and not file.is_symlink():
        raise DamagedCheckpoint(f"{folder}: {name} is missing")
    if file.is_symlink() or not file.is_file():
        raise DamagedCheckpoint(f"{folder}: {name} is a link or not a file")


def _count_values(folder: Path, names: Iterable[str]) -> Counter[str]:
    """Count the values of each tensor by the headers of safetensors files.

    safetensors compares a header's dtypes, shapes and offsets with the file's size.
    """
    stored = Counter[str]()
    for name in names:
        with report_damage(folder / name), safe_open(folder / name, framework="pt") as file:
            for tensor in file.keys():  # noqa: SIM118 (it is no dict)
                stored[tensor] += math.prod(file.get_slice(tensor).get_shape())
    return stored


def _read_shards(
    checkpoint: dict[str, Any], folder: Path, shards_for: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Replace the tensors of which only the shape is known by this rank's shards."""
    tensors = iterate_tensors(checkpoint)
    shards = {name: shards_for(tensor) for name, tensor in tensors if tensor.is_meta}
    try:
        with warnings.catch_warnings(), silence_loader():
            warnings.filterwarnings("ignore", ".*load in a single process")  # it is meant to
            reader = HuggingFaceStorageReader(str(folder))
            dcp.load(shards, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        reason = str(_cause(error)).partition("\n")[0]
        raise DamagedCheckpoint(
            f"{folder} cannot be read: it is not a complete checkpoint ({reason:.90})"
        ) from error
    names = (name for name, _ in iterate_tensors(checkpoint))
    checkpoint = map_tensors(checkpoint, lambda tensor: shards.get(next(names), tensor))
    _run_on_all_ranks(lambda: check_finite(checkpoint.get("state_dict", {}), folder))
    return checkpoint


def hash_file(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
