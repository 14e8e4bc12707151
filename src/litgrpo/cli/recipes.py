"""Recipes and command lines, as plain settings that every command reads alike.

A recipe is a YAML file of the user's, or a built-in one by its name. It may leave out `class_path`
(GRPO and PromptData are meant) and `init_args`. All of that is written out once, in the parsed
values, before jsonargparse sees them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import require
from litgrpo.text.yaml_limits import (
    Misread,
    check_limits,
    check_values,
    find_scalars,
    has_written_break,
    is_misread,
)

FOLDER = Path(__file__).parents[1] / "configs"
CLONE_FOLDER = "configs/"  # the same recipes in a clone
DEFAULT_CLASSES = {"model": "litgrpo.GRPO", "data": "litgrpo.PromptData"}
RECIPE_FLAGS = ("-c", "--config")
SOURCES = ("train", "val", "test", "predict")  # options of data that are paths or mappings
ENVIRONMENT = "model.environment"
REWARDS = ["model", "rewards"]
# Options whose texts have lines. Others may be patterns, which may hold a backslash and an n.
TEXTS_WITH_LINES = (
    "stop",
    "template",
    "completion_template",
    "reference_template",
    "system",
    "prompt",
    "prompts",
    "answer_format",
)
# transformers has classes of the same short name; after its import the name would be ambiguous.
TORCH_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "RMSprop", "SGD")
OBJECT_KEYS = ("class_path", "init_args", "dict_kwargs")
MAX_REASON = 200  # characters of a message of the YAML parser
# {part of a message of the YAML parser: what to do}
HINTS = {
    "'\\t'": "indent with spaces",
    "cannot start any token": "quote the text",
    "unhashable key": "quote a text with braces",
    "mapping values are not allowed": "quote a text with a colon",
    "expected ',' or": "close the bracket, or quote a text with brackets",
}


def built_in_recipes() -> dict[str, Path]:
    """Return {name: file} of the built-in recipes, such as `algorithms/dr_grpo`."""
    found = sorted(FOLDER.rglob("*.yaml"))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in found}


def recipe_file(word: str) -> Path:
    """Return the file of a recipe.

    Args:
        word: a file, with or without `.yaml`; or the name of a built-in recipe, with or without
            `configs/` and `.yaml`. Files of the user come first.

    Raises:
        ValueError: there is neither.
    """
    name, recipes = word.removeprefix(CLONE_FOLDER).removesuffix(".yaml"), built_in_recipes()
    places = [Path(word), Path(f"{word}.yaml"), recipes.get(name, Path(word))]
    try:
        found = next((path for path in places if path.is_file()), None)
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ValueError(f"recipe {word[:80]!r} cannot be a file: {error}") from error
    if found is None:
        folder = f"it is a folder in {Path.cwd()}" if Path(word).is_dir() else ""
        tasks = [each for each in recipes if "/" not in each]
        files = {str(path.with_suffix("")): str(path) for path in Path(word).parent.glob("*.y*ml")}
        known = {each: each for each in recipes} | files
        near = "".join(
            f" (did you mean {known[each]!r}?)" for each in get_close_matches(name, known, 1)
        )
        raise ValueError(
            f"recipe {word!r} not found: {folder or f'no such file in {Path.cwd()}'}, and no "
            f"built-in recipe has this name{near}. Recipes are YAML files; built-in: "
            f"{', '.join(tasks)}."
        )
    return found


def read_recipe(word: str) -> dict[str, Any]:
    """Return the settings of a recipe file.

    Raises:
        ValueError: it is not found, is not YAML, is empty, holds no mapping, or has a key twice.
    """
    from jsonargparse import get_loader

    path = recipe_file(word)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{word} is not a text file in UTF-8: {error}. Save it as UTF-8."
        ) from error
    except OSError as error:
        raise ValueError(f"{word} cannot be read: {error.strerror}") from error
    try:
        check_limits(text)
        check_values(text)
        tree = yaml.compose(text)
        repeated = list(find_repeated_keys(tree))
        # Unlike yaml.safe_load, the parser's own loader reads 1e-6 as a number.
        content = None if tree is None else get_loader("yaml")(text)
        json.dumps(content)  # a set or bytes, by a tag such as !!set, raise a TypeError
    except Misread as error:
        raise ValueError(f"{word}, {error}") from error
    # A date such as 2026-13-01 or a number of 5,000 digits raises a ValueError, and a list as a
    # key of a mapping a TypeError.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(f"{word} is not valid YAML: {describe(error)}") from error
    for key, node in find_scalars(tree):
        if node.style != '"':
            check_line_breaks(key, node.value, f"{word}, line {node.start_mark.line + 1}: ")
    if repeated:  # YAML silently takes the last of two equal keys
        first, second = repeated[0]
        raise ValueError(
            f"{word}, line {second.start_mark.line + 1}: the key {second.value!r} appears "
            f"twice, first in line {first.start_mark.line + 1}. Keep one of them."
        )
    require(content is not None, f"{word} is an empty recipe: expected keys such as model and data")
    if not isinstance(content, dict):
        raise ValueError(
            f"{word} is not a recipe: expected keys such as model and data, got "
            f"{type(content).__name__}"
        )
    wrong = [key for key in content if not isinstance(key, str)]
    require(not wrong, f"{word}: {wrong[:1]} is not a key; expected model, data, ...")
    return dict(content)


def check_line_breaks(key: str, text: str, place: str = "") -> None:
    """Check that the text of a prompt or a stop sequence has real line breaks.

    Args:
        key: dotted option.
        text: as YAML without double quotes, or the command line, gives it.
        place: where it is.

    Raises:
        ValueError: it has a backslash and an n instead.
    """
    is_prose = key.rpartition(".")[2] in TEXTS_WITH_LINES
    require(
        not (is_prose and has_written_break(text)),
        f"{place}{key} has a backslash and an n instead of a line break: in YAML write it in "
        'double quotes, "\\n" (or "\\\\n" if those two characters are meant), in a shell $\'\\n\'',
    )


def check_word(key: str, value: str | None) -> None:
    """Check that the value of an option on the command line is what it looks like.

    Raises:
        ValueError: it is not.
    """
    if value is None:
        return
    is_nested = isinstance(read_value(value), list | dict) and value[:1] in ("[", "{")
    if not is_nested:
        check_line_breaks(key, value)
        return
    for name, node in find_scalars(yaml.compose(value)):
        if node.style != '"':
            check_line_breaks(".".join(filter(None, [key, name])), node.value)
    try:
        check_values(value)
    except Misread as error:
        raise ValueError(f"--{key}: {error}") from error


def describe(error: Exception) -> str:
    """Return what is wrong with a YAML text and its line, without the text itself."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        lines = str(error).splitlines()
        return (lines or [type(error).__name__])[0][:MAX_REASON]
    problem = str(getattr(error, "problem", "") or getattr(error, "context", ""))
    hints = (f"; {hint}" for cause, hint in HINTS.items() if cause in problem)
    return (
        f"line {mark.line + 1}, column {mark.column + 1}: {problem[:MAX_REASON]}{next(hints, '')}"
    )


