"""Misspelled keys, told before anything slow is imported: classes are read as source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import require
from litgrpo.cli.errors import unknown_argument
from litgrpo.cli.help_page import PACKAGE, file_of
from litgrpo.cli.recipes import CLASSES, RECIPE_FLAGS

MODULES = {"GRPO": "grpo", "SFT": "sft", "PromptData": "prompt_data", "PairData": "pair_data"}
CLASS_OPTIONS = [f"--{key}{end}" for key in CLASSES for end in ("", ".class_path")]
QUESTION = "help"  # as in --model.lora.help


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
    def arguments(self) -> dict[str, Source | None]:
        """{argument: the dataclass of ours that it is, if it is one}."""
        return arguments_of(self.file, self.name)


def refuse_misspelled_keys(words: Sequence[str]) -> None:
    """Refuse a key that model, data or trainer do not have, in recipes and on a command line.

    Only what is sure is refused here: keys of our classes, of their dataclasses, and of Lightning's
    trainer. Everything else is left to the parser.

    Args:
        words: after the verb, with files for recipes.

    Raises:
        ValueError: there is one, and the nearest that there is.
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
            _refuse_unknown(group, groups[group], [part for part in path if part != "init_args"])


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
        for path in _paths(content):
            _refuse_unknown(group, groups[group], path)


def _mapping(content: Any) -> dict[Any, Any]:
    return content if isinstance(content, dict) else {}


def _paths(content: Any) -> Iterator[list[str]]:
    """The path of every key in a mapping of a recipe; objects that name their class are left."""
    if "class_path" not in _mapping(content):
        for key, inner in _mapping(content).items():
            yield [str(key)]
            yield from ([str(key), *path] for path in _paths(inner))


def _refuse_unknown(group: str, source: Source | None, path: Sequence[str]) -> None:
    """Follow a key's parts as far as the classes are known."""
    so_far = [group]
    for part in path:
        name = part.removesuffix("+")  # adds to a list
        if source is None or name == "class_path":
            return
        known = source.arguments
        require(name in known, unknown_argument(so_far, name, source.told, list(known)))
        source = known[name]
        so_far.append(name)


def _named(class_path: Any) -> Source | None:
    """One of our modules by what a recipe calls it, or None for anybody else's class."""
    package, _, name = str(class_path).rpartition(".")
    ours = name in MODULES and package.partition(".")[0] in ("", "litgrpo")
    return Source(PACKAGE / "modules" / f"{MODULES[name]}.py", name, name) if ours else None


def trainer() -> Source:
    """Lightning's, which is found without being imported."""
    found = find_spec("lightning")
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin).parent / "pytorch" / "trainer" / "trainer.py"
    return Source(file, "Trainer", told="")


@cache
def arguments_of(file: Path, name: str) -> dict[str, Source | None]:
    """{argument: the dataclass of ours that it is, if it is one} of a class.

    Args:
        file: its source.
        name: of the class.
    """
    body = [node for found in _classes(file, name) for node in found.body]
    pairs = [(ast.unparse(n.target), n.annotation) for n in body if isinstance(n, ast.AnnAssign)]
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            given = [*node.args.args[1:], *node.args.kwonlyargs]
            pairs = [(each.arg, each.annotation or ast.Constant(None)) for each in given]
    return {argument: _dataclass(file, hint) for argument, hint in pairs}


def _dataclass(file: Path, hint: ast.expr) -> Source | None:
    """The dataclass of ours that a type is, beside None and plain values."""
    found = (_imported(file, name) for name in ast.unparse(hint).split(" | "))
    return next(filter(None, found), None)


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
