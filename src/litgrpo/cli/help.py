"""Help of commands that read recipes, and of the options below any option."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from docstring_parser import parse
from jsonargparse import ArgumentParser, DefaultHelpFormatter
from lightning.pytorch import Trainer

from litgrpo.argument_types import UNSET, classes_in, find_class, subclasses
from litgrpo.cli.options import Option, find_option, options_of, type_name
from litgrpo.cli.parser import CALLBACKS, RUN_OPTIONS, configure_jsonargparse, import_named_classes
from litgrpo.cli.recipes import DEFAULT_CLASSES, built_in_recipes
from litgrpo.cli.settings import CommandLine

WIDTH, COLUMN = 100, 34  # without a terminal; of the descriptions
END_OF_SENTENCE = re.compile(r"\. (?=[A-Z`])")
QUESTION = re.compile(r"--([\w.-]+)\.help(?:=(.*))?")
CALL_TEXTS = {
    "ckpt_path": "Checkpoint to load: last, best, a .ckpt file or a run folder.",
    "seed_everything": "Seed of model and data (default: 0).",
    "print_config": "Print every option with its value as YAML, and exit.",
}
MORE = """\
{program} {command} --model.lora.help           options below an option
{program} {command} --model.engine.help CLASS   options of a class
{program} {command} --model.help SFT            options of SFT"""


def command_page(
    program: str, command: str, summary: str, extra: Callable[..., Any] | None = None
) -> str:
    """Return the page of `COMMAND --help`: options of the command, of GRPO and of PromptData.

    Args:
        program: how it was started.
        command: its name.
        summary: what it does.
        extra: a function whose options the command has beside those of `fit`.
    """
    import_named_classes()
    page = argparse.ArgumentParser(
        prog=f"{program} {command}",
        usage=f"{program} {command} [-c RECIPE ...] [--OPTION VALUE ...]",
        description=f"{summary[:1].upper()}{summary[1:]}.",
        formatter_class=PageFormatter,
        add_help=False,
    )
    recipes = ", ".join(name for name in built_in_recipes() if "/" not in name)
    group = page.add_argument_group("run")
    group.add_argument(
        "-c",
        metavar="RECIPE",
        help=f"YAML file or built-in recipe; the last one wins. Built-in: {recipes}",
    )
    for name, option in (options_of(extra) if extra is not None else {}).items():
        if name != "given":
            add(group, f"--{name}", option)
    for name, text in CALL_TEXTS.items():
        group.add_argument(f"--{name}", metavar="", help=text)
    for name, (_, _, text) in RUN_OPTIONS.items():
        group.add_argument(f"--{name}", metavar="", help=text)
    for key, path in DEFAULT_CLASSES.items():
        kind = find_class(path, [object])
        group = page.add_argument_group(f"{key}: options of {kind.__name__}")
        for option in options_of(kind, key).values():
            add(group, f"--{option.key}", option)
    page.add_argument_group(
        "trainer", "--trainer.OPTION, of Lightning's Trainer: accelerator, devices, strategy, ..."
    )
    page.add_argument_group("callbacks", f"--NAME.OPTION, with NAME one of {', '.join(CALLBACKS)}")
    return f"{page.format_help()}\n{MORE.format(program=program, command=command)}"


def function_page(
    program: str, command: str, summary: str, function: Callable[..., Any] | None
) -> str:
    """Return the page of `COMMAND --help` of a command that reads no recipe.

    Args:
        program: how it was started.
        command: its name.
        summary: what it does.
        function: whose options the command has.
    """
    options = options_of(function).values()
    required = [option for option in options if option.default is UNSET]
    page = argparse.ArgumentParser(
        prog=f"{program} {command}",
        usage=" ".join([program, command, *(option.key.upper() for option in required)])
        + " [--OPTION VALUE ...]",
        description=f"{summary[:1].upper()}{summary[1:]}.",
        formatter_class=PageFormatter,
        add_help=False,
    )
    group = page.add_argument_group("arguments")
    for option in options:
        add(group, option.key if option in required else f"--{option.key}", option)
    return page.format_help()


def add(group: Any, flag: str, option: Option) -> None:
    """Add an option to a page, with its description, its names and its default if they say much."""
    default, notes = option.default, []
    if get_origin(option.hint) is Literal:
        notes.append(", ".join(map(str, get_args(option.hint))))
    if default not in (UNSET, None, False, []) and isinstance(default, int | float | str | list):
        notes.append(f"default: {default}")
    sentence = END_OF_SENTENCE.split(option.text)[0].rstrip(".")
    sentence += f" ({'; '.join(notes)})" if notes else ""
    metavar = "" if flag.startswith("--") else flag.upper()
    group.add_argument(flag, metavar=metavar, help=sentence.replace("%", "%%"))


def find_question(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the option and the class of the first `--OPTION.help [CLASS]`; None without one.

    Example:
        >>> find_question(["-c", "a.yaml", "--model.engine.help", "StaticEngine"])
        ('model.engine', 'StaticEngine')
    """
    for word, following in pairwise([*words, ""]):
        if match := QUESTION.fullmatch(word):
            return match[1], match[2] or ("" if following.startswith("-") else following)
    return None