def find_repeated_keys(node: yaml.Node | None) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Yield pairs of equal keys of one mapping, in a node and below it."""
    if isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            yield from find_repeated_keys(inner)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, yaml.ScalarNode] = {}
        for key, inner in node.value:
            if str(key.value) in seen:
                yield seen[key.value], key
            seen[str(key.value)] = key
            yield from find_repeated_keys(inner)


@dataclass(frozen=True)
class CommandLine:
    """Recipes and overrides of one command.

    Args:
        names: recipes, as typed.
        recipes: their settings, in the order of the command line.
        options: (option, value) of everything else; None: a switch without a value.

    Example:
        >>> given = CommandLine.read(["-c", "quickstart", "--model.group_size=4", "--debug"])
        >>> given.names, given.options
        (['quickstart'], [('model.group_size', '4'), ('debug', None)])
        >>> given.words()[1:]
        ['--model.group_size=4', '--debug']
    """

    names: list[str]
    recipes: list[dict[str, Any]]
    options: list[tuple[str, str | None]]

    @classmethod
    def read(cls, words: Sequence[str]) -> CommandLine:
        """Read the words behind the command.

        Raises:
            ValueError: a recipe cannot be read, or a word belongs to no option.
        """
        names, options = split_words(words)
        for key, value in options:
            check_word(key, value)
        recipes = [written_out(read_recipe(name)) for name in names]
        share_classes(recipes)
        options = classes_first([written_out_option(key, value) for key, value in options])
        keys = [key for key, _ in options]
        for source in SOURCES:
            # `--data.train.limit 64` works on a recipe that says `train: problems.jsonl`.
            if any(key.startswith(f"data.{source}.") for key in keys):
                for recipe in recipes:
                    settings = recipe.get("data", {}).get("init_args") or {}
                    if isinstance(settings.get(source), str):
                        settings[source] = {"path": settings[source]}
                options = [
                    (key, as_source(value) if key.endswith(f"data.{source}") else value)
                    for key, value in options
                ]
        return cls(names, recipes, with_environment(recipes, options))

    def words(self, write: Callable[[str, str | None], str] | None = None) -> list[str]:
        """Return the words for the parser, with recipes as JSON in place of files.

        Args:
            write: returns an option and its value as one word; default: `option_word`.
        """
        classes = [
            f"--{key}={find_class_name(key, self.options) or path}"
            for key, path in DEFAULT_CLASSES.items()
            if not any("class_path" in (recipe.get(key) or {}) for recipe in self.recipes)
        ]
        recipes = [f"--config={json.dumps(recipe)}" for recipe in self.recipes]
        write = write or option_word
        return [*classes, *recipes, *(write(key, value) for key, value in self.options)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings as one tree of plain values, `init_args` left out."""
        tree: dict[str, Any] = {key: {"class_path": path} for key, path in DEFAULT_CLASSES.items()}
        for recipe in self.recipes:
            merge(tree, without_init_args(recipe))
        for key, value in self.options:
            set_at(tree, key.split("."), value)
        return tree


