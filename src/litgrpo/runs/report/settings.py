"""Setup of a run: its recipe, the settings that differ from it, its environment."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from litgrpo.callbacks.loggers import flatten
from litgrpo.cli.recipes import recipe_file
from litgrpo.runs.run import Run
from litgrpo.text.secrets import mask_settings
from litgrpo.text.visible import visible

CONFIG_FLAGS = ("-c", "--config")
MAX_VALUE_CHARS = 300
PER_FOLDER = {"run_dir", "trainer.default_root_dir"}  # differ between any two runs


@dataclass(frozen=True)
class UsedSetting:
    """A setting of the recipe or the command line, and the value that the run used.

    Args:
        key: dotted.
        recipe: value in the recipe; "" if it has none.
        used: value in the config of the run.

    Example:
        >>> UsedSetting("model.init_args.group_size", "8", "4").differs
        True
    """

    key: str
    recipe: str
    used: str

    @property
    def differs(self) -> bool:
        """True if the run used another value; a class may be given by its bare name."""
        if self.key.endswith("class_path") and self.used.endswith(f".{self.recipe}"):
            return False
        return self.recipe != self.used


def recipes_in_command(command: str) -> list[str]:
    """Return the recipes on a command line.

    Example:
        >>> recipes_in_command("cli.py fit -c a.yaml --config=b.yaml --data.batch_size 4")
        ['a.yaml', 'b.yaml']
    """
    words = []
    for word in shlex.split(command):
        words += word.split("=", 1) if word.startswith("--") else [word]
    return [word for flag, word in pairwise(words) if flag in CONFIG_FLAGS]


def list_settings(run: Run) -> tuple[list[str], list[UsedSetting]]:
    """Return the recipes of a run, and the settings in them and on its command line.

    Args:
        run: with the command that started it.

    Returns:
        Names of the recipes; their settings, those with another value first. Empty lists if a
        recipe is not found.
    """
    names = recipes_in_command(run.command)
    recipe: dict[str, Any] = {}
    try:
        for name in names:
            content = yaml.safe_load(recipe_file(name).read_text(encoding="utf-8"))
            recipe |= dict(flatten(mask_settings(content)))
    except (ValueError, OSError, yaml.YAMLError):
        return [], []
    used = dict(flatten(run.config.values))
    on_command_line = sorted(keys_in_command(run.command, used) - PER_FOLDER)
    settings = [
        UsedSetting(key, _format_value(recipe.get(key, "")), _format_value(used[key]))
        for key in dict.fromkeys([*recipe, *on_command_line])
        if key in used
    ]
    return names, sorted(settings, key=lambda setting: not setting.differs)


def keys_in_command(command: str, used: dict[str, Any]) -> set[str]:
    """Return the config keys that a command line sets, with or without `init_args`.

    Example:
        >>> keys_in_command("litgrpo fit --model.group_size 4", {"model.init_args.group_size": 4})
        {'model.init_args.group_size'}
    """
    flags = {word.lstrip("-") for word in shlex.split(command) if word.startswith("--")}
    names = {flag.partition("=")[0] for flag in flags}
    return {key for key in used if {key, key.replace(".init_args.", ".")} & names}


def _format_value(value: Any) -> str:
    """Format a value; equal numbers give equal texts, such as 40 and 40.0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(float(value)).removesuffix(".0")
    return visible(value, MAX_VALUE_CHARS)


def describe_environment(run: Run) -> list[tuple[str, str]]:
    """Return seed, hardware, time, memory and versions of a run, if they are known."""
    facts: dict[str, Any] = {
        "seed": run.summary.get("seed", run.config.get("seed_everything")),
        "accelerator": run.config.get("trainer.accelerator"),
        "devices": run.config.get("trainer.devices"),
        "iterations": f"{run.iterations:,}",
    }
    facts = {name: value for name, value in facts.items() if value not in (None, "auto")}
    seconds = run.summary.get("seconds")
    if isinstance(seconds, int | float):
        facts["training"] = f"{seconds:,.0f} s"
    if "perf/generated_tokens" in run:
        tokens = run["perf/generated_tokens"].iloc[-1]
        facts["tokens generated for training"] = f"{tokens:,.0f}"
    if "perf/peak_memory_gib" in run:
        facts["peak memory"] = f"{run['perf/peak_memory_gib'].iloc[-1]:.2f} GiB"
    versions = run.summary.get("versions")
    if isinstance(versions, dict):
        facts |= versions
    return [(name, visible(value, MAX_VALUE_CHARS)) for name, value in facts.items()]


def repeat_commands(run: Run) -> list[str]:
    """Return commands that repeat the run: the original one, and one from its own config."""
    if not run.config.values:
        return []
    program = "litgrpo" if run.command.startswith("litgrpo") else "python cli.py"
    words = ["fit", "-c", f"{run.run_dir}/config.yaml", "--run_dir", f"{run.run_dir}-again"]
    from_config = f"{program} {shlex.join(words)}"
    return [run.command, from_config] if run.command else [from_config]