def option_page(key: str, name: str, words: Sequence[str]) -> str:
    """Return what an option is, and the options below it.

    Args:
        key: dotted name of the option.
        name: class that it is explained for; "" for its default.
        words: of the command line, whose recipes name the classes of model and data.

    Raises:
        ValueError: there is no such option or class.
    """
    configure_jsonargparse()
    import_named_classes()
    command_line = read_settings(words)
    option = find_option(key, command_line.hints)
    classes = classes_in(option.hint)
    lines = [
        f"--{option.key} ({type_name(option.hint)}{default_text(option.default)})",
        option.text,
    ]
    if name:
        owner: type | None = find_class(name, classes or [object])
    else:
        concrete = [kind for kind in classes if not inspect.isabstract(kind)]
        selected = find_configured_class(key, command_line.settings, classes)
        owner = selected or default_class(option) or next(iter(concrete), None)
    if owner is not None:
        page = ArgumentParser(
            usage=argparse.SUPPRESS, add_help=False, formatter_class=WideFormatter
        )
        page.add_class_arguments(owner, option.key, sub_configs=False)
        lines += ["", page.format_help().strip()]
    kinds = [kind for base in classes for kind in subclasses(base)]
    if not name and len(kinds) > 1 and "." in key:
        lines += ["", f"Classes with options (--{key}.help CLASS):"]
        lines += [
            f"  {kind.__name__}: {parse(kind.__doc__ or '').short_description}" for kind in kinds
        ]
    if inspect.isfunction(option.default):
        module = option.default.__module__
        functions = inspect.getmembers(inspect.getmodule(option.default), inspect.isfunction)
        names = [
            f"{module}.{function_name}"
            for function_name, f in functions
            if f.__module__ == module and function_name[:1] != "_"
        ]
        lines += ["", "Functions, given by import path:", *(f"  {path}" for path in names)]
    return "\n".join(lines)


def default_class(option: Option) -> type | None:
    """Return the class of an option's default; None if it is not an object with options."""
    kind = option.default if inspect.isclass(option.default) else type(option.default)
    return kind if option.default is not UNSET and classes_in(kind) else None


def default_text(default: Any) -> str:
    """Return `, default: VALUE`; "" for a required option."""
    if default is UNSET:
        return ""
    if inspect.isclass(default) or inspect.isfunction(default):
        return f", default: {default.__name__}"
    if classes_in(type(default)):
        return f", default: {type(default).__name__}()"
    return f", default: {'null' if default is None else default}"


def read_settings(words: Sequence[str]) -> CommandLine:
    """Return the settings of a command line without its question."""
    asked = [word for word in words if not QUESTION.fullmatch(word)]
    following = words[words.index(next(w for w in words if QUESTION.fullmatch(w))) + 1 :][:1]
    if following and not following[0].startswith("-"):
        asked.remove(following[0])
    return CommandLine.read(asked, {"trainer": Trainer, **CALLBACKS})


def find_configured_class(
    key: str, settings: Mapping[str, Any], bases: Sequence[type]
) -> type | None:
    """Return the class that the recipes name for an option; None if they name none."""
    node: Any = settings
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    path = node.get("class_path") if isinstance(node, Mapping) else node
    return find_class(path, bases) if isinstance(path, str) and bases else None


def width() -> int:
    """Return the columns of the terminal; without one, `WIDTH`."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


class WideFormatter(DefaultHelpFormatter):
    """jsonargparse's help of a class, with types and defaults, as wide as the terminal."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=COLUMN, width=width())


class PageFormatter(argparse.HelpFormatter):
    """Help of a command, as wide as the terminal."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=COLUMN, width=width())
