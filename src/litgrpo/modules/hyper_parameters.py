"""Constructor arguments of modules as plain values, and modules rebuilt from checkpoints.

Lightning saves `hparams` in checkpoints, in `hparams.yaml` and with loggers. Here they are numbers,
texts, lists and dicts; objects and functions are described by their import paths.

A file must not decide which code runs or what is reached. So `build` makes numbers, the classes of
options in `OPTIONS`, which import and reach nothing, optimizers and schedules, and built-in rewards
whose arguments are numbers. Everything else is asked of the caller: functions, environments,
servers, other models, and texts that are an argument by themselves, except the name of the trained
model, without which no checkpoint of it could be loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import LightningModule

import litgrpo.rewards
from litgrpo.arguments import import_by_path, require, type_with_article
from litgrpo.checkpointing.shards import read_checkpoint
from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.load import Precision, build_policy, check_weights, load_policy
from litgrpo.models.loading.scratch import Scratch, deserialize_tokenizer
from litgrpo.models.policy import Policy
from litgrpo.rewards.reward import Reward, builtin_rewards
from litgrpo.text.secrets import mask_settings

KEY = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
KEYWORDS = "keywords"  # in a checkpoint: names of the arguments that its module was made with
OBJECT, FUNCTION, PARTIAL = "class_path", "import_path", "partial"
PLAIN = (type(None), bool, int, float, str)
# Modules and packages whose data classes a checkpoint may name: none imports what a text names,
# starts a program, or opens a file or an address.
OPTIONS = (
    "litgrpo.algorithms.",
    "litgrpo.evaluation.",
    "litgrpo.learning.",
    "litgrpo.models.",
    "litgrpo.rewards.scoring.",
    "litgrpo.rollout.engines.",
    "litgrpo.rollout.episodes.",
    "litgrpo.rollout.sampling.",
    "litgrpo.rollout.sources.ahead.",
    "litgrpo.rollout.sources.base.",
    "litgrpo.rollout.sources.data_completions.",
)
# Modules whose optimizers and schedules a checkpoint may name.
OPTIMIZERS = ("torch.optim", "torch.optim.lr_scheduler", "litgrpo.learning.optim")
OPTIMIZER_KINDS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
TEXTS = ("pretrained",)  # arguments that a checkpoint sets to a text
POLICY_ARGUMENTS: dict[str, type] = {
    "pretrained": str,
    "scratch": Scratch,
    "precision": Precision,
    "lora": LoRA,
    "seed": int,
}

Module = TypeVar("Module", bound=LightningModule)


class NotDescribable(ValueError):
    """A value that another process could not rebuild from a text, such as a lambda."""


class NotTrusted(ValueError):
    """A description of something that a file must not choose."""


def describe_arguments(local: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the arguments of a constructor as plain values; keys and passwords are masked.

    Arguments without a description (a lambda, a model in memory) are left out.

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
    """Describe a value by numbers, texts, lists, dicts and import paths, as `build` reads them."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return type(value)(describe(item) for item in value)
    if isinstance(value, Mapping):
        return {key: describe(item) for key, item in value.items()}
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
        imported = import_by_path(path)
    except ValueError as error:
        raise NotDescribable(str(error)) from error
    if imported is not value or value.__module__ == "__main__":
        raise NotDescribable(f"{path} is another object when it is imported")
    return path


def build(description: Any, *, texts: bool = False) -> Any:
    """Rebuild a value from its description; a NotTrusted for what a file must not choose.

    Args:
        description: from a file of anybody.
        texts: texts stay as they are; else they name built-in rewards.
    """
    if isinstance(description, dict):
        if description.keys() & {FUNCTION, PARTIAL, OBJECT}:
            return _build_object(description)
        return {key: build(item, texts=texts) for key, item in description.items()}
    if isinstance(description, list | tuple):
        return type(description)(build(item, texts=texts) for item in description)
    if isinstance(description, str) and description and not texts:
        return import_reward(description)
    return description


