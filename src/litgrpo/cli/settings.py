"""The settings of a command: recipes and options of the command line, merged to one tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_origin

import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from litgrpo.algorithms.published import NAME, apply_name
from litgrpo.argument_types import UNSET, classes_in, find_class, members, values_of_mapping
from litgrpo.arguments import as_list, require
from litgrpo.cli.options import (
    Option,
    find_option,
    is_list_of_texts,
    is_text,
    options_of,
    takes_text,
    type_name,
)
from litgrpo.cli.recipes import (
    DEFAULT_CLASSES,
    OBJECT_KEYS,
    check_word,
    describe,
    load_value,
    plain_form,
    read_recipe,
    split_words,
)
from litgrpo.text.yaml_limits import is_misread

ENVIRONMENT, OBJECTIVE = "environment", "model.objective"
SOURCES = ("data.train", "data.val", "data.test", "data.predict")  # a text is the path of one
NULLS = ("null", "~")
PRINT = "print_config"
BASES = {"model": LightningModule, "data": LightningDataModule}


@dataclass(frozen=True)
class CommandLine:
    """Recipes and options of one command.

    Args:
        names: recipes, as typed.
        settings: recipes with the options over them; options of an object are beside its
            `class_path`.
        hints: {first part of an option: type}, with the classes of model and data.

    Example:
        >>> command_line = CommandLine.read(["-c", "quickstart", "--model.group_size=4"])
        >>> command_line.names, command_line.settings["model"]["group_size"]
        (['quickstart'], 4)
    """

    names: list[str]
    settings: dict[str, Any]
    hints: dict[str, Any]

    @classmethod
    def read(cls, words: Sequence[str], hints: Mapping[str, Any] | None = None) -> CommandLine:
        """Read the words behind the command.

        Args:
            words: what follows the command.
            hints: {first part of an option: type}, without model and data.

        Raises:
            ValueError: a recipe cannot be read, a word belongs to no option, or is not valid YAML.
        """
        names, typed = split_words(words)
        for key, text in typed:
            check_word(key, text)
        options = classes_first([(key.replace(".init_args", ""), text) for key, text in typed])
        recipes = [plain_form(read_recipe(name)) for name in names]
        hints = dict(hints or {}) | find_classes(recipes, options)
        settings: dict[str, Any] = {}
        for recipe in recipes:
            merge(settings, recipe, hints)
        for key, text in options:
            merge_option(settings, key, read_option(key, text, hints), hints)
        for key, path in DEFAULT_CLASSES.items():
            node = settings.get(key) or {}
            settings[key] = {"class_path": path} | node if isinstance(node, dict) else node
        if isinstance(settings["model"], dict):
            apply_name(settings["model"])
        check_environment(settings["model"])
        hints |= find_classes([settings], [])
        return cls(names, settings, hints)


def find_classes(
    recipes: Sequence[Mapping[str, Any]], options: Sequence[tuple[str, str | None]]
) -> dict[str, type]:
    """Return the classes of model and data, which the last recipe or option that has one names."""
    classes = {}
    for key, default in DEFAULT_CLASSES.items():
        nodes = [recipe.get(key) for recipe in recipes]
        paths = [node.get("class_path") for node in nodes if isinstance(node, dict)]
        paths += [text for name, text in options if name in (key, f"{key}.class_path")]
        class_paths = [path for path in paths if path and str(path)[0] not in "{["]
        try:
            classes[key] = find_class(str([default, *class_paths][-1]), [object])
        except ValueError:  # reported when the settings are checked
            classes[key] = BASES[key]
    return classes


def classes_first(options: Sequence[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Return the options with each one that is a text before the options below it.

    Example:
        >>> classes_first([("model.engine.max_rows", "4"), ("model.engine", "LocalEngine")])
        [('model.engine', 'LocalEngine'), ('model.engine.max_rows', '4')]
    """
    ordered: list[tuple[str, str | None]] = []
    for key, value in options:
        name = key.removesuffix(".class_path")
        is_class = value is not None and value not in NULLS and value[:1] not in ("{", "[")
        below = [n for n, (other, _) in enumerate(ordered) if other.startswith(f"{name}.")]
        ordered.insert(below[0] if is_class and below else len(ordered), (key, value))
    return ordered


def lookup(key: str, hints: Mapping[str, Any]) -> Option:
    """Return an option; one without type and default if there is none of this name."""
    try:
        return find_option(key.removesuffix("+"), hints)
    except ValueError:  # reported when the settings are checked
        return Option(key, UNSET, UNSET, "")


def read_option(key: str, text: str | None, hints: Mapping[str, Any]) -> Any:
    """Return the value of an option of the command line: YAML, unless the option takes text.

    Args:
        key: the option.
        text: its value as typed; None: a switch without a value.
        hints: {first part of an option: type}.

    Raises:
        ValueError: it has no value, or is not valid YAML.

    Example:
        >>> read_option("jobs", "4", {"jobs": int}), read_option("name", "4", {"name": str})
        (4, '4')
    """
    hint = lookup(key, hints).hint
    kinds = members(hint)
    if text is None:
        is_switch = bool in kinds and {*kinds} <= {bool, type(None)}
        require(is_switch or key == PRINT, f"--{key} needs a value: --{key} VALUE")
        return True if is_switch else None
    if text.strip().lower() in NULLS:
        return None
    if is_text(hint) or text == "":
        return text
    is_taken = takes_text(hint, text)
    is_nested = text[:1] in ("[", "{")
    # The parser would read 1:30 as 90 where a number is expected.
    is_base_60 = ":" in text and is_misread(text)
    require(
        not is_base_60 or is_taken or hint in (Any, UNSET),
        f"{key} is {text}, expected {type_name(hint)}",
    )
    value: Any = text
    try:
        value = load_value(text)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        # An unknown option is reported as such.
        is_wrong = is_nested and not is_taken and hint is not UNSET
        require(not is_wrong, f"{key} is not valid YAML: {describe(error)}")
    if is_list_of_texts(hint) and not isinstance(value, list):
        return [text]
    if is_taken and is_nested and takes_nested(hint, value):
        return value
    # A comment, which YAML reads as null, is a text, and so is `a: b` without brackets.
    is_text_only = isinstance(value, list | dict) and not is_nested
    return text if value is None or is_taken or is_text_only else value


