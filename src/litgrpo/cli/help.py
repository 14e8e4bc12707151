"""Help of commands that read recipes, and of the options below any option."""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from docstring_parser import parse
from lightning.pytorch import Trainer

from litgrpo.argument_types import (
    UNSET,
    classes_in,
    find_class,
    members,
    subclasses,
    values_of_mapping,
)
from litgrpo.cli.mistakes import as_written
from litgrpo.cli.options import Option, find_option, options_of, type_name
from litgrpo.cli.parser import CALLBACKS, RUN_OPTIONS, configure_jsonargparse, import_named_classes
from litgrpo.cli.recipes import DEFAULT_CLASSES, built_in_recipes, pair_words
from litgrpo.cli.settings import CommandLine

WIDTH, COLUMN = 100, 34  # without a terminal; of the descriptions
END_OF_SENTENCE = re.compile(r"\. (?=[A-Z`])")
QUESTION = re.compile(r"--([\w.-]+)\.help")
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
    """Return the page of `COMMAND --help`: options of the command, of GRPO and of PromptData."""
    import_named_classes()
    page = new_page(f"{program} {command} [-c RECIPE ...] [--OPTION VALUE ...]", summary)
    recipes = ", ".join(name for name in built_in_recipes() if "/" not in name)
    group = page.add_argument_group("run")
    group.add_argument(
        "-c",
        metavar="RECIPE",
        help=f"YAML file or built-in recipe; the last one wins. Built-in: {recipes}",
    )
    for name, option in (options_of(extra) if extra is not None else {}).items():
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
    """Return the page of `COMMAND --help` of a command that reads no recipe."""
    options = options_of(function).values()
    required = [option for option in options if option.default is UNSET]
    names = [option.key.upper() for option in required]
    page = new_page(" ".join([program, command, *names, "[--OPTION VALUE ...]"]), summary)
    group = page.add_argument_group("arguments")
    for option in options:
        add(group, option.key if option in required else f"--{option.key}", option)
    return page.format_help()


def new_page(usage: str, summary: str = "") -> argparse.ArgumentParser:
    """Return a page without options."""
    return argparse.ArgumentParser(
        usage=usage,
        description=f"{summary[:1].upper()}{summary[1:]}." if summary else None,
        formatter_class=PageFormatter,
        add_help=False,
    )


def add(group: Any, flag: str, option: Option) -> None:
    """Add an option to a page, with its description, its names and its default if they say much."""
    default, notes = option.default, []
    if get_origin(option.hint) is Literal:
        notes.append(", ".join(map(str, get_args(option.hint))))
    if default not in (UNSET, None, False, []) and isinstance(default, int | float | str | list):
        notes.append(f"default: {default}")
    add_text(group, flag, END_OF_SENTENCE.split(option.text)[0], "; ".join(notes))


def add_text(group: Any, flag: str, text: str, notes: str) -> None:
    """Add an option to a page, with a text and notes in brackets."""
    text = text.rstrip(".") + (f" ({notes})" if notes else "")
    metavar = "" if flag.startswith("--") else flag.upper()
    group.add_argument(flag, metavar=metavar, help=text.replace("%", "%%"))


def find_question(words: Sequence[str]) -> tuple[str, str, list[str]] | None:
    """Return option, class and other words of the first `--OPTION.help [CLASS]`; None without one.

    Example:
        >>> find_question(["-c", "a.yaml", "--model.engine.help", "StaticEngine"])
        ('model.engine', 'StaticEngine', ['-c=a.yaml'])
    """
    question: tuple[str, str] | None = None
    other_words: list[str] = []
    for option, value in pair_words(words):
        if question is None and (match := QUESTION.fullmatch(option)):
            question = match[1], value or ""
        elif option and value is not None:
            other_words.append(f"{option}={value}")
        else:
            other_words.append(option or str(value))
    return None if question is None else (*question, other_words)


def option_page(key: str, name: str, words: Sequence[str]) -> str:
    """Return what an option is, and the options below it.

    Args:
        key: dotted name of the option.
        name: class that it is explained for; "" for its default.
        words: the rest of the command line, whose recipes name the classes of model and data.

    Raises:
        ValueError: there is no such option or class.
    """
    configure_jsonargparse()
    import_named_classes()
    command_line = CommandLine.read(words, {"trainer": Trainer, **CALLBACKS})
    option = find_option(key, command_line.hints)
    classes = classes_in(option.hint)
    notes = type_name(option.hint) + default_text(option.default)
    text = [f"--{option.key} ({notes})", *textwrap.wrap(option.text, width())]
    if name:
        owner: type | None = find_class(name, classes or [object])
    else:
        concrete = [kind for kind in classes if not inspect.isabstract(kind)]
        selected = find_configured_class(option, command_line.settings, classes)
        owner = selected or find_default_class(option) or next(iter(concrete), None)
    if owner is not None:
        page = new_page(argparse.SUPPRESS)
        title = describe_class(owner).rstrip(".")
        group = page.add_argument_group(textwrap.fill(title, width() - 1))
        # Each value of a mapping is an object, such as `model.rewards.NAME`.
        is_mapping = not any(kind in members(option.hint) for kind in classes)
        is_mapping &= values_of_mapping(option.hint) is not UNSET
        above = f"{option.key}.NAME" if is_mapping else option.key
        for inner in options_of(owner, above).values():
            default = default_text(inner.default)
            add_text(group, f"--{inner.key}", inner.text, type_name(inner.hint) + default)
        text += ["", page.format_help().strip()]
    kinds = [kind for base in classes for kind in subclasses(base)]
    if not name and len(kinds) > 1 and "." in key:
        text += ["", f"Classes with options (--{key}.help CLASS):"]
        text += [wrap_item(describe_class(kind)) for kind in kinds]
    if inspect.isfunction(option.default):
        module = option.default.__module__
        functions = inspect.getmembers(inspect.getmodule(option.default), inspect.isfunction)
        text += ["", "Functions, given by import path:"]
        text += [
            f"  {module}.{function_name}"
            for function_name, function in functions
            if function.__module__ == module and not function_name.startswith("_")
        ]
    return "\n".join(text)


def describe_class(kind: type) -> str:
    """Return the name of a class with the first sentence of its docstring."""
    return ": ".join(filter(None, [kind.__name__, parse(kind.__doc__ or "").short_description]))


def wrap_item(line: str) -> str:
    """Return a line of a list, indented and as wide as the terminal."""
    return textwrap.fill(line, width(), initial_indent="  ", subsequent_indent="    ")


def find_default_class(option: Option) -> type | None:
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
    return f", default: {as_written(default) if default in (None, True, False, '') else default}"


def find_configured_class(
    option: Option, settings: Mapping[str, Any], bases: Sequence[type]
) -> type | None:
    """Return the class that the recipes name for an option; None if they name none."""
    node: Any = settings
    for part in option.key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if isinstance(node, str) and str in members(option.hint):  # a value, such as a file
        return None
    path = node.get("class_path") if isinstance(node, Mapping) else node
    return find_class(path, bases) if isinstance(path, str) and bases else None


def width() -> int:
    """Return the columns of the terminal; without one, `WIDTH`."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


class PageFormatter(argparse.HelpFormatter):
    """Help of a command, as wide as the terminal."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=COLUMN, width=width())
