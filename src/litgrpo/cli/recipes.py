"""Recipes: the user's files, and those that litgrpo brings, as `fit` is given them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import did_you_mean, require

FOLDER = Path(__file__).parents[1] / "configs"
CLONES_FOLDER = "configs/"  # where the same recipes are in a clone
SOURCES = ("train", "val", "test", "predict")  # keys of data
RECIPE_FLAGS = ("-c", "--config")
OF_TORCH = ("Adagrad", "AdamW", "Adam", "RMSprop", "SGD")
# What a command line without a recipe trains or asks, and what `predict` does not need to be told.
CLASSES = {"model": "litgrpo.GRPO", "data": "litgrpo.PromptData"}
NOT_NEEDED = {"predict": ("--model.rewards", "{none: {function: litgrpo.rewards.correctness}}")}


def brought() -> dict[str, Path]:
    """{name: file} of the recipes that litgrpo brings, such as `algorithms/dr_grpo`."""
    found = sorted(FOLDER.rglob("*.yaml"))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in found}


def recipe_file(word: str) -> Path:
    """The file behind what a user calls a recipe.

    Args:
        word: a file, with or without `.yaml`; or the name of a recipe that litgrpo brings, with or
            without `configs/` and `.yaml`. A file of the user's comes first.

    Raises:
        ValueError: there is neither.
    """
    name, recipes = word.removeprefix(CLONES_FOLDER).removesuffix(".yaml"), brought()
    places = [Path(word), Path(f"{word}.yaml"), recipes.get(name, Path(word))]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise ValueError(
            f"there is no recipe {word!r}: no such file in {Path.cwd()}, and litgrpo brings none "
            f"of that name{did_you_mean(name, recipes)}. It brings {', '.join(recipes)}."
        )
    return found


def with_classes(verb: str, words: Sequence[str]) -> list[str]:
    """A command line without a recipe names the model's keys alone: then GRPO's and PromptData's.

    Args:
        verb: of the command line.
        words: after it.
    """
    options = {word.partition("=")[0] for word in words}
    if options.intersection(RECIPE_FLAGS) or not any(o.startswith("--model.") for o in options):
        return list(words)
    given = [[f"--{key}", name] for key, name in CLASSES.items() if f"--{key}" not in options]
    flag, value = NOT_NEEDED.get(verb, ("", ""))
    given += [[flag, value]] if flag and flag not in options else []
    return [*(word for pair in given for word in pair), *words]


def refuse_repeated_keys(text: str, name: str) -> None:
    """Refuse a recipe in which a key stands twice: YAML would silently take the last one.

    Args:
        text: of the recipe; broken YAML is left to the parser.
        name: of its file.

    Raises:
        ValueError: one does, with its lines.
    """
    try:
        node = yaml.compose(text)
    except yaml.YAMLError:
        return
    for first, second in repeated(node):
        raise ValueError(
            f"{name}, line {second.start_mark.line + 1}: the key {second.value!r} stands twice "
            f"in the same place, first in line {first.start_mark.line + 1}. Keep one of them."
        )


def repeated(node: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Pairs of equal keys of one mapping, in a node and below it."""
    match node:
        case yaml.SequenceNode():
            for inner in node.value:
                yield from repeated(inner)
        case yaml.MappingNode():
            seen: dict[str, yaml.ScalarNode] = {}
            for key, inner in node.value:
                yield from [(seen[key.value], key)] if str(key.value) in seen else []
                seen[str(key.value)] = key
                yield from repeated(inner)