def _build_object(description: Mapping[str, Any]) -> Any:
    """Rebuild a function or class, a partial of one, or the object of a data class."""
    if FUNCTION in description:
        path = str(description[FUNCTION])
        return import_optimizer(path) or import_reward(path)
    if PARTIAL in description:
        function = build(description[PARTIAL])
        texts = inspect.isclass(function)  # an optimizer or schedule
        args, kwargs = (build(description[name], texts=texts) for name in ("args", "kwargs"))
        return functools.partial(function, *args, **kwargs)
    kind = import_option_class(str(description[OBJECT]))
    # A reward imports its function, and texts among its arguments may name a file.
    numbers = ("function", "kwargs") if kind is Reward else ()
    items = description["init_args"].items()
    return kind(**{name: build(item, texts=name not in numbers) for name, item in items})


def import_option_class(path: str) -> Any:
    """Import a data class of `OPTIONS`, or `Reward`; a NotTrusted for any other path."""
    if path == f"{Reward.__module__}.{Reward.__name__}":
        return Reward
    kind = import_by_path(path) if path.startswith(OPTIONS) else None
    # A module also has the names that it imports.
    is_option = inspect.isclass(kind) and f"{kind.__module__}.".startswith(OPTIONS)
    if not is_option or not dataclasses.is_dataclass(kind):
        raise NotTrusted(path)
    return kind


def import_optimizer(path: str) -> Any:
    """Return an optimizer or schedule of `OPTIMIZERS`; None for any other path."""
    module, _, name = path.rpartition(".")
    for module_path in OPTIMIZERS:
        kind = vars(import_module(module_path)).get(name)
        is_kind = inspect.isclass(kind) and issubclass(kind, OPTIMIZER_KINDS)
        if is_kind and module in (module_path, kind.__module__):
            return kind
    return None


def import_reward(path: str) -> Any:
    """Return a built-in reward function; a NotTrusted for any other path."""
    module, _, name = path.rpartition(".")
    function = getattr(litgrpo.rewards, name) if name in builtin_rewards() else None
    if function is None or module not in ("litgrpo.rewards", function.__module__):
        raise NotTrusted(path)
    return function