def split_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the recipes of a command line, and (option, value) of everything else."""
    names: list[str] = []
    options: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        require(
            word.startswith("-"),
            f"unexpected {word!r}: options are given as --KEY VALUE, recipes as -c RECIPE",
        )
        option, equals, value = word.partition("=")
        given: str | None = value if equals else None
        if not equals and rest and not rest[0].startswith("--") and rest[0] not in RECIPE_FLAGS:
            given = rest.pop(0)
        if option in RECIPE_FLAGS:
            require(given is not None, f"{option} needs a recipe: {option} quickstart")
            names.append(str(given))
        else:
            options.append((option.lstrip("-"), given))
    return names, options


def option_word(key: str, value: str | None) -> str:
    """Return an option as one word of a command line."""
    if key == "model.optimizer" and value in TORCH_OPTIMIZERS:
        value = f"torch.optim.{value}"
    return f"--{key}" if value is None else f"--{key}={value}"


def written_out(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe in the parser's form: `init_args` beside `class_path` and nowhere else.

    Example:
        >>> written_out({"model": {"group_size": 4, "lora": {"init_args": {"rank": 2}}}})
        {'model': {'init_args': {'group_size': 4, 'lora': {'rank': 2}}}}
        >>> written_out({"data": {"class_path": "PairData", "train": "a.jsonl"}})
        {'data': {'class_path': 'PairData', 'init_args': {'train': 'a.jsonl'}}}
    """
    result = {key: with_init_args(value) for key, value in recipe.items()}
    for key in DEFAULT_CLASSES:
        node = result.get(key)
        if isinstance(node, str):
            result[key] = {"class_path": node}
        elif isinstance(node, dict) and "class_path" not in node:
            options = {name: each for name, each in node.items() if name not in OBJECT_KEYS}
            others = {name: each for name, each in node.items() if name in OBJECT_KEYS}
            result[key] = {"init_args": options} | others
    model = result.get("model")
    settings = model.get("init_args") if isinstance(model, dict) else None
    if isinstance(settings, dict) and "optimizer" in settings:
        settings["optimizer"] = with_torch_path(settings["optimizer"])
    if isinstance(settings, dict) and "rewards" in settings:
        settings["rewards"] = write_out_rewards(settings["rewards"])
    return result


def write_out_rewards(rewards: Any) -> Any:
    """Return rewards that are given as in Python, one or a list of functions, by their names.

    Raises:
        ValueError: two functions of a list have the same name.

    Example:
        >>> write_out_rewards("my_rewards.exact")
        {'exact': {'function': 'my_rewards.exact'}}
        >>> write_out_rewards({"correct": "my_rewards.exact", "style": {"function": "a.b"}})
        {'correct': {'function': 'my_rewards.exact'}, 'style': {'function': 'a.b'}}
    """
    if isinstance(rewards, str) or (isinstance(rewards, dict) and "class_path" in rewards):
        rewards = [rewards]
    if isinstance(rewards, list):
        listed = [reward_options(each) for each in rewards]
        names = [reward_name(each) for each in listed]
        require(
            len(set(names)) == len(names),
            f"model.rewards: several functions of a list have the same name: {', '.join(names)}; "
            "give {name: function}",
        )
        return dict(zip(names, listed, strict=True))
    if isinstance(rewards, dict):
        return {name: reward_options(each) for name, each in rewards.items()}
    return rewards


def reward_options(reward: Any) -> Any:
    """Return the options of a reward that is given as a function alone."""
    is_function = isinstance(reward, str) or (isinstance(reward, dict) and "class_path" in reward)
    return {"function": reward} if is_function else reward


