"""Misspelled keys and texts for numbers, told before anything slow is imported.

To import what a recipe names takes seconds, so classes are read as source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import require
from litgrpo.cli.errors import unknown_argument
from litgrpo.cli.help_page import PACKAGE, file_of
from litgrpo.cli.recipes import CLASSES, RECIPE_FLAGS, plain

MODULES = {
    "GRPO": "training/grpo",
    "SFT": "training/sft",
    "PromptData": "data/prompt_data",
    "PairData": "data/pair_data",
}
CLASS_OPTIONS = [f"--{key}{end}" for key in CLASSES for end in ("", ".class_path")]
QUESTION = "help"  # as in --model.lora.help
# How a type is written in source, and in a message; what else a type may be is not judged here.
PLAIN = {"int": "int", "float": "float", "bool": "bool", "None": "null"}


@dataclass(frozen=True)
class Source:
    """A class, as its file has it.

    Args:
        file: its source.
        name: of the class.
        told: what a message calls it.
    """

    file: Path
    name: str
    told: str

    @property
    def arguments(self) -> dict[str, str]:
        """{argument: its type, as it is written}."""
        return arguments_of(self.file, self.name)

    def dataclass_of(self, argument: str) -> Source | None:
        """The dataclass of ours that an argument is, beside None and plain values."""
        found = (_imported(self.file, name) for name in self.arguments[argument].split(" | "))
        return next(filter(None, found), None)


def refuse_mistakes(words: Sequence[str]) -> None:
    """Refuse a key that model, data or trainer do not have, and a text where a number belongs.

    Only what is sure is refused here: keys of our classes, of their dataclasses, and of Lightning's
    trainer. Everything else is left to the parser.

    Args:
        words: after the verb, with files for recipes.

    Raises:
        ValueError: there is one; with the nearest key that there is, or what is expected.
    """
    groups: dict[str, Source | None] = {key: _named(name) for key, name in CLASSES.items()}
    groups["trainer"] = trainer()
    split = [part for word in words for part in word.split("=", 1)]
    for option, value in pairwise([*split, ""]):
        group, *path = option.removeprefix("--").split(".")
        if option in RECIPE_FLAGS:
            _refuse_in_recipe(value, groups)
        elif option in CLASS_OPTIONS:
            groups[group] = _named(value)
        elif option.startswith("--") and group in groups and QUESTION not in path:
            keys = [part for part in path if part != "init_args"]
            _refuse(group, groups[group], keys, value)


def _refuse_in_recipe(word: str, groups: dict[str, Source | None]) -> None:
    try:
        recipe = _mapping(yaml.safe_load(Path(word).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # the parser says so
    given = {group: _mapping(recipe.get(group)) for group in groups}
    groups |= {
        key: _named(given[key]["class_path"]) for key in CLASSES if "class_path" in given[key]
    }
    given |= {key: _mapping(given[key].get("init_args")) for key in CLASSES}
    for group, content in given.items():
        for path, value in _values(content):
            _refuse(group, groups[group], path, value)


def _mapping(content: Any) -> dict[Any, Any]:
    return content if isinstance(content, dict) else {}


def _values(content: Any) -> Iterator[tuple[list[str], Any]]:
    """Path and value of every key of a recipe's mapping; objects that name their class are left."""
    if "class_path" not in _mapping(content):
        for key, inner in _mapping(content).items():
            yield [str(key)], inner
            yield from (([str(key), *path], value) for path, value in _values(inner))


def _refuse(group: str, source: Source | None, path: Sequence[str], value: Any) -> None:
    """Follow a key's parts as far as the classes are known, and look at its value."""
    so_far, types = [group], [""]
    for part in path:
        name = part.removesuffix("+")  # adds to a list
        if source is None or name == "class_path":
            return
        known = source.arguments
        require(name in known, unknown_argument(so_far, name, source.told, list(known)))
        types, source = known[name].split(" | "), source.dataclass_of(name)
        so_far.append(name)
    expected = " or ".join(PLAIN.get(each, "") for each in types)
    wrong = PLAIN.keys() >= set(types) and _is_no_number(value)
    require(not wrong, f"{'.'.join(so_far)} is {value!r}, expected {expected}")


def _is_no_number(value: Any) -> bool:
    """Whether a value is a text that no reading makes a number."""
    read = plain(value) if isinstance(value, str) else value  # "false" may have been quoted
    try:
        return isinstance(read, str) and bool(read.strip()) and isnan(float(read))
    except ValueError:
        return True


def _named(class_path: Any) -> Source | None:
    """One of our modules by what a recipe calls it, or None for anybody else's class."""
    package, _, name = str(class_path).rpartition(".")
    ours = name in MODULES and package.partition(".")[0] in ("", "litgrpo")
    return Source(PACKAGE / f"{MODULES[name]}.py", name, name) if ours else None


def trainer() -> Source:
    """Lightning's, which is found without being imported."""
    found = find_spec("lightning")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "pytorch" / "trainer" / "trainer.py"
    return Source(file, "Trainer", told="")


@cache
def arguments_of(file: Path, name: str) -> dict[str, str]:
    """{argument: its type, as it is written} of a class.

    Args:
        file: its source.
        name: of the class.
    """
    body = [node for found in _classes(file, name) for node in found.body]
    pairs = [(ast.unparse(n.target), n.annotation) for n in body if isinstance(n, ast.AnnAssign)]
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = [*node.args.args[1:], *node.args.kwonlyargs]
            pairs = [(each.arg, each.annotation or ast.Constant("")) for each in given]
    return {argument: ast.unparse(hint) for argument, hint in pairs}


def _imported(file: Path, name: str) -> Source | None:
    marks = [ast.unparse(mark) for each in _classes(file, name) for mark in each.decorator_list]
    if any(mark.startswith("dataclass") for mark in marks):
        return Source(file, name, name)
    imports = [n for n in _tree(file).body if isinstance(n, ast.ImportFrom) and n.module]
    modules = [str(n.module) for n in imports if name in [each.name for each in n.names]]
    files = [file_of(module) for module in modules if module.startswith("litgrpo.")]
    found = (_imported(each, name) for each in files if each.is_file())
    return next(found, None)


def _classes(file: Path, name: str) -> list[ast.ClassDef]:
    return [n for n in _tree(file).body if isinstance(n, ast.ClassDef) and n.name == name]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
