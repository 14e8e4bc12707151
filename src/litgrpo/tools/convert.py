"""From the flat JSON settings of a Gemma 2 reasoning trainer to a recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from litgrpo.arguments import did_you_mean

TABLE = Path(__file__).parents[1] / "assets" / "gemma2_tpu_trainer.yaml"
SECTIONS = {"model", "data", "trainer"}  # of a recipe of ours, which may be JSON, too
KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
}
HEADER = """\
# Made from {name} by `convert`; every option of it is named in what `convert` said.
# Machine: a GPU of 80 GB or a TPU; add the overlay of yours from configs/hardware/ by a second -c.
# Model, prompt template and rewards are ours, not from {name}: change them to yours.
"""


def convert(settings: str, train: str | None = None, pretrained: str | None = None) -> None:
    """Turn the JSON settings of a Gemma 2 reasoning trainer into a recipe, printed as YAML.

    Where each option went is told on standard error. `fit -c SETTINGS.json` does the same on the
    way.

    Args:
        settings: the JSON file.
        train: source of the training data to put into the recipe.
        pretrained: the model to put into the recipe; default: google/gemma-2-2b-it.
    """
    text = converted(Path(settings))
    if text is None:
        raise ValueError(f"{settings} is no JSON file with options that can be converted.")
    recipe = yaml.safe_load(text)
    given = {"data": {"train": train}, "model": {"pretrained": pretrained}}
    for section, values in given.items():
        recipe[section]["init_args"] |= {k: v for k, v in values.items() if v is not None}
    print(as_yaml(recipe, Path(settings).name), end="")


def converted(path: Path) -> str | None:
    """The recipe for a file of old settings, after saying what became of them; None for others."""
    settings = old_settings(path)
    if settings is None:
        return None
    recipe, said = recipe_of(settings, str(path))
    lines = "".join(f"  {line}\n" for line in said)
    missing = "Rewards, prompt template and (by --data.train) your data are up to you.\n"
    print(f"{path} is converted:\n{lines}{missing}", end="", file=sys.stderr)
    return as_yaml(recipe, str(path))


def table() -> dict[str, Any]:
    """The options, and the recipes that they are put into."""
    content: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return content


def old_settings(path: Path) -> dict[str, Any] | None:
    """The settings in a JSON file, or None if it holds none of the options known here."""
    if path.suffix != ".json":
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the parser of recipes says what is wrong
    old = isinstance(settings, dict) and not settings.keys() & SECTIONS
    return settings if old and settings.keys() & table()["options"].keys() else None


def recipe_of(settings: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """A recipe for what the settings ask, with the old defaults where they say nothing.

    Args:
        settings: {option: value}.
        name: of the file, for messages.

    Returns:
        The recipe, and a line for each option that says where it went.

    Raises:
        ValueError: an unknown option, a value of another kind, or a group of one completion.
    """
    known = table()
    _check(settings, known["options"], name)
    values = {option: row.get("default") for option, row in known["options"].items()}
    values |= settings
    if values["use_grpo"] and values["num_completions_per_prompt"] < 2:  # noqa: PLR2004
        raise ValueError(
            f"{name}: num_completions_per_prompt is {values['num_completions_per_prompt']}; "
            "advantages compare completions of one prompt, so it must be at least 2."
        )
    recipe, said = known["recipes"][values["use_grpo"]], []
    for option, row in known["options"].items():
        value = values[option]
        new = row.get("values", {}).get(value, value)
        dropped = [known["dropped"][need] for need in row.get("needs", ()) if not values[need]]
        if "key" in row and not dropped and value is not None:
            _put(recipe, row["key"], new)
            default = "" if option in settings else " (its default)"
            remark = f" ({row['remark']})" if "remark" in row else ""
            said.append(f"{option}: {value}{default} -> {row['key']}: {new}{remark}")
        elif option in settings:
            said.append(f"{option}: {value} -> {[*dropped, new][0]}")
    return recipe, said


def _check(settings: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    for option, value in settings.items():
        if option not in options:
            raise ValueError(
                f"{name}: {option!r} is no option that can be converted"
                f"{did_you_mean(option, options)}. Known are {', '.join(options)}. Take it out, "
                "and find its key in our recipes by `python cli.py fit --model.help GRPO`."
            )
        kind = options[option]["kind"]
        if type(value) not in KINDS[kind]:
            raise ValueError(f"{name}: {option} is {value!r}; it must be of type {kind}.")


def _put(recipe: dict[str, Any], place: str, value: Any) -> None:
    *sections, last = place.split(".")
    for section in sections:
        recipe = recipe.setdefault(section, {})
    recipe[last] = value


def as_yaml(recipe: dict[str, Any], name: str) -> str:
    """The recipe as the text of a file."""
    return HEADER.format(name=name) + yaml.safe_dump(recipe, sort_keys=False, width=100)
