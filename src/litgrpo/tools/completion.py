"""The verb `completion`: a script by which a shell completes verbs, keys, recipes and values."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

from litgrpo.arguments import require
from litgrpo.cli.key_help import Key, class_named, keys_of, subclasses
from litgrpo.cli.plan_keys import PLAN_KEYS
from litgrpo.cli.recipes import CLASSES, brought
from litgrpo.cli.run_keys import RUN_KEYS
from litgrpo.cli.trainer_cli import CALLBACKS
from litgrpo.cli.verbs import COMMANDS, LIGHTNING_VERBS

DEEPEST = 4  # dots of a key: model.objective.surrogate.clip_low has three


def completion(shell: Literal["bash", "zsh", "tcsh"] = "bash") -> None:
    """Print a script that completes verbs, keys, recipes and values in a shell.

    For bash: `litgrpo completion > ~/.local/share/bash-completion/completions/litgrpo`.

    Args:
        shell: which one: bash, zsh or tcsh.
    """
    require(find_spec("shtab") is not None, "completion needs: pip install 'litgrpo[completion]'")
    import shtab

    print(shtab.complete(parser(), shell))


def parser() -> argparse.ArgumentParser:
    """All verbs with their keys, as shtab reads them; nothing is ever parsed with it."""
    whole = argparse.ArgumentParser("litgrpo", add_help=False)
    verbs = whole.add_subparsers()
    for verb, text in LIGHTNING_VERBS.items():
        add(verbs.add_parser(verb, help=text), [*run_keys(), *recipe_keys()])
    for verb, (module, text) in COMMANDS.items():
        below = verbs.add_parser(verb, help=text)
        of_recipes = [*recipe_keys()] if verb in ("plan", "audit") else []
        add(below, [*function_keys(verb, module), *of_recipes], recipes=bool(of_recipes))
    return whole


def add(verb: argparse.ArgumentParser, keys: Iterable[Key], *, recipes: bool = True) -> None:
    """Give a verb its keys.

    Args:
        verb: its parser.
        keys: dotted ones.
        recipes: whether it takes `-c`.
    """
    if recipes:
        verb.add_argument("-c", "--config", choices=list(brought()), help="a recipe")
    for key in {each.name: each for each in keys}.values():
        text = key.text.partition(".")[0].replace("\n", " ").replace("%", "%%")
        verb.add_argument(f"--{key.name}", choices=values(key.hint), help=text)


def run_keys() -> Iterator[Key]:
    """Keys of the whole run."""
    for name, (hint, default, text) in RUN_KEYS.items():
        yield Key(name, hint, default, text)
    yield Key("ckpt_path", Literal["last", "best"], None, "go on from a checkpoint")
    yield Key("seed_everything", int, 0, "seed of model and data")


def recipe_keys() -> Iterator[Key]:
    """Keys of model, data and callbacks, as deep as they are named on a command line."""
    for root, path in CLASSES.items():
        yield from below(root, class_named(path, [object]))
    for name, owner in CALLBACKS.items():
        yield from keys_of(owner, name)


def below(prefix: str, owner: type) -> Iterator[Key]:
    """The keys of a class, and those of our classes that can stand there."""
    for key in keys_of(owner, prefix):
        yield key
        ours = [each for each in key.classes if each.__module__.startswith("litgrpo")]
        if key.name.count(".") < DEEPEST:
            for base in ours:
                for kind in [base, *subclasses(base)]:
                    yield from below(key.name, kind)


def function_keys(verb: str, module: str) -> Iterator[Key]:
    """Keys of a verb that is a function, or of `plan`."""
    if verb == "plan":
        for name, (hint, default, text) in PLAN_KEYS.items():
            yield Key(name, hint, default, text)
        return
    function = vars(import_module(module))[verb]
    hints = inspect.get_annotations(function, eval_str=True)
    for name, each in inspect.signature(function).parameters.items():
        if each.default is not inspect.Parameter.empty:
            yield Key(name, hints.get(name), each.default, "")


def values(hint: Any) -> list[str] | None:
    """What a key can be, where that is few."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    return None
