"""How a run was set up: what its recipe says, what differed, what it ran with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from litgrpo.callbacks.loggers import flat
from litgrpo.cli.recipes import recipe_file
from litgrpo.tools.report.run_files import RunFiles
from litgrpo.tools.report.texts import visible

FLAGS = ("-c", "--config")
LONGEST = 300
OF_ONE_FOLDER = {"run_dir", "trainer.default_root_dir"}


@dataclass(frozen=True)
class Setting:
    """A key of the recipe.

    Args:
        key: dotted.
        recipe: what the recipe says; "" where it says nothing.
        used: what the run used.
    """

    key: str
    recipe: str
    used: str

    @property
    def differs(self) -> bool:
        """Whether the run used something else; a class may be named by its last word."""
        short = self.key.endswith("class_path") and self.used.endswith(f".{self.recipe}")
        return self.recipe != self.used and not short


def recipes_of(command: str) -> list[str]:
    """The recipes on a command line.

    Example:
        >>> recipes_of("python cli.py fit -c a.yaml --config=b.yaml --data.batch_size 4")
        ['a.yaml', 'b.yaml']
    """
    words = [part for word in shlex.split(command) for part in _halves(word)]
    return [word for flag, word in pairwise(words) if flag in FLAGS]


def _halves(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def stated(run: RunFiles) -> tuple[list[str], list[Setting]]:
    """Recipes of a run that are still there, and what they and the command line say.

    Args:
        run: with the command that started it.

    Returns:
        The recipes by name; their keys, those first that the run used otherwise. None of either
        where a recipe is not found.
    """
    names = recipes_of(run.command)
    try:
        texts = [recipe_file(name).read_text(encoding="utf-8") for name in names]
        found = [yaml.safe_load(text) for text in texts]
    except (ValueError, OSError, yaml.YAMLError):
        return [], []
    recipe: dict[str, Any] = {}
    for each in found:
        recipe |= dict(flat(each))
    used = dict(flat(run.config))
    typed = {key for key in typed_keys(run.command, used) if key not in OF_ONE_FOLDER}
    settings = [
        Setting(key, _shown(recipe, key), _shown(used, key))
        for key in {**recipe, **dict.fromkeys(sorted(typed))}
        if key in used
    ]
    return names, sorted(settings, key=lambda each: not each.differs)


def typed_keys(command: str, used: dict[str, Any]) -> set[str]:
    """Keys of the whole configuration that a command line set, by their short names or whole ones.

    Example:
        >>> typed_keys("litgrpo fit --model.group_size 4", {"model.init_args.group_size": 4})
        {'model.init_args.group_size'}
    """
    flags = {word.lstrip("-") for word in shlex.split(command) if word.startswith("--")}
    given = {flag.partition("=")[0] for flag in flags}
    return {key for key in used if {key, key.replace(".init_args.", ".")} & given}


def _shown(values: dict[str, Any], key: str) -> str:
    value = values.get(key, "")
    number = str(float(value)) if isinstance(value, int | float) else ""
    plain = str(value) if isinstance(value, bool) or not number else number.removesuffix(".0")
    return visible(plain, LONGEST)


def environment(run: RunFiles) -> list[tuple[str, str]]:
    """What the run ran with and how long, as far as the folder tells."""
    peak, tokens = (
        run.series.get(name, [(0, 0.0)])[-1][1]
        for name in ("perf/peak_memory_gib", "perf/generated_tokens")
    )
    seconds = run.summary.get("seconds")
    versions = run.summary.get("versions")
    known = {
        "seed": run.summary.get("seed", run.setting("seed_everything")),
        "accelerator": given(run, "trainer.accelerator"),
        "devices": given(run, "trainer.devices"),
        "iterations": f"{run.iterations:,}",
        "training": f"{seconds:,.0f} s" if isinstance(seconds, int | float) else None,
        "tokens sampled for training": f"{tokens:,.0f}" if tokens else None,
        "peak memory": f"{peak:.2f} GiB" if peak else None,
        **(versions if isinstance(versions, dict) else {}),
    }
    return [(name, visible(text, LONGEST)) for name, text in known.items() if text is not None]


def given(run: RunFiles, key: str) -> Any:
    """A setting, where it is more than `auto`."""
    value = run.setting(key)
    return None if value == "auto" else value


def repeat(run: RunFiles) -> list[str]:
    """Commands that train the same again: as typed, and from the folder's own configuration."""
    if not run.config:
        return []
    program = "litgrpo" if run.command.startswith("litgrpo") else "python cli.py"
    folder = str(run.setting("run_dir") or f"runs/{run.name}")
    again = f"{folder}-again"
    whole = ["fit", "-c", f"{folder}/config.yaml", "--run_dir", again]
    return [*filter(None, [run.command]), f"{program} {shlex.join(whole)}"]
