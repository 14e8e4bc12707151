"""Checkpoint files: written completely or not at all, with a manifest of digests, verified on read.

A manifest holds the SHA-256 of every part of the checkpoint, the shapes of the weights, the
versions of the libraries and the identity of the data. It has its own digest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import textwrap
import zipfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import singledispatch
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from litgrpo.arguments import type_with_article
from litgrpo.distributed.device import backend, to_host
from litgrpo.run_folder import versions

MANIFEST, OWN_DIGEST = "manifest", "sha256"
# A run cannot resume without these parts, which are of these kinds.
KINDS: dict[str, type] = {
    "state_dict": Mapping,
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": Mapping,
    "callbacks": Mapping,
}
NEEDED_TO_RESUME = tuple(KINDS)
# Entries of a loader's state that say where it is; the others identify the data and their order.
POSITION = ("epoch", "batches", "drawn")
PLAIN = {type(None), bool, int, float, str, bytes, torch.dtype, torch.device}


class DamagedCheckpoint(ValueError):
    """A checkpoint whose content differs from its manifest, or that lacks a part this run needs."""


# --- digests ---


def digest(value: Any) -> str:
    """SHA-256 of nested plain values and tensors; equal for equal content, however it is stored.

    Args:
        value: anything a checkpoint can hold, which is loaded with `weights_only=True`.

    Raises:
        TypeError: another type, such as a function, which no later run could load.

    Example:
        >>> digest({"a": [1, torch.zeros(2)]}) == digest({"a": [1, torch.zeros(2)]})
        True
    """
    content = hashlib.sha256()
    _feed(value, content)
    return content.hexdigest()


@singledispatch
def _feed(value: Any, content: Any) -> None:
    # A subclass, such as an enumeration, would load as an object. `torch.save` writes b"" as a call
    # of bytes(), which weights_only=True rejects.
    if type(value) not in PLAIN or value == b"":
        raise TypeError(
            f"a checkpoint cannot hold {type_with_article(value)} ({value!r:.60}): only plain "
            "values and tensors can be loaded with weights_only=True"
        )
    content.update(f"{type(value).__name__} {value!r} ".encode())


@_feed.register
def _(value: Tensor, content: Any) -> None:
    content.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
    if value.is_meta:  # its values are in shard files, which have their own digests
        return
    flat = value.detach().cpu().contiguous().reshape(-1)
    content.update(flat.view(torch.uint8).numpy())


@_feed.register(Mapping)
def _(value: Mapping[Any, Any], content: Any) -> None:
    content.update(f"dict {len(value)} ".encode())
    for key, inner in value.items():
        _feed(key, content)
        _feed(inner, content)


@_feed.register(list)
@_feed.register(tuple)
def _(value: Sequence[Any], content: Any) -> None:
    content.update(f"list {len(value)} ".encode())
    for inner in value:
        _feed(inner, content)


@_feed.register(set)
@_feed.register(frozenset)
def _(value: Set[Any], content: Any) -> None:
    _feed(sorted(value, key=repr), content)


# --- nested values ---


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a nested value; containers are new.

    Later changes of the old containers do not reach the result.

    Args:
        value: as for `digest`.
        function: gives the new tensor.
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

    Args:
        value: as for `digest`.
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


# --- the manifest ---


def build_manifest(checkpoint: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Digests of all parts, shapes of the weights, versions, identity of the data; its own digest.

    Args:
        checkpoint: everything else that the file will hold.
        more: further entries of the manifest.

    Example:
        >>> manifest = build_manifest({"state_dict": {"w": torch.zeros(2, 3)}, "iteration": 7})
        >>> sorted(manifest["parts"]), manifest["shapes"]
        (['iteration', 'state_dict'], {'w': [2, 3]})
    """
    weights = checkpoint.get("state_dict", {})
    manifest = {
        "parts": {name: digest(part) for name, part in checkpoint.items() if name != MANIFEST},
        "shapes": {name: list(weight.shape) for name, weight in weights.items()},
        "versions": versions(),
        "config": digest(checkpoint.get("callbacks", {}).get("RunFolder", {}).get("config")),
        "data": identify_data(checkpoint),
        **more,
    }
    return {**manifest, OWN_DIGEST: digest(manifest)}


