"""Names of the previous version, for this version only: {old: new}, and recipes that use them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from litgrpo.cli.recipes import EnvironmentKeys, Sources, recipe_file, refuse_repeated_keys
from litgrpo.training.old_paths import current_path, longest_row

KEYS = {
    "model.learning": "model.update",
    "model.guard": "model.reward_runner",
    "model.max_redraws": "model.dynamic_sampling_attempts",
}
# Optimizers of torch whose name another library has, too: after its import it would be ambiguous.
OF_TORCH = {"Adagrad", "Adam", "AdamW", "RMSprop", "SGD"}
# The environment of earlier versions that left every completion as it is.
SINGLE_TURN = tuple(
    f"{path}SingleTurn"
    for path in ("", "litgrpo.rollout.engines.base.", "litgrpo.rollout.environment.")
)
RECIPE_FLAGS = ("c", "config")


class OldNames:
    """Replaces old names in YAML and in command lines, and remembers which it met."""

    def __init__(self) -> None:
        self.met: dict[str, str] = {}

    def warn(self) -> None:
        """Print one line for each old name that was met."""
        for old, new in self.met.items():
            line = f"warning: {old} is now {new}; the old name works in this version only"
            print(line, file=sys.stderr)

    def path(self, path: str) -> str:
        """An import path or the short name of a class, as it is now.

        Example:
            >>> OldNames().path("litgrpo.objectives.kl.k1")
            'litgrpo.algorithms.kl.k1'
        """
        if path in SINGLE_TURN:
            self.met["environment: SingleTurn"] = "environment: null"
            return "null"
        new = current_path(path)
        if new != path:
            self.met[path] = new
        return new

    def key(self, key: str) -> str:
        """A dotted key, with `init_args` or, as the command line allows, without.

        Example:
            >>> OldNames().key("model.init_args.learning.epochs_per_rollout")
            'model.init_args.update.epochs_per_rollout'
        """
        row = longest_row(key.replace(".init_args", ""), KEYS)
        if not row:
            return key
        self.met[row] = KEYS[row]
        name, new = row.rpartition(".")[2], KEYS[row].rpartition(".")[2]
        return key.replace(f".{name}", f".{new}", 1)

    def text(self, text: str, key: str = "") -> str:
        """YAML with the new names; all else, comments too, stays to the letter.

        Args:
            text: a whole recipe, or the value of a key. Broken YAML is left to the parser.
            key: that dotted key.
        """
        try:
            node = yaml.compose(text)
        except yaml.YAMLError:
            return text
        # {where a name begins: (where it ends, the new one)}; a node may be met again by an alias.
        edits = {start: (end, new) for start, end, new in self._edits(node, key)}
        for start, (end, new) in sorted(edits.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _edits(self, node: yaml.Node | None, key: str) -> Iterator[tuple[int, int, str]]:
        match node:
            case yaml.ScalarNode():
                yield from _edit(node, self.path(_of_torch(node.value, key)))
            case yaml.SequenceNode():
                for inner in node.value:
                    yield from self._edits(inner, key)
            case yaml.MappingNode() if (named := _single_turn(node)) is not None:
                yield node.start_mark.index, named, self.path("SingleTurn")
            case yaml.MappingNode():
                prefix = f"{key}." if key else ""
                names = {name.value for name, _ in node.value if isinstance(name.value, str)}
                for name, inner in node.value:
                    place = self.key(f"{prefix}{name.value}")
                    new = place.removeprefix(prefix)
                    if new not in names:  # else it stays, and the parser refuses the old one
                        yield from _edit(name, new)
                    yield from self._edits(inner, place)

    def words(self, words: Sequence[str], read: Callable[[str], str]) -> list[str]:
        """A command line with the new names.

        Args:
            words: after the verb.
            read: is given the file after each `-c`; what it returns is put in place of the file.
        """
        result, key = [], ""
        for word in (part for given in words for part in _apart(given)):
            option, equals, value = word.partition("=")
            if key in RECIPE_FLAGS:
                key, new = "", read(word)
            elif option.startswith("-"):
                old = option.lstrip("-")
                key = self.key(old)
                new = option.replace(old, key) + equals + self.text(value, key)
            else:
                key, new = "", self.text(word, key)
            result.append(new)
        return result


def current_words(
    words: Sequence[str], folder: Path, convert: Callable[[Path], str | None]
) -> list[str]:
    """A command line without old names, after a line of warning for each of them.

    Args:
        words: after the verb.
        folder: for copies of recipes in which something was replaced.
        convert: makes a recipe of a file in another format, or None of a recipe.
    """
    names, sources, environment = OldNames(), Sources(words), EnvironmentKeys(words)

    def read(word: str) -> str:
        path = recipe_file(word)
        old = path.read_text(encoding="utf-8")
        refuse_repeated_keys(old, word)
        new = environment.content(sources.text(names.text(convert(path) or old)))
        if new == old:
            return str(path)
        # A run is named after its recipe, so that the copy keeps the name.
        copy = folder / str(len(list(folder.iterdir()))) / path.with_suffix(".yaml").name
        copy.parent.mkdir()
        copy.write_text(new, encoding="utf-8")
        return str(copy)

    environment.others = sources.words(names.words(environment.others, read))
    words = environment.words()
    names.warn()
    return words


def current_recipe(text: str) -> Any:
    """The content of a recipe of either version, after a line of warning for each old name."""
    names = OldNames()
    content = yaml.safe_load(names.text(text))
    names.warn()
    return content


def _of_torch(value: str, key: str) -> str:
    """The whole path of an optimizer of torch that is given by its name; all else as it is."""
    place = key.replace(".init_args", "").removesuffix(".class_path")
    return f"torch.optim.{value}" if place == "model.optimizer" and value in OF_TORCH else value


def _single_turn(node: yaml.MappingNode) -> int | None:
    """Where the class path of an environment that does nothing ends; None for any other mapping."""
    for name, inner in node.value:
        if name.value == "class_path" and inner.value in SINGLE_TURN:
            return (node if node.flow_style else inner).end_mark.index
    return None


def _edit(node: yaml.ScalarNode, new: str) -> Iterator[tuple[int, int, str]]:
    if new != node.value:
        quote = node.style or ""
        yield node.start_mark.index, node.end_mark.index, f"{quote}{new}{quote}"


def _apart(word: str) -> list[str]:
    """`--config=FILE` as two words, every other word as it is."""
    return word.split("=", 1) if word.startswith("--config=") else [word]
