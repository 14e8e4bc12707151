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
    """

    file: Path
    name: str

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
    groups["trainer"] = _trainer()
    split = [part for word in words for part in _apart(word)]
    for option, value in pairwise([*split, ""]):
        group, *path = option.removeprefix("--").split(".")
        if option in RECIPE_FLAGS:
            _refuse_in_recipe(value, groups)
        elif option in CLASS_OPTIONS:
            groups[group] = _named(value)
        elif option.startswith("--") and group in groups and QUESTION not in path:
            _refuse_unknown(group, groups[group], [part for part in path if part != "init_args"])


def _apart(word: str) -> list[str]:
    """`--key=value` as two words."""
    return word.split("=", 1) if word.startswith("--") else [word]


def _refuse_in_recipe(word: str, groups: dict[str, Source | None]) -> None:
    try:
        recipe = yaml.safe_load(Path(word).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return  # the parser says so
    for group, source in groups.items():
        content = recipe.get(group) if isinstance(recipe, dict) else None
        if isinstance(content, dict) and group in CLASSES:
            groups[group] = _named(content["class_path"]) if "class_path" in content else source
            content = content.get("init_args")
        for path in _paths(content):
            _refuse_unknown(group, groups[group], path)


def _paths(content: Any) -> Iterator[list[str]]:
    """The path of every key in a mapping of a recipe; objects that name their class are left."""
    if not isinstance(content, dict) or "class_path" in content:
        return
    for key, inner in content.items():
        yield [str(key)]
        yield from ([str(key), *path] for path in _paths(inner))


def _refuse_unknown(group: str, source: Source | None, path: Sequence[str]) -> None:
    """Follow a key's parts as far as the classes are known."""
    so_far = [group]
    for part in path:
        known = source.arguments if source else {}
        name = part.removesuffix("+")  # adds to a list
        if not source or name == "class_path":
            return
        owner = "" if group == "trainer" else source.name
        require(name in known, unknown_argument(so_far, name, owner, list(known)))
        source = known[name]
        so_far.append(name)


def _named(class_path: Any) -> Source | None:
    """One of our modules by what a recipe calls it, or None for anybody else's class."""
    package, _, name = str(class_path).rpartition(".")
    ours = name in MODULES and package.partition(".")[0] in ("", "litgrpo")
    return Source(PACKAGE / "modules" / f"{MODULES[name]}.py", name) if ours else None


def _trainer() -> Source | None:
    found = find_spec("lightning")
    folders = [Path(folder) for folder in found.submodule_search_locations or []] if found else []
    files = [folder / "pytorch" / "trainer" / "trainer.py" for folder in folders]
    return next((Source(file, "Trainer") for file in files if file.is_file()), None)


@cache
def arguments_of(file: Path, name: str) -> dict[str, Source | None]:
    """{argument: the dataclass of ours that it is, if it is one} of a class.

    Args:
        file: its source.
        name: of the class.
    """
    node = _class(file, name)
    if node is None:
        return {}
    if made := [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]:
        given = made[0].args
        pairs = [(each.arg, each.annotation) for each in [*given.args[1:], *given.kwonlyargs]]
    else:
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        pairs = [(ast.unparse(each.target), each.annotation) for each in fields]
    return {argument: _dataclass(file, hint) for argument, hint in pairs}


def _dataclass(file: Path, hint: ast.expr | None) -> Source | None:
    """The dataclass of ours that a type is, beside None and plain values."""
    names = ast.unparse(hint).split(" | ") if hint else []
    found = [source for name in names if (source := _imported(file, name))]
    return found[0] if len(found) == 1 else None


def _imported(file: Path, name: str) -> Source | None:
    node = _class(file, name)
    marks = [ast.unparse(each) for each in node.decorator_list] if node else []
    if any(mark.startswith("dataclass") for mark in marks):
        return Source(file, name)
    imports = [n for n in _tree(file).body if isinstance(n, ast.ImportFrom) and n.module]
    modules = [str(n.module) for n in imports if name in [each.name for each in n.names]]
    files = [file_of(module) for module in modules if module.startswith("litgrpo.")]
    return _imported(files[0], name) if files and files[0].is_file() else None


def _class(file: Path, name: str) -> ast.ClassDef | None:
    found = [n for n in _tree(file).body if isinstance(n, ast.ClassDef) and n.name == name]
    return next(iter(found), None)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