def takes_nested(hint: Any, value: Any) -> bool:
    """Return True if a type allows a list or a mapping, given that it allows a text."""
    if isinstance(value, dict):
        is_object = "class_path" in value or bool(classes_in(hint))
        return is_object or values_of_mapping(hint) is not UNSET
    return any(get_origin(kind) in (list, tuple, Sequence) for kind in members(hint))


def merge_option(settings: dict[str, Any], key: str, value: Any, hints: Mapping[str, Any]) -> None:
    """Set the value of a dotted option."""
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    merge(settings, plain_form(tree), hints, option=key)


def merge(
    settings: dict[str, Any],
    other: Mapping[str, Any],
    hints: Mapping[str, Any],
    above: str = "",
    option: str = "",
) -> None:
    """Put a mapping over settings, key by key.

    An object of another class replaces one, and so does a mapping that is no object, such as
    `rewards`.

    Args:
        settings: are changed.
        other: the mapping.
        hints: {first part of an option: type}.
        above: option that both are the value of; "": the top.
        option: the only option that the mapping sets; "": a recipe.
    """
    for name, value in other.items():
        key = f"{above}.{name}" if above else name
        old = settings.get(name)
        if key == OBJECTIVE and isinstance(value, dict) and NAME in value:
            settings[name] = value  # a published objective has nothing of the one before
        elif name.endswith("+"):  # append to the list, as in jsonargparse
            declared = lookup(key, hints)
            default = None if declared.default is UNSET else declared.default
            items = as_list(settings.get(name[:-1], default)) + as_list(value)
            settings[name[:-1]] = [
                {"class_path": item} if is_class_name(item, declared.hint) else item
                for item in items
            ]
        elif option.startswith(f"{key}."):
            inner = as_object(key, old, option, hints)
            merge(inner, value, hints, key, option)
            settings[name] = [*old[:-1], inner] if isinstance(old, list) else inner
        else:
            settings[name] = combine(key, old, value, hints)


def combine(key: str, old: Any, new: Any, hints: Mapping[str, Any]) -> Any:
    """Return the value of an option that is set twice."""
    if key in SOURCES and isinstance(old, str) and isinstance(new, dict):
        old = {"path": old}
    if isinstance(old, dict) and names_class(new, lookup(key, hints).hint, old):
        new = {"class_path": new}
    if not (isinstance(old, dict) and isinstance(new, dict) and can_merge(key, old, new, hints)):
        return new
    merge(old, new, hints, key)
    return old


def as_object(key: str, value: Any, option: str, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping in which an option below a value is set.

    A text names a class or a source, and the last object of a list is meant.

    Raises:
        ValueError: the value has no options.
    """
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, str):
        require(
            lookup(key, hints).hint is not UNSET,
            f"unknown option {option}: {key} is {value!r}, which has no options",
        )
        return {"path" if key in SOURCES else "class_path": value}
    return value if isinstance(value, dict) else {}


def names_class(value: Any, hint: Any, old: Mapping[str, Any]) -> bool:
    """Return True if a value names a class for an object that has options already."""
    if not {*members(hint)}.isdisjoint((Any, object, UNSET)):
        return isinstance(value, str) and "class_path" in old
    return is_class_name(value, hint)


def is_class_name(value: Any, hint: Any) -> bool:
    """Return True if a value of a type can only be the name of a class."""
    return isinstance(value, str) and bool(classes_in(hint)) and not takes_text(hint, value)


def can_merge(
    key: str, old: Mapping[str, Any], new: Mapping[str, Any], hints: Mapping[str, Any]
) -> bool:
    """Return True if two mappings are settings of the same object."""
    classes = [str(mapping["class_path"]) for mapping in (old, new) if "class_path" in mapping]
    if len({path.rpartition(".")[2] for path in classes}) > 1:
        return False
    hint = lookup(key, hints).hint
    if values_of_mapping(hint) is UNSET:
        return True
    option_names = {name for owner in classes_in(hint) for name in options_of(owner)}
    return option_names.union(OBJECT_KEYS) >= {*old, *new}


def iterate_options(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted paths of nested settings and their values."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from iterate_options(inner, f"{path}.{name}" if path else str(name))


def check_environment(model: Any) -> None:
    """Check that an environment with options has a class: any object may be one."""
    node = model.get(ENVIRONMENT) if isinstance(model, dict) else None
    if isinstance(node, dict) and "class_path" not in node:
        raise ValueError(
            f"model.{ENVIRONMENT}.{next(iter(node), '')} belongs to an environment, but no recipe "
            f"names one: add --model.{ENVIRONMENT} CLASS_PATH."
        )
