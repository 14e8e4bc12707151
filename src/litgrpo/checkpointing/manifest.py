"""What a checkpoint says of itself, part by part, and whether the file still holds that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from litgrpo.callbacks.run_folder import versions
from litgrpo.distributed.device import backend, to_host

MANIFEST, OWN = "manifest", "sha256"
# Without these a training cannot go on where it stopped.
TO_GO_ON = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks")
# What a loader's state holds beside what its order of batches depends on.
POSITION = ("epoch", "batches", "drawn")
PLAIN = {type(None), bool, int, float, str, bytes, torch.dtype, torch.device}


class Damaged(ValueError):
    """A checkpoint that does not hold what it says, or not what this run needs."""


def digest(value: Any) -> str:
    """Sha256 of nested plain values and tensors; equal for equal content, however it is stored.

    Args:
        value: what a checkpoint can hold: it is loaded with `weights_only=True`.

    Raises:
        TypeError: something else, such as a function: no later run could load it.

    Example:
        >>> digest({"a": [1, torch.zeros(2)]}) == digest({"a": [1, torch.zeros(2)]})
        True
    """
    content = hashlib.sha256()
    _feed(value, content)
    return content.hexdigest()


@singledispatch
def _feed(value: Any, content: Any) -> None:
    # A subclass, such as an enumeration, is an object again; so is b"", which torch.save writes as
    # a call of bytes() that weights_only=True refuses.
    if type(value) not in PLAIN or value == b"":
        raise TypeError(
            f"a checkpoint cannot hold a {type(value).__name__} ({value!r:.60}): only plain "
            "values and tensors can be loaded again (weights_only=True)"
        )
    content.update(f"{type(value).__name__} {value!r} ".encode())


@_feed.register
def _(value: Tensor, content: Any) -> None:
    content.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
    if value.is_meta:  # its values are in files of shards, which have digests of their own
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


def rebuilt(value: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
    """The same nested value in new containers, so that no later change of the old reaches it.

    Args:
        value: as for `digest`.
        tensor: what to make of each tensor.
    """
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, Mapping):
        return {key: rebuilt(inner, tensor) for key, inner in value.items()}
    for kind in (list, tuple):
        if isinstance(value, kind):
            return kind(rebuilt(inner, tensor) for inner in value)
    return value


def on_host(value: Any) -> Any:
    """The same nested value with copies of its tensors in the host's memory.

    Args:
        value: as for `digest`. Nothing else writes to the copies. What lies on a device that
            compiles is fetched by one wait. What is there twice (tied weights) is copied once, and
            a file holds it once.
    """
    far: list[Tensor] = []
    copies: dict[Hashable, Tensor] = {}

    def noted(tensor: Tensor) -> Tensor:
        if backend(tensor.device).static_shapes:
            far.append(tensor)
        return tensor

    rebuilt(value, noted)
    fetched = iter(to_host(far))

    def copied(tensor: Tensor) -> Tensor:
        if backend(tensor.device).static_shapes:
            return next(fetched)
        place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if place not in copies:
            copies[place] = tensor.detach().to("cpu", copy=True)
        return copies[place]

    return rebuilt(value, copied)


def manifest_of(checkpoint: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Digests of all parts, shapes of the weights, versions, the data's identity; its own digest.

    Args:
        checkpoint: everything else that the file will hold.
        more: what else the manifest says.
    """
    weights = checkpoint["state_dict"]
    manifest = {
        "parts": {name: digest(part) for name, part in checkpoint.items() if name != MANIFEST},
        "shapes": {name: list(weight.shape) for name, weight in weights.items()},
        "versions": versions(),
        "config": digest(_config(checkpoint)),
        "data": data_of(checkpoint),
        **more,
    }
    return {**manifest, OWN: digest(manifest)}


def _config(checkpoint: Mapping[str, Any]) -> Any:
    return checkpoint.get("callbacks", {}).get("RunFolder", {}).get("config")


def data_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the position in the data depends on: of each loader that knows its position."""
    return [
        {name: value for name, value in state.items() if name not in POSITION}
        for state in positions_of(checkpoint)
    ]


def positions_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The state of each training loader that has one; Lightning keeps them here."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    return list(loop.get("state_dict", {}).get("combined_loader", []))


def read(path: Path, needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """A checkpoint that holds what its manifest says, without the manifest; see `opened`."""
    return {name: part for name, part in opened(path, needs).items() if name != MANIFEST}


def opened(path: Path, needs: tuple[str, ...] = ()) -> dict[str, Any]:
    """A checkpoint that holds what its manifest says, with the manifest.

    Args:
        path: the file.
        needs: parts that must be there.

    Raises:
        Damaged: it does not; the message names the part.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = isinstance(checkpoint, dict) and MANIFEST in checkpoint
        _check(known, f"{path} has no manifest: it was not written by this program")
        verify(checkpoint, path, needs)
    except (FileNotFoundError, Damaged):
        raise
    except Exception as error:  # whatever the reader stumbles over, the file is the reason
        said = str(error).partition("\n")[0] or type(error).__name__
        raise Damaged(
            f"{path} cannot be read: it is cut off, damaged or no checkpoint ({said:.90})"
        ) from error
    return dict(checkpoint)


def verify(checkpoint: Mapping[str, Any], path: Path, needs: tuple[str, ...]) -> None:
    """Compare every part with the manifest, and look for weights that are not numbers."""
    manifest = checkpoint[MANIFEST]
    parts: dict[str, str] = manifest.get("parts", {})
    own = digest({name: value for name, value in manifest.items() if name != OWN})
    # One flipped bit can rename a part and its entry alike: the file holds equal words once.
    _check(manifest.get(OWN) == own, f"{path}: the manifest is damaged")
    _check(
        set(needs) <= parts.keys(),
        f"{path} holds weights only (checkpoint.save weights): no run goes on from it. Evaluate or "
        "export it; a new run starts from what `export` writes, as model.pretrained.",
    )
    for name in parts:
        _check(name in checkpoint, f"{path}: {name} is missing")
    for name, part in checkpoint.items():
        sound = name == MANIFEST or digest(part) == parts.get(name)
        _check(sound, f"{path}: {name} is damaged (its sha256 is not the manifest's)")
    check_finite(checkpoint.get("state_dict", {}), path)


def check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Look for weights that are not numbers.

    Raises:
        Damaged: with the name of the first.
    """
    for name, weight in weights.items():
        bad = 0 if weight.is_meta else int((~weight.isfinite()).sum())
        size = weight.numel()
        _check(not bad, f"{path}: {name} has {bad} of {size} values that are NaN or inf")


def _check(sound: bool, otherwise: str) -> None:
    if not sound:
        raise Damaged(otherwise)
