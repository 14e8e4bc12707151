"""Recipes, as plain settings that every command reads alike.

A recipe is a YAML file of the user's, or a built-in one by its name. It may leave out `class_path`
(GRPO and PromptData are meant) and `init_args`. All of that is brought to one form, `plain_form`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
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
    """Return {name: file} of the built-in recipes, such as `hardware/cuda`."""
    files = sorted(FOLDER.rglob("*.yaml"))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in files}


def recipe_file(word: str) -> Path:
    """Return the file of a recipe.

    Args:
        word: a file, with or without `.yaml`; or the name of a built-in recipe, with or without
            `configs/` and `.yaml`. Files of the user come first.

    Raises:
        ValueError: there is neither.
    """
    name, recipes = word.removeprefix(CLONE_FOLDER).removesuffix(".yaml"), built_in_recipes()
    candidates = [Path(word), Path(f"{word}.yaml"), recipes.get(name, Path(word))]
    try:
        file = next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ValueError(f"recipe {word[:80]!r} cannot be a file: {error}") from error
    if file is None:
        folder = f"it is a folder in {Path.cwd()}" if Path(word).is_dir() else ""
        tasks = [recipe for recipe in recipes if "/" not in recipe]
        files = {str(path.with_suffix("")): str(path) for path in Path(word).parent.glob("*.y*ml")}
        names = {recipe: recipe for recipe in recipes} | files
        near = "".join(
            f" (did you mean {names[near]!r}?)" for near in get_close_matches(name, names, 1)
        )
        raise ValueError(
            f"recipe {word!r} not found: {folder or f'no such file in {Path.cwd()}'}, and no "
            f"built-in recipe has this name{near}. Recipes are YAML files; built-in: "
            f"{', '.join(tasks)}."
        )
    return file


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


def check_line_breaks(key: str, text: str, prefix: str = "") -> None:
    """Check that the text of a prompt or a stop sequence has real line breaks.

    Args:
        key: dotted option.
        text: as YAML without double quotes, or the command line, gives it.
        prefix: of the message, such as the file and the line.

    Raises:
        ValueError: it has a backslash and an n instead.
    """
    is_prose = key.rpartition(".")[2] in TEXTS_WITH_LINES
    require(
        not (is_prose and has_written_break(text)),
        f"{prefix}{key} has a backslash and an n instead of a line break: in YAML write it in "
        'double quotes, "\\n" (or "\\\\n" if those two characters are meant), in a shell $\'\\n\'',
    )


def check_word(key: str, value: str | None) -> None:
    """Check that the value of an option on the command line is what it looks like.

    Raises:
        ValueError: it is not.
    """
    if value is None:
        return
    is_nested = False
    if value[:1] in ("[", "{"):
        with suppress(yaml.YAMLError, ValueError, TypeError):  # a text, or reported when it is read
            is_nested = isinstance(load_value(value), list | dict)
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


def pair_words(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a command line, each with its value, and ("", word) for other words.

    Example:
        >>> list(pair_words(["a", "-c", "b", "--jobs=2", "--force"]))
        [('', 'a'), ('-c', 'b'), ('--jobs', '2'), ('--force', None)]
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            yield "", word
            continue
        option, equals, text = word.partition("=")
        value: str | None = text if equals else None
        if not equals and rest and not rest[0].startswith("--") and rest[0] not in RECIPE_FLAGS:
            value = rest.pop(0)
        yield option, value


def split_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return the recipes of a command line, and (option, value) of everything else."""
    names: list[str] = []
    options: list[tuple[str, str | None]] = []
    for option, value in pair_words(words):
        require(
            option != "",
            f"unexpected {value!r}: options are given as --KEY VALUE, recipes as -c RECIPE",
        )
        if option in RECIPE_FLAGS:
            require(value is not None, f"{option} needs a recipe: {option} quickstart")
            names.append(str(value))
        else:
            options.append((option.lstrip("-"), value))
    return names, options


def plain_form(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe in one form: options beside `class_path`, names written out."""
    result = {key: without_init_args(value) for key, value in recipe.items()}
    for key in DEFAULT_CLASSES:
        if isinstance(result.get(key), str):
            result[key] = {"class_path": result[key]}
    model = result.get("model")
    if isinstance(model, dict) and "optimizer" in model:
        model["optimizer"] = with_torch_path(model["optimizer"])
    if isinstance(model, dict) and "rewards" in model:
        model["rewards"] = write_out_rewards(model["rewards"])
    if isinstance(model, dict) and isinstance(model.get("objective"), str):
        model["objective"] = {"name": model["objective"]}
    return result


def write_out_rewards(rewards: Any) -> Any:
    """Return rewards that are given as in Python, one or a list of functions, by their names.

    Raises:
        ValueError: two functions of a list have the same name.
    """
    if isinstance(rewards, str) or (isinstance(rewards, dict) and "class_path" in rewards):
        rewards = [rewards]
    if isinstance(rewards, list):
        reward_nodes = [reward_options(reward) for reward in rewards]
        names = [reward_name(reward) for reward in reward_nodes]
        require(
            len(set(names)) == len(names),
            f"model.rewards: several functions of a list have the same name: {', '.join(names)}; "
            "give {name: function}",
        )
        return dict(zip(names, reward_nodes, strict=True))
    if isinstance(rewards, dict):
        return {name: reward_options(reward) for name, reward in rewards.items()}
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


def without_init_args(node: Any) -> Any:
    """Return a node whose objects have their options beside `class_path`.

    Raises:
        ValueError: an option is given both beside `init_args` and below it.
    """
    if isinstance(node, list):
        return [without_init_args(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    below = node.get("init_args")
    require(isinstance(below, dict | None), f"init_args is {below!r:.60}, expected {{name: value}}")
    beside = {key: inner for key, inner in node.items() if key != "init_args"}
    twice = [str(key) for key in beside if key in (below or {})]
    require(not twice, f"{', '.join(twice)}: given twice, beside init_args and below it")
    return {key: without_init_args(inner) for key, inner in (beside | (below or {})).items()}


def with_init_args(node: Any) -> Any:
    """Return a node in the parser's form: options of an object that names its class below it.

    Example:
        >>> with_init_args({"class_path": "GRPO", "group_size": 4, "lora": {"rank": 2}})
        {'class_path': 'GRPO', 'init_args': {'group_size': 4, 'lora': {'rank': 2}}}
    """
    if isinstance(node, list):
        return [with_init_args(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    inner = {key: with_init_args(value) for key, value in node.items()}
    if "class_path" not in inner:
        return inner
    options = {key: value for key, value in inner.items() if key not in OBJECT_KEYS}
    rest = {key: value for key, value in inner.items() if key in OBJECT_KEYS}
    return rest | ({"init_args": options} if options else {})


def load_value(word: str) -> Any:
    """Return a word of the command line as YAML reads it.

    Raises:
        yaml.YAMLError, ValueError, TypeError: it is not valid YAML.
    """
    from jsonargparse import get_loader

    check_limits(word)
    return word if is_misread(word) else get_loader("yaml")(word)
