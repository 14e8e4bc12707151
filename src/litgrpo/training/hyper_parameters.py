"""Constructor arguments of modules as plain values, and modules rebuilt from checkpoints.

Lightning saves `hparams` in checkpoints, in `hparams.yaml` and with loggers. Here they are numbers,
texts, lists and dicts; objects and functions are described by their import paths. Rebuilding a
module from a checkpoint only ever calls names of litgrpo and of torch's optimizers: a file must not
decide which code runs. Everything else has to be given by the caller.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import LightningModule

from litgrpo.arguments import import_by_path
from litgrpo.text.secrets import mask_settings

KEY = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
OBJECT, FUNCTION, PARTIAL = "class_path", "import_path", "partial"
PLAIN = (type(None), bool, int, float, str)
# Modules whose names a checkpoint may call.
TRUSTED = ("litgrpo.", "torch.optim.")

Module = TypeVar("Module", bound=LightningModule)


class NotDescribable(ValueError):
    """A value that another process could not rebuild from a text, such as a lambda."""


class NotTrusted(ValueError):
    """A description that names code of neither litgrpo nor torch.optim."""


def describe_arguments(local: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the arguments of a constructor as plain values; keys and passwords are masked.

    Arguments without a description (a lambda, a model in memory) are left out; pass them to
    `load_from_checkpoint`.

    Args:
        local: `locals()` at the beginning of the constructor.
    """
    described = {}
    for name, value in local.items():
        if name in ("self", "__class__"):
            continue
        try:
            described[name] = describe(value)
        except NotDescribable:
            continue
    return dict(mask_settings(described))


def describe(value: Any) -> Any:
    """Describe a value by numbers, texts, lists, dicts and import paths.

    Raises:
        NotDescribable: no other process could rebuild it.

    Example:
        >>> describe({"a": (1, torch.optim.AdamW)})
        {'a': (1, {'import_path': 'torch.optim.adamw.AdamW'})}
    """
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return type(value)(describe(each) for each in value)
    if isinstance(value, Mapping):
        return {key: describe(each) for key, each in value.items()}
    if isinstance(value, functools.partial):
        parts = {"args": describe(value.args), "kwargs": describe(value.keywords)}
        return {PARTIAL: describe(value.func), **parts}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        init_args = {name: describe(getattr(value, name)) for name in fields}
        return {OBJECT: _import_path(type(value)), "init_args": init_args}
    return {FUNCTION: _import_path(value)}


def _import_path(value: Any) -> str:
    if not inspect.isroutine(value) and not inspect.isclass(value):
        raise NotDescribable(f"{value!r} has no import path")
    path = f"{value.__module__}.{value.__qualname__}"
    try:
        found = import_by_path(path)
    except ValueError as error:
        raise NotDescribable(str(error)) from error
    if found is not value or value.__module__ == "__main__":
        raise NotDescribable(f"{path} is another object when it is imported")
    return path


def build(description: Any) -> Any:
    """Rebuild a value from its description.

    Raises:
        NotTrusted: it names code outside of `TRUSTED`.

    Example:
        >>> build({"import_path": "torch.optim.adamw.AdamW"})
        <class 'torch.optim.adamw.AdamW'>
    """
    if isinstance(description, list | tuple):
        return type(description)(build(each) for each in description)
    if not isinstance(description, dict):
        return description
    if FUNCTION in description:
        return _import_trusted(description[FUNCTION])
    if PARTIAL in description:
        arguments = build(description["args"]), build(description["kwargs"])
        return functools.partial(build(description[PARTIAL]), *arguments[0], **arguments[1])
    if OBJECT in description:
        return _import_trusted(description[OBJECT])(**build(description["init_args"]))
    return {key: build(each) for key, each in description.items()}


def _import_trusted(path: str) -> Any:
    if not path.startswith(TRUSTED):
        raise NotTrusted(path)
    return import_by_path(path)


def load_from_checkpoint(
    kind: type[Module], checkpoint_path: str | Path, map_location: Any = "cpu", **arguments: Any
) -> Module:
    """Load a module and its weights from a checkpoint, without a trainer.

    Args:
        kind: class of the module.
        checkpoint_path: a .ckpt file.
        map_location: device of the weights, as in `torch.load`.
        arguments: replace those of the checkpoint, or are missing there.

    Raises:
        ValueError: an argument is missing, or its saved value names code that is not part of
            litgrpo or torch.optim.
    """
    checkpoint = torch.load(checkpoint_path, map_location=map_location, weights_only=True)
    parameters = inspect.signature(kind).parameters
    missing = []
    for name, parameter in parameters.items():
        if name in arguments or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        try:
            if name in checkpoint.get(KEY, {}):
                arguments[name] = build(checkpoint[KEY][name])
            elif parameter.default is parameter.empty:
                missing.append(name)
        except NotTrusted as error:
            missing.append(f"{name} ({error})")
    if missing:
        raise ValueError(
            f"{checkpoint_path} does not provide {', '.join(missing)} of {kind.__name__}: code "
            "outside of litgrpo and torch.optim is never loaded from a file, and lambdas and "
            "objects in memory are not saved. Pass it to load_from_checkpoint."
        )
    module: Any = kind(**arguments)
    if "tokenizer" in checkpoint:
        module.take_tokenizer(checkpoint)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    return module