def reward_name(reward: Any) -> str:
    """Return the name of a reward's function or class."""
    function = reward.get("function") if isinstance(reward, dict) else reward
    path = function.get("class_path") if isinstance(function, dict) else function
    return str(path).rpartition(".")[2]


def with_torch_path(optimizer: Any) -> Any:
    """Return an optimizer of a recipe with the full path of a class of torch."""
    if isinstance(optimizer, dict) and "class_path" in optimizer:
        return optimizer | {"class_path": with_torch_path(optimizer["class_path"])}
    return f"torch.optim.{optimizer}" if optimizer in TORCH_OPTIMIZERS else optimizer


def with_init_args(node: Any) -> Any:
    """Return a node whose objects have their options below `init_args`, and no other mapping.

    Raises:
        ValueError: an option is given both beside `init_args` and below it.
    """
    if isinstance(node, list):
        return [with_init_args(each) for each in node]
    if not isinstance(node, dict):
        return node
    inner = {key: with_init_args(value) for key, value in node.items()}
    given = inner.get("init_args")
    require(isinstance(given, dict | None), f"init_args is {given!r:.60}, expected {{name: value}}")
    below = inner.pop("init_args", None) or {}
    beside = {key: value for key, value in inner.items() if key not in OBJECT_KEYS}
    twice = [str(key) for key in beside if key in below]
    require(not twice, f"{', '.join(twice)}: given twice, beside init_args and below it")
    if "class_path" not in inner:
        return inner | below
    options = below | beside
    rest = {key: value for key, value in inner.items() if key in OBJECT_KEYS}
    return rest | {"init_args": options} if options or "init_args" in node else rest


def share_classes(nodes: Sequence[Any]) -> None:
    """Name the class of an object in every recipe that has options of it, not only in a later one.

    Args:
        nodes: values of one option in the order of the recipes, as `written_out` returns them.

    Example:
        >>> recipes = [{"lr": 0.1}, {"class_path": "AdamW", "init_args": {"eps": 1e-6}}]
        >>> share_classes(recipes)
        >>> recipes[0]
        {'class_path': 'AdamW', 'init_args': {'lr': 0.1}}
    """
    objects = list(takewhile(lambda node: isinstance(node, dict), nodes))
    unnamed = list(takewhile(lambda node: "class_path" not in node, objects))
    for node in unnamed if len(unnamed) < len(objects) else []:
        options = node.get("init_args", dict(node))
        node.clear()
        node |= {"class_path": objects[len(unnamed)]["class_path"], "init_args": options}
    below = [node.get("init_args", {} if "class_path" in node else node) or {} for node in objects]
    for key in dict.fromkeys(key for options in below for key in options):
        share_classes([options[key] for options in below if key in options])


def without_init_args(node: Any) -> Any:
    """Return a node whose objects have their options beside `class_path`."""
    if isinstance(node, list):
        return [without_init_args(each) for each in node]
    if not isinstance(node, dict):
        return node
    options = {key: without_init_args(each) for key, each in node.items() if key != "init_args"}
    inner = node.get("init_args")
    return options | without_init_args(inner) if isinstance(inner, dict) else options


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Put a mapping over a tree, key by key; `rewards` and lists are replaced whole."""
    for key, value in other.items():
        known = tree.get(key)
        if isinstance(known, dict) and isinstance(value, dict) and key != "rewards":
            merge(known, value)
        else:
            tree[key] = value


def set_at(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value of a dotted option; a class that was given by name becomes an object."""
    *above, last = path
    for part in above:
        given = tree.get(part)
        if isinstance(given, str):
            content = read_value(given)
            tree[part] = content if isinstance(content, dict) else {"class_path": given}
        elif not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    if last in DEFAULT_CLASSES and isinstance(tree.get(last), dict) and str(value)[:1] != "{":
        tree[last]["class_path"] = value
    else:
        tree[last] = value


def find_class_name(key: str, options: Sequence[tuple[str, str | None]]) -> str | None:
    """Return the class that the options name for the model or the data; None if they do not."""
    names = (value for name, value in options if name in (key, f"{key}.class_path"))
    return next((name for name in names if name and name[0] not in "{["), None)


