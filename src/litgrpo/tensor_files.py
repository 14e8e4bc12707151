"""Files of tensors, such as checkpoints: written completely or not at all, verified on read.

`torch.save` writes a zip archive with a CRC of every record. `torch.load` does not compare them;
`zipfile` does.
"""

from __future__ import annotations

import os
import shutil
import textwrap
import zipfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.serialization import config

from litgrpo.arguments import type_with_article
from litgrpo.distributed.device import backend, to_host

# A run cannot resume without these parts, which are of these kinds.
KINDS: dict[str, type] = {
    "state_dict": Mapping,
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": Mapping,
    "callbacks": Mapping,
}
NEEDED_TO_RESUME = tuple(KINDS)
PLAIN = {type(None), bool, int, float, str, bytes, torch.dtype, torch.device}


class DamagedCheckpoint(ValueError):
    """A checkpoint that cannot be read, or that lacks a part this run needs."""


# --- nested values ---


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a nested value; containers are new.

    Later changes of the old containers do not reach the result.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(inner, function) for key, inner in value.items()}
    for kind in (list, tuple):
        if isinstance(value, kind):
            return kind(map_tensors(inner, function) for inner in value)
    return value


def copy_to_host(value: Any) -> Any:
    """Copy a nested value, with its tensors in the host's memory.

    Tensors on a device that compiles every shape are fetched together, in one wait. Tied weights
    are copied once, so that a file holds them once.
    """
    compiled: list[Tensor] = []
    copies: dict[Hashable, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if backend(tensor.device).static_shapes:
            compiled.append(tensor)
        return tensor

    map_tensors(value, collect)
    fetched = iter(to_host(compiled))

    def copy(tensor: Tensor) -> Tensor:
        if backend(tensor.device).static_shapes:
            return next(fetched)
        storage = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if storage not in copies:
            copies[storage] = tensor.detach().to("cpu", copy=True)
        return copies[storage]

    return map_tensors(value, copy)


def loader_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """State of each training loader that has one, from where Lightning stores them."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return list(loop.get("state_dict", {}).get("combined_loader", []))


# --- writing ---


def write_file(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; the file gets its name once it is on the disk.

    A process that is killed meanwhile leaves a file whose name begins with a dot. Every older
    checkpoint stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(checkpoint, unfinished)
        put_in_place(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def put_in_place(unfinished: Path, path: Path) -> None:
    """Give a complete checkpoint, file or folder, its name; what had that name is removed.

    A folder may have the name of a file and the reverse, since a run falls back from a damaged one.
    """
    replaced = None
    if path.is_dir() and not path.is_symlink():
        replaced = _rename_unwanted(path)
    elif unfinished.is_dir():
        path.unlink(missing_ok=True)
    unfinished.rename(path)
    sync_folder(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a folder is renamed first, so that no incomplete one keeps the name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(_rename_unwanted(path))
    else:
        path.unlink(missing_ok=True)


def _rename_unwanted(folder: Path) -> Path:
    """Rename a folder to a hidden name, which the next start removes."""
    unwanted = folder.with_name(f".{folder.name}.old.tmp")
    shutil.rmtree(unwanted, ignore_errors=True)
    return folder.rename(unwanted)


def write_synced(content: dict[str, Any], path: Path) -> None:
    """Write a new file with `torch.save` and wait until the disk has the content."""
    check_plain(content)
    path.unlink(missing_ok=True)  # it may be a link, through which nothing is written
    with path.open("xb") as file:
        _save(content, file)
        file.flush()
        os.fsync(file.fileno())


def check_plain(value: Any, name: str = "") -> None:
    """Raise a TypeError, with its dotted name, for a value that `weights_only=True` rejects."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_plain(key, name)
            check_plain(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            check_plain(inner, name)
    elif not isinstance(value, Tensor) and (type(value) not in PLAIN or value == b""):
        # A subclass, such as an enumeration, would load as an object. `torch.save` writes b"" as a
        # call of bytes().
        raise TypeError(
            f"a checkpoint cannot hold {type_with_article(value)} ({name}: {value!r:.60}): only "
            "plain values and tensors can be loaded with weights_only=True"
        )


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        # A user may have switched them off.
        with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
            torch.save(content, file)
    except RuntimeError as error:
        # torch reports an unexpected position in the file; the cause is the disk's error.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ---


def read_file(path: Path, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a checkpoint that has the required parts, or raise a `DamagedCheckpoint`."""
    with report_damage(path):
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        _check(isinstance(checkpoint, dict), f"{path} is not a checkpoint: it has no parts")
        check_sizes(checkpoint, path)
        check_parts(checkpoint, path, required)
        check_finite(checkpoint.get("state_dict", {}), path)
    return dict(checkpoint)


@contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Turn every error of a reader into `DamagedCheckpoint`: a damaged file can fail anywhere.

    A file that does not exist stays a FileNotFoundError.
    """
    try:
        yield
    except (FileNotFoundError, DamagedCheckpoint):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        reason = textwrap.shorten(reason or type(error).__name__, 90, placeholder=" ...")
        raise DamagedCheckpoint(
            f"{path} cannot be read: it is cut off, damaged or not a checkpoint ({reason})"
        ) from error


def check_archive(path: Path) -> None:
    """Compare every record with its CRC, after a look at what unpacking them would take.

    `torch.save` compresses nothing and uses a name once. Compressed or overlapping records come
    from somebody else, and could need more memory than the file has bytes. `torch.load` fills a
    tensor with whatever is in memory if its record is marked as a folder, as one flipped bit does.
    """
    # A device or a pipe in its place could be read for ever.
    _check(path.is_file() or not path.exists(), f"{path} cannot be read: it is not a file")
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        names = {record.filename for record in records}
        packed = [r.filename for r in records if r.compress_type != zipfile.ZIP_STORED]
        folders = [record.filename for record in records if record.external_attr]
        total, size = sum(record.file_size for record in records), os.fstat(file.fileno()).st_size
        _check(not packed, f"{path}: {''.join(packed[:1])} is compressed, which no checkpoint is")
        _check(total <= size, f"{path}: its records have {total} bytes, the file has {size}")
        _check(len(names) == len(records), f"{path} has several records of one name")
        _check(not folders, f"{path}: {''.join(folders[:1])} is damaged (it is no record)")
        damaged = archive.testzip()
        _check(damaged is None, f"{path}: {damaged} is damaged (its CRC differs)")


def check_sizes(value: Any, path: Path) -> None:
    """Reject tensors that repeat stored values: a copy would need more memory than the file."""

    def check(tensor: Tensor) -> Tensor:
        stored = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        _check(
            tensor.is_meta or tensor.numel() * tensor.element_size() <= stored,
            f"{path}: a tensor of shape {list(tensor.shape)} is stored in {stored} bytes",
        )
        return tensor

    map_tensors(value, check)


def check_parts(checkpoint: Mapping[str, Any], path: Path, required: tuple[str, ...]) -> None:
    """Check that all required parts are there, and that the parts of a run are of their kinds."""
    missing = [name for name in required if name not in checkpoint]
    _check(
        not missing,
        f"{path} has no {', '.join(missing)}, so a run cannot resume from it. If it holds only "
        "weights (checkpoint.save_weights_only), evaluate or export it; to train it further pass "
        "the exported folder as model.pretrained.",
    )
    for name, kind in KINDS.items():
        part = checkpoint.get(name)
        _check(
            name not in checkpoint or isinstance(part, kind),
            f"{path}: {name} is {type_with_article(part)}",
        )


def check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise a DamagedCheckpoint for weights that are NaN or infinite."""
    problem = find_not_finite(weights.items())
    _check(not problem, f"{path}: {problem}")


def find_not_finite(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Describe the first tensor that is not finite, of sharded ones this rank's part; "" if none.

    One NaN becomes every output of a model.
    """
    for name, weight in weights:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if local.is_floating_point() and local.itemsize == 1:  # torch has no isfinite of float8
            local = local.float()
        if not local.is_meta and not bool(local.isfinite().all()):
            bad = int((~local.isfinite()).sum())
            dtype = str(local.dtype).removeprefix("torch.")
            return f"{name} has {bad} of {local.numel()} values that are NaN or infinite in {dtype}"
    return ""


def _check(is_sound: bool, otherwise: str) -> None:
    if not is_sound:
        raise DamagedCheckpoint(otherwise)
