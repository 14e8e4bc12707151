"""A module's arguments as plain values in its checkpoints, and the module made from them again."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import LightningModule

from litgrpo.arguments import import_by_path, require

KEY = "arguments"
OBJECT, FUNCTION, PARTIAL = "class_path", "import_path", "partial"
PLAIN = (type(None), bool, int, float, str)

Module = TypeVar("Module", bound=LightningModule)


class NotPlain(ValueError):
    """A value that no other process could make again from a text."""


def kept(local: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor as plain values; those that cannot be written so are left out.

    Args:
        local: `locals()` at its beginning.
    """
    found = {}
    for name, value in local.items():
        if name in ("self", "__class__"):
            continue
        try:
            found[name] = plain(value)
        except NotPlain:  # a lambda, a model at hand: whoever loads the checkpoint gives it again
            continue
    return found


def plain(value: Any) -> Any:
    """A value as numbers, texts, lists and dicts; objects and functions by their import paths.

    Raises:
        NotPlain: it cannot be written so.

    Example:
        >>> plain({"a": (1, torch.optim.AdamW)})
        {'a': (1, {'import_path': 'torch.optim.adamw.AdamW'})}
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, functools.partial):
        parts = {"args": plain(value.args), "kwargs": plain(value.keywords)}
        return {PARTIAL: plain(value.func), **parts}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        init_args = {name: plain(vars(value)[name]) for name in fields}
        return {OBJECT: _path(type(value)), "init_args": init_args}
    return {FUNCTION: _path(value)}


def _path(value: Any) -> str:
    if not inspect.isroutine(value) and not inspect.isclass(value):
        raise NotPlain(f"{value!r} has no import path")
    path = f"{value.__module__}.{value.__qualname__}"
    try:
        there = import_by_path(path)
    except ValueError as error:
        raise NotPlain(str(error)) from error
    if there is not value or value.__module__ == "__main__":
        raise NotPlain(f"{path} is not what another process would find there")
    return path


def made(value: Any) -> Any:
    """Rebuild the value that `plain` wrote."""
    if isinstance(value, list | tuple):
        return type(value)(made(each) for each in value)
    if not isinstance(value, dict):
        return value
    if FUNCTION in value:
        return import_by_path(value[FUNCTION])
    if PARTIAL in value:
        return functools.partial(made(value[PARTIAL]), *made(value["args"]), **value["kwargs"])
    if OBJECT in value:
        return import_by_path(value[OBJECT])(**made(value["init_args"]))
    return {key: made(each) for key, each in value.items()}


def loaded(kind: type[Module], checkpoint_path: str | Path, **arguments: Any) -> Module:
    """The module that a checkpoint holds, with its weights, outside of any trainer.

    Args:
        kind: its class.
        checkpoint_path: a .ckpt file.
        arguments: what replaces the checkpoint's, or what it could not hold.

    Raises:
        ValueError: an argument is in neither.
    """
    checkpoint = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
    arguments = made(checkpoint.get(KEY, {})) | arguments
    parameters = inspect.signature(kind).parameters.values()
    plain_ones = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [p.name for p in plain_ones if p.default is p.empty and p.name not in arguments]
    require(
        not missing,
        f"{checkpoint_path} cannot hold {', '.join(missing)} of {kind.__name__} (a function of "
        "a script or a lambda, an object of your own, or the file is older): give it to "
        "load_from_checkpoint, too.",
    )
    module: Any = kind(**arguments)
    if "tokenizer" in checkpoint:
        module.take_tokenizer(checkpoint)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    return module
