"""Constructor arguments of modules as plain values, and modules rebuilt from checkpoints.

Lightning saves `hparams` in checkpoints, in `hparams.yaml` and with loggers. Here they are numbers,
texts, lists and dicts; objects and functions are described by their import paths. A file must not
decide which code runs: `build` imports and calls classes of litgrpo, torch's optimizers and
schedules, and built-in reward functions. Nor must it decide what is reached: addresses, paths,
commands and names of keys are rejected. Both have to be given by the caller, except the name of the
trained model, without which no checkpoint of it could be loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import LightningModule

from litgrpo.arguments import check_imports, import_by_path, require, type_with_article
from litgrpo.checkpointing.shards import read_checkpoint
from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.load import Precision, build_policy, check_weights, load_policy
from litgrpo.models.loading.scratch import Scratch, deserialize_tokenizer
from litgrpo.models.policy import Policy
from litgrpo.rewards.reward import builtin_rewards
from litgrpo.text.secrets import mask_settings

KEY = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
OBJECT, FUNCTION, PARTIAL = "class_path", "import_path", "partial"
PLAIN = (type(None), bool, int, float, str)
# Packages of litgrpo whose classes a checkpoint may name. The others start processes, read files or
# the network, or import what their arguments name, as adapters of other libraries do.
PACKAGES = (
    *("algorithms", "environments", "evaluation", "learning", "models", "modules", "rewards"),
    "rollout",
)
ALLOWED = tuple(f"litgrpo.{name}." for name in PACKAGES)
ADAPTERS = "litgrpo.environments.adapters."
# Modules of torch whose classes a checkpoint may name, and the base classes of these classes.
TORCH = (torch.optim, torch.optim.lr_scheduler)
TORCH_KINDS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
BUILTIN_REWARDS = "litgrpo.rewards.builtin."
# Options that reach outside of the process, or import: servers, files, programs, keys.
OUTSIDE = frozenset(
    (
        *("address", "base_url", "folder", "headers", "master_address", "path", "url", "urls"),
        *("cache_dir", "checkpoints", "run_dir", "word_file"),
        *("args", "classifier", "command", "cwd", "engine_args", "env", "mcp_servers"),
        *("allow_public", "api_key", "api_key_env", "extra_body"),
        *("pretrained", "reference", "tokenizer"),  # of another model than the trained one
    )
)
ADDRESS = re.compile(
    r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE
)  # also as the value of another option
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
    """A description that names code, or something to reach, which a file must not choose."""


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
        NotTrusted: it names anything else than what `import_trusted` returns, switches a
            protection off, or sets an option of `OUTSIDE`.

    Example:
        >>> build({"import_path": "torch.optim.adamw.AdamW"})
        <class 'torch.optim.adamw.AdamW'>
    """
    if isinstance(description, list | tuple):
        return type(description)(build(each) for each in description)
    if isinstance(description, str) and ADDRESS.match(description):
        raise NotTrusted(f"address {description!r:.60}")
    if not isinstance(description, dict):
        return description
    for name, value in description.items():
        # A partial names its arguments `args`; they are built below.
        is_outside = name in OUTSIDE and value and PARTIAL not in description
        if is_outside:
            raise NotTrusted(f"{name} {value!r:.60}")
    if FUNCTION in description:
        return _import_callable(description[FUNCTION])
    if PARTIAL in description:
        arguments = build(description["args"]), build(description["kwargs"])
        return functools.partial(build(description[PARTIAL]), *arguments[0], **arguments[1])
    if OBJECT in description:
        kind = import_trusted(description[OBJECT])
        if not (inspect.isclass(kind) and dataclasses.is_dataclass(kind)):
            raise NotTrusted(description[OBJECT])
        return kind(**build(description["init_args"]))
    return {key: build(each) for key, each in description.items()}


def _import_callable(path: Any) -> Any:
    """Import a callable that training calls later, when no check of imports is active.

    So it is not any class of litgrpo: some import or start what their arguments name.
    """
    found = import_trusted(path)
    if inspect.isclass(found) and not issubclass(found, TORCH_KINDS):
        raise NotTrusted(str(path))
    return found