def written_out_option(key: str, value: str | None) -> tuple[str, str | None]:
    """Return an option without `init_args` in its name, with rewards in their full form.

    Example:
        >>> written_out_option("model.init_args.group_size", "4")
        ('model.group_size', '4')
        >>> written_out_option("model.rewards.exact", "my_rewards.exact")
        ('model.rewards.exact.function', 'my_rewards.exact')
    """
    parts = [part for part in key.split(".") if part != "init_args"]
    key = ".".join(parts)
    if value is None or (content := read_value(value)) is None:
        return key, value
    has_objects = "class_path" in value or "init_args" in value
    if has_objects and isinstance(content, dict | list):
        content = with_init_args(content)
        value = json.dumps(content, default=str)
    is_broken = isinstance(content, str) and value[:1] in ("[", "{")  # the parser reports it
    if parts[:2] != REWARDS or is_broken:
        return key, value
    require(
        len(parts) < len(REWARDS) + 3 or parts[3] not in ("kwargs", "schedule"),
        f"{key}: give it as a whole: --{'.'.join(parts[:4])} '{{{parts[-1]}: {value}}}'",
    )
    if len(parts) == len(REWARDS):
        return key, json.dumps(write_out_rewards(content))
    if len(parts) == len(REWARDS) + 1 and isinstance(reward_options(content), dict):
        if isinstance(content, str):
            return f"{key}.function", value
        return key, json.dumps(reward_options(content))
    return key, value


def classes_first(options: Sequence[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Return the options with each name of a class before the options of that class.

    Example:
        >>> classes_first([("model.engine.max_rows", "4"), ("model.engine", "LocalEngine")])
        [('model.engine', 'LocalEngine'), ('model.engine.max_rows', '4')]
    """
    ordered: list[tuple[str, str | None]] = []
    for key, value in options:
        name = key.removesuffix(".class_path")
        is_class = value is not None and isinstance(read_value(value), str)
        below = [n for n, (other, _) in enumerate(ordered) if other.startswith(f"{name}.")]
        ordered.insert(below[0] if is_class and below else len(ordered), (key, value))
    return ordered


def as_source(value: str | None) -> str | None:
    """Return a path as a data source with more options, in JSON; anything else as it is."""
    if value is None or value[:1] in ("[", "{") or value == "null":
        return value
    return json.dumps({"path": value})


def with_environment(
    recipes: Sequence[dict[str, Any]], options: Sequence[tuple[str, str | None]]
) -> list[tuple[str, str | None]]:
    """Move `--model.environment.KEY VALUE` into the recipe or option that names the environment.

    Any object may be an environment, so the parser knows no options of it.

    Raises:
        ValueError: nothing names the environment that the options belong to.
    """
    others, given = list[tuple[str, str | None]](), dict[str, Any]()
    for key, value in options:
        if key == ENVIRONMENT or key.startswith(f"{ENVIRONMENT}."):
            option = key.removeprefix(ENVIRONMENT).removeprefix(".") or "class_path"
            given[option] = plain_value(value)
        else:
            others.append((key, value))
    if not given.keys() - {"class_path"}:
        return list(options)
    named = given.pop("class_path", None)
    if named is not None:
        text = json.dumps(with_options(named, given))
        return [*others, (ENVIRONMENT, text)]
    nodes = [
        recipe["model"]["init_args"]
        for recipe in recipes
        if (recipe.get("model") or {}).get("init_args")
    ]
    nodes = [node for node in nodes if node.get("environment")]
    require(
        bool(nodes),
        f"{ENVIRONMENT}.{', '.join(given)} belongs to an environment, but no recipe names one: add "
        f"--{ENVIRONMENT} CLASS_PATH.",
    )
    for node in nodes:
        node["environment"] = with_options(node["environment"], given)
    return others


def with_options(node: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return {class_path, init_args} of an object with more options.

    Raises:
        ValueError: an option is below a value that has none.
    """
    tree = without_init_args(node) if isinstance(node, dict) else {"class_path": node}
    for key, value in options.items():
        *above, last = key.split(".")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
            require(
                isinstance(inner, dict),
                f"{ENVIRONMENT}.{key}: {part} is {inner!r}, which has no options.",
            )
        inner[last] = value
    return with_init_args(tree)


def read_value(word: str) -> Any:
    """Return a word of the command line as YAML reads it; text that is not YAML stays a text."""
    try:
        check_limits(word)
        if is_misread(word):
            return word
        return yaml.safe_load(word)
    except (yaml.YAMLError, ValueError, TypeError):
        return word


def plain_value(word: str | None) -> Any:
    """Return a word of the command line as YAML reads it; text that is not YAML stays a text.

    Example:
        >>> plain_value("0.5"), plain_value("?"), plain_value("a: b"), plain_value("[x, 1]")
        (0.5, '?', 'a: b', ['x', 1])
    """
    if word is None:
        return None
    value = read_value(word)
    return value if word[:1] in ("[", "{") or not isinstance(value, dict | list) else word