class Sources:
    """Writes the path of a data source as `{path: ...}` where the command line adds to it.

    So `--data.train.limit 64` works on a recipe that says `train: problems.jsonl`.

    Args:
        words: the command line.
    """

    def __init__(self, words: Sequence[str]) -> None:
        starts = {name: f"--data.{name}." for name in SOURCES}
        self.sets = {n for n, s in starts.items() if any(w.startswith(s) for w in words)}

    def text(self, text: str) -> str:
        """A recipe with these sources as mappings; all else stays to the letter."""
        try:
            found = list(self._paths(yaml.compose(text)))
        except yaml.YAMLError:
            return text
        for node in sorted(found, key=lambda node: -node.start_mark.index):
            value, end = mapping(node.value), node.end_mark.index
            text = text[: node.start_mark.index] + value + text[end:]
        return text

    def _paths(self, root: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
        below_data = [node for data in _below(root, "data") for node in _below(data, "init_args")]
        given = [node for init in below_data for name in self.sets for node in _below(init, name)]
        yield from (n for n in given if isinstance(n, yaml.ScalarNode) and n.value != "null")

    def words(self, words: Sequence[str]) -> list[str]:
        """A command line with these sources as mappings."""
        options, result = {f"--data.{name}" for name in self.sets}, []
        for before, word in pairwise(["", *words]):
            option, equals, value = word.partition("=")
            if before in options and word[:1] not in "[{":
                result.append(mapping(word))
            elif option in options and equals and value[:1] not in "[{":
                result.append(f"{option}={mapping(value)}")
            else:
                result.append(word)
        return result


class EnvironmentKeys:
    """Writes `--model.environment.init_args.KEY VALUE` into what names the environment.

    Any object may be one, so the parser knows no keys of it: it would take its arguments as a
    whole. `init_args` may be left out, as everywhere on the command line.

    Args:
        words: the command line.
    """

    place = re.compile(r"--model\.(?:init_args\.)?environment(?:\.(?:init_args\.)?(.+))?")

    def __init__(self, words: Sequence[str]) -> None:
        self.others, self.named = list(words), False
        self.given: dict[str, Any] = {}
        found, others, dotted = dict[str, Any](), list[str](), False
        rest = iter(words)
        for word in rest:
            option, equals, value = word.partition("=")
            key = self.place.fullmatch(option)
            if key is None or option.endswith(".help"):
                others.append(word)
            else:
                found[key[1] or "class_path"] = plain(value if equals else next(rest, ""))
                dotted = dotted or key[1] == "class_path"
        if dotted or found.keys() - {"class_path"}:
            self.others, self.given = others, found

    def content(self, text: str) -> str:
        """A recipe with these keys; one that names no environment stays as it is."""
        recipe = yaml.safe_load(text) if self.given else None
        model = recipe.get("model") if isinstance(recipe, dict) else None
        settings = model.get("init_args") if isinstance(model, dict) else None
        named = settings.get("environment") if isinstance(settings, dict) else None
        if settings is None or not named or "class_path" in self.given:
            return text
        self.named, settings["environment"] = True, self.changed(named, self.given)
        return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)

    def words(self) -> list[str]:
        """The other words; and the environment, where the command line names it.

        Raises:
            ValueError: nothing names the environment that the keys belong to.
        """
        given, keys = dict(self.given), ", ".join(self.given.keys() - {"class_path"})
        named = given.pop("class_path", None)
        require(
            not given or self.named or bool(named),
            f"model.environment.init_args.{keys} belongs to an environment, but no recipe names "
            "one: add --model.environment CLASS_PATH.",
        )
        if not named:
            return self.others
        return [*self.others, f"--model.environment={json.dumps(self.changed(named, given))}"]

    def changed(self, named: Any, given: dict[str, Any]) -> dict[str, Any]:
        """{class_path, init_args} with these keys.

        Raises:
            ValueError: a key is within a value that has no keys.
        """
        made = dict(named) if isinstance(named, dict) else {"class_path": named}
        made["init_args"] = dict(made.get("init_args") or {})
        for key, value in given.items():
            *path, last = [part for part in key.split(".") if part != "init_args"]
            node = made["init_args"]
            for part in path:
                inner = node.setdefault(part, {})
                require(
                    isinstance(inner, dict),
                    f"model.environment.init_args.{key}: {part} is {inner!r}, which has no keys.",
                )
                node = inner.setdefault("init_args", {}) if "class_path" in inner else inner
            node[last] = value
        return made


def plain(word: str) -> Any:
    """A word of the command line as YAML reads it; one that is none, such as `?`, is a text.

    Example:
        >>> plain("0.5"), plain("?"), plain("a: b"), plain("[x, 1]")
        (0.5, '?', 'a: b', ['x', 1])
    """
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    return value if word[:1] in "[{" or not isinstance(value, dict | list) else word


def mapping(path: str) -> str:
    """A path as a source with more keys, in YAML."""
    return f"{{path: {json.dumps(path, ensure_ascii=False)}}}"


def _below(node: yaml.Node | None, key: str) -> list[yaml.Node]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return [value for name, value in pairs if name.value == key]


def prepared_words(words: Sequence[str], folder: Path) -> list[str]:
    """Command line whose recipes are files, with sources and environments written out.

    Args:
        words: after the command.
        folder: for copies of recipes in which something was replaced.
    """
    sources, environment = Sources(words), EnvironmentKeys(words)

    def read(word: str) -> str:
        path = recipe_file(word)
        old = path.read_text(encoding="utf-8")
        refuse_repeated_keys(old, word)
        new = environment.content(sources.text(with_torch_optimizer(old)))
        if new == old:
            return str(path)
        # A run is named after its recipe, so the copy keeps the name.
        copy = folder / str(len(list(folder.iterdir()))) / path.with_suffix(".yaml").name
        copy.parent.mkdir()
        copy.write_text(new, encoding="utf-8")
        return str(copy)

    result, option = [], ""
    for word in (part for given in environment.others for part in _apart(given)):
        if option in RECIPE_FLAGS:
            result.append(read(word))
        elif option == "--model.optimizer" and word in OF_TORCH:
            result.append(f"torch.optim.{word}")
        else:
            result.append(word)
        option = word
    environment.others = sources.words(result)
    return environment.words()


def with_torch_optimizer(text: str) -> str:
    """Recipe that names an optimizer of torch by its full path.

    After transformers is imported, the short name of some is ambiguous.
    """
    return re.sub(
        rf"(optimizer:\s*(?:\{{?\s*class_path:\s*)?)({'|'.join(OF_TORCH)})\b",
        r"\1torch.optim.\2",
        text,
    )


def _apart(word: str) -> list[str]:
    """`--config=FILE` as two words, every other word as it is."""
    return word.split("=", 1) if word.startswith("--config=") else [word]