def import_trusted(path: Any) -> Any:
    """Import a class of litgrpo, an optimizer or schedule of torch, or a built-in reward function.

    Nothing is imported for any other path: importing a module runs its code.

    Raises:
        NotTrusted: for any other path.

    Example:
        >>> import_trusted("litgrpo.rollout.sampling.Sampling").__name__
        'Sampling'
    """
    path = str(path)
    name = path.rpartition(".")[2]
    for module in TORCH:
        found = vars(module).get(name)
        is_kind = inspect.isclass(found) and issubclass(found, TORCH_KINDS)
        if is_kind and path in (f"{module.__name__}.{name}", f"{found.__module__}.{name}"):
            return found
    if path.startswith(ALLOWED):
        with check_imports(str):  # it is a module of litgrpo
            found = import_by_path(path)
        # A module of litgrpo also has the names that it imports, such as `subprocess`.
        origin = str(getattr(found, "__module__", ""))
        is_class = inspect.isclass(found) and origin.startswith(ALLOWED)
        is_reward = origin.startswith(BUILTIN_REWARDS) and name in builtin_rewards()
        if (is_class and not origin.startswith(ADAPTERS)) or is_reward:
            return found
    raise NotTrusted(path)


def build_arguments(
    saved: Mapping[str, Any], names: Iterable[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Rebuild arguments from a checkpoint.

    Args:
        saved: descriptions, {argument: description}.
        names: the arguments that are wanted.

    Returns:
        {argument: value}, and {argument: reason} of those that cannot be rebuilt.
    """
    built: dict[str, Any] = {}
    rejected: dict[str, str] = {}
    with check_imports(import_trusted):
        for name in names:
            try:
                if name in saved:
                    is_own = name in POLICY_ARGUMENTS
                    value = saved[name]
                    built[name] = build(value) if is_own else build({name: value})[name]
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                rejected[name] = " ".join(str(error).split())
    return built, rejected


def load_from_checkpoint(
    kind: type[Module], checkpoint_path: str | Path, map_location: Any = "cpu", **arguments: Any
) -> Module:
    """Load a module and its weights from a checkpoint, without a trainer.

    Args:
        kind: class of the module.
        checkpoint_path: a .ckpt file.
        map_location: device of the module.
        arguments: replace those of the checkpoint, or are missing there.

    Raises:
        ValueError: the file is damaged; or an argument is missing, or its saved value names code
            or an address, path, command or key, which a checkpoint must not choose.
    """
    path = Path(checkpoint_path)
    checkpoint, saved = _read(path)
    wanted = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in arguments
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    built, missing = build_arguments(saved, wanted)
    needed = [name for name, default in wanted.items() if default is inspect.Parameter.empty]
    missing |= {name: "" for name in needed if name not in saved}
    if missing:
        raise _missing_error(path, kind.__name__, missing)
    given, from_file = set(iterate_texts(arguments)), set(iterate_texts(saved))

    def check(import_path: str) -> None:
        is_own = import_path.startswith("litgrpo.") and import_path not in from_file
        if import_path not in given and not is_own:
            import_trusted(import_path)

    try:
        with check_imports(check):
            module: Any = kind(**arguments, **built)
    except ValueError as error:
        rejected = _find_rejected(error)
        names = [name for name in built if rejected in set(iterate_texts(saved[name]))]
        if not names:
            raise
        raise _missing_error(path, kind.__name__, dict.fromkeys(names, rejected)) from error
    if "tokenizer" in checkpoint:
        module.take_tokenizer(checkpoint)
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
    return module.to(map_location)


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

    Args:
        path: a .ckpt file of `GRPO` or `SFT`.

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


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield the texts of a nested value.

    Example:
        >>> list(iterate_texts({"a": ["b", 1, {"c": "d"}]}))
        ['b', 'd']
    """
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from iterate_texts(vars(value))
    elif isinstance(value, Mapping):
        yield from iterate_texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from iterate_texts(each)


def _find_rejected(error: BaseException | None) -> str:
    """Return the import path that an error rejects, or that one of its causes does."""
    while error is not None and not isinstance(error, NotTrusted):
        error = error.__cause__
    return str(error or "")


def _missing_error(path: Path, kind: str, missing: Mapping[str, str]) -> ValueError:
    """Build the error for arguments that a checkpoint does not provide; {argument: reason}."""
    named = ", ".join(name + (f" ({why})" if why else "") for name, why in missing.items())
    return ValueError(
        f"{path} does not provide {named} of {kind}: lambdas and objects in memory are not saved, "
        "and a checkpoint may only name classes of litgrpo, optimizers and schedules of torch, and "
        "built-in rewards, and no address, path, command or key. Pass "
        f"{', '.join(missing)} to load_from_checkpoint; `export` takes "
        "--recipe."
    )