def identify_data(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """State of each training loader without its position: the data and their order."""
    return [
        {name: value for name, value in state.items() if name not in POSITION}
        for state in loader_states(checkpoint)
    ]


def loader_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """State of each training loader that has one, from where Lightning stores them."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return list(loop.get("state_dict", {}).get("combined_loader", []))


# --- writing ---


def write_file(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with its manifest; the file gets its name once it is on the disk.

    A process that is killed meanwhile leaves a file whose name begins with a dot. Every older
    checkpoint stays as it was.

    Raises:
        OSError: the disk is full, for example.
        TypeError: the checkpoint holds an object that could not be loaded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    checkpoint = {**checkpoint, MANIFEST: build_manifest(checkpoint)}
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
    path.unlink(missing_ok=True)  # it may be a link, through which nothing is written
    with path.open("xb") as file:
        _save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
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
    """Read and verify a checkpoint; see `read_with_manifest`, whose manifest is left out."""
    content = read_with_manifest(path, required)
    return {name: part for name, part in content.items() if name != MANIFEST}


def read_with_manifest(path: Path, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a checkpoint and compare it with its manifest.

    Args:
        path: the file.
        required: parts that the file must have.

    Raises:
        DamagedCheckpoint: it differs; the message names the part.
        FileNotFoundError: there is no such file.
    """
    with report_damage(path):
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        _check(
            isinstance(checkpoint, dict) and MANIFEST in checkpoint,
            f"{path} has no manifest: it was not written by litgrpo",
        )
        check_sizes(checkpoint, path)
        verify(checkpoint, path, required)
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
    """Reject a file that would need more memory than its size, before it is unpacked.

    `torch.save` compresses nothing. Compressed or overlapping entries come from somebody else.

    Raises:
        DamagedCheckpoint: with the reason.
        FileNotFoundError: there is no such file.
    """
    # A device or a pipe in its place could be read for ever.
    _check(path.is_file() or not path.exists(), f"{path} cannot be read: it is not a file")
    with path.open("rb") as file:
        is_archive = zipfile.is_zipfile(file)
        _check(
            is_archive,
            f"{path} cannot be read: it is cut off, damaged or not a checkpoint (no archive)",
        )
        entries = zipfile.ZipFile(file).infolist()
        packed = [each.filename for each in entries if each.compress_type != zipfile.ZIP_STORED]
        _check(not packed, f"{path}: {''.join(packed[:1])} is compressed, which no checkpoint is")
        total, size = sum(each.file_size for each in entries), os.fstat(file.fileno()).st_size
        _check(total <= size, f"{path}: its entries have {total} bytes, the file has {size}")


def check_sizes(value: Any, path: Path) -> None:
    """Reject tensors that repeat their stored values: a copy would need more memory than the file.

    Raises:
        DamagedCheckpoint: there is one.
    """

    def check(tensor: Tensor) -> Tensor:
        stored = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        _check(
            tensor.is_meta or tensor.numel() * tensor.element_size() <= stored,
            f"{path}: a tensor of shape {list(tensor.shape)} is stored in {stored} bytes",
        )
        return tensor

    map_tensors(value, check)


def verify(checkpoint: Mapping[str, Any], path: Path, required: tuple[str, ...]) -> None:
    """Compare every part with the manifest, and search the weights for NaN and infinity.

    Raises:
        DamagedCheckpoint: with the name of the first part that differs.
    """
    manifest = checkpoint[MANIFEST]
    parts: dict[str, str] = manifest.get("parts", {})
    # One flipped bit can rename a part and its entry alike, as pickle stores equal strings once;
    # only the manifest's own digest finds that.
    own = digest({name: value for name, value in manifest.items() if name != OWN_DIGEST})
    _check(manifest.get(OWN_DIGEST) == own, f"{path}: the manifest is damaged")
    _check(
        set(required) <= parts.keys(),
        f"{path} holds only weights (checkpoint.save_weights_only), so a run cannot resume from "
        "it. Evaluate or export it; to train it further pass the exported folder as "
        "model.pretrained.",
    )
    for name in parts:
        _check(name in checkpoint, f"{path}: {name} is missing")
    for name, part in checkpoint.items():
        is_sound = name == MANIFEST or digest(part) == parts.get(name)
        _check(is_sound, f"{path}: {name} is damaged (its sha256 differs from the manifest's)")
        _check(
            isinstance(part, KINDS.get(name, object)),
            f"{path}: {name} is {type_with_article(part)}",
        )
    check_finite(checkpoint.get("state_dict", {}), path)


def check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise for weights that are NaN or infinite.

    Raises:
        DamagedCheckpoint: with the name of the first.
    """
    for name, weight in weights.items():
        bad = 0 if weight.is_meta else int((~weight.isfinite()).sum())
        size = weight.numel()
        _check(bad == 0, f"{path}: {name} has {bad} of {size} values that are NaN or inf")


def _check(is_sound: bool, otherwise: str) -> None:
    if not is_sound:
        raise DamagedCheckpoint(otherwise)