def build_arguments(
    saved: Mapping[str, Any], names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Rebuild arguments from their descriptions, {argument: description}.

    Returns:
        {argument: value}, and {argument: reason} of those that cannot be rebuilt.
    """
    built: dict[str, Any] = {}
    rejected: dict[str, str] = {}
    for name in names:
        try:
            if name in saved:
                built[name] = build(saved[name], texts=name in TEXTS)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            rejected[name] = " ".join(str(error).split())
    return built, rejected


def load_from_checkpoint(
    kind: type[Module],
    checkpoint_path: str | Path,
    map_location: Any = "cpu",
    *,
    hparams_file: None = None,
    strict: bool | None = True,
    weights_only: bool | None = True,
    **arguments: Any,
) -> Module:
    """Load a module and its weights from a checkpoint, without a trainer.

    Args:
        kind: class of the module.
        checkpoint_path: a .ckpt file.
        map_location: device of the module.
        hparams_file: Lightning's; the checkpoint has the arguments.
        strict: require all weights of an SFT module; GRPO requires those that are trained.
        weights_only: Lightning's; True, since a file chooses no code that runs.
        arguments: replace those of the checkpoint, or are missing there.

    Raises:
        ValueError: the file is damaged, or an argument is missing or not for a file to choose.
    """
    require(
        hparams_file is None,
        f"hparams_file is {hparams_file!r}, but the checkpoint has the arguments. Leave it out; "
        "keyword arguments replace those of the checkpoint.",
    )
    require(
        weights_only in (None, True),
        f"weights_only is {weights_only}, but a file must not choose code that runs. Leave it out.",
    )
    path = Path(checkpoint_path)
    checkpoint, saved = _read(path)
    wanted = find_wanted(kind, checkpoint.get(KEYWORDS, ()), saved)
    wanted = {name: default for name, default in wanted.items() if name not in arguments}
    built, missing = build_arguments(saved, wanted)
    needed = [name for name, default in wanted.items() if default is inspect.Parameter.empty]
    missing |= {name: "" for name in needed if name not in saved}
    if missing:
        raise _missing_error(path, kind.__name__, missing)
    module: Any = kind(**arguments, **built)
    if "tokenizer" in checkpoint:
        module.take_tokenizer(checkpoint)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    # GRPO's checkpoints hold trained weights only, which `on_load_checkpoint` has checked.
    is_strict = module.strict_loading and strict is not False
    module.load_state_dict(checkpoint["state_dict"], strict=is_strict)
    return module.to(map_location)


def find_wanted(kind: type, keywords: Iterable[str], saved: Iterable[str]) -> dict[str, Any]:
    """Return {argument: default, `empty` if required} that a class needs to be made again.

    Args:
        kind: its constructor may pass `*args` and `**kwargs` on to that of its base class.
        keywords: names of the arguments that its object was made with.
        saved: names of the arguments that have a description.
    """
    parameters = inspect.signature(kind).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    wanted: dict[str, Any] = {}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        # What the class itself gives its base class is saved as well, and not an argument of it.
        # Names of positional arguments are not known: any may be among `*args`.
        has_more = inspect.Parameter.VAR_POSITIONAL in kinds
        wanted = dict.fromkeys(saved if has_more else keywords, inspect.Parameter.empty)
    for parameter in parameters:
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            wanted[parameter.name] = parameter.default
    return wanted


def _read(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Read a checkpoint; return it, and the descriptions of its module's arguments."""
    checkpoint = read_checkpoint(path)
    saved = checkpoint.get(KEY, {})
    require(
        "state_dict" in checkpoint and isinstance(saved, Mapping),
        f"{path} is not a checkpoint of GRPO or SFT: expected state_dict and a dict {KEY}.",
    )
    return checkpoint, saved


def load_trained_policy(path: Path) -> Policy:
    """Load the policy of a checkpoint; nothing else of its module is constructed.

    Raises:
        ValueError: the file is damaged, or does not describe its model.
    """
    checkpoint, saved = _read(path)
    built, missing = build_arguments(saved, POLICY_ARGUMENTS)
    for name, kind in POLICY_ARGUMENTS.items():
        if not isinstance(built.get(name), kind | None):
            missing[name] = f"it is {type_with_article(built[name])}"
    scratch, pretrained = built.get("scratch"), built.get("pretrained")
    if scratch is None and pretrained is None:
        missing.setdefault("pretrained", "")
    if missing:
        raise _missing_error(path, "its module", missing)
    precision = built.get("precision")
    if scratch is None:
        policy = load_policy(str(pretrained), precision=precision, lora=built.get("lora"))
    else:
        tokenizer = deserialize_tokenizer(checkpoint.get("tokenizer"))
        model = scratch.build_model(tokenizer, seed=built.get("seed", 0))
        policy = build_policy(model, tokenizer, precision=precision)
    prefix = "policy."
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in checkpoint["state_dict"].items()
        if name.startswith(prefix)
    }
    state = policy.state_dict()
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    check_weights(weights, {n: w for n, w in state.items() if n in weights or n in trained})
    policy.load_state_dict(weights, strict=False)
    return policy


def _missing_error(path: Path, kind: str, missing: Mapping[str, str]) -> ValueError:
    """Build the error for arguments that a checkpoint does not provide; {argument: reason}."""
    listed = ", ".join(name + (f" ({why})" if why else "") for name, why in missing.items())
    return ValueError(
        f"{path} does not provide {listed} of {kind}: lambdas and objects in memory are not saved, "
        "and a checkpoint may only name options of litgrpo, optimizers and schedules of torch, and "
        "built-in rewards without texts among their arguments. Pass "
        f"{', '.join(missing)} to load_from_checkpoint; `export` takes --recipe."
    )
