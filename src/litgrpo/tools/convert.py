"""From the flat JSON settings of a Gemma 2 reasoning trainer to a recipe."""

from __future__ import annotations

import copy
import difflib
import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

MODEL, DATA = "model.init_args", "data.init_args"
# Option: what it was when it was not given, and where it goes; None: see `_placed`.
PLACES: dict[str, tuple[Any, str | None]] = {
    "use_grpo": (True, None),
    "num_completions_per_prompt": (4, f"{MODEL}.group_size"),
    "generation_max_length": (256, f"{MODEL}.max_completion_len"),
    "generation_temperature": (0.8, f"{MODEL}.sampling.temperature"),
    "generation_top_p": (0.9, f"{MODEL}.sampling.top_p"),
    "generation_top_k": (50, f"{MODEL}.sampling.top_k"),
    "normalize_advantages": (True, f"{MODEL}.objective.advantages.init_args.scale"),
    "advantage_epsilon": (1e-8, f"{MODEL}.objective.advantages.init_args.eps"),
    "use_kl_penalty": (True, None),
    "kl_penalty_coef": (0.01, f"{MODEL}.objective.kl_coef"),
    "output_dir": (None, "run_dir"),
    "num_epochs": (3, "trainer.max_epochs"),
    "batch_size": (None, f"{DATA}.batch_size"),
    "learning_rate": (5e-5, f"{MODEL}.optimizer.init_args.lr"),
}
KINDS = {"output_dir": str, "batch_size": int}  # of the others: as their default
OF_BOTH = ("output_dir", "num_epochs", "batch_size", "learning_rate")
REMARKS = {
    "generation_max_length": "the prompt is not counted; see data.init_args.max_prompt_len",
    "kl_penalty_coef": "distance to the frozen start, not to the policy at sampling, which is 0",
    "learning_rate": "high for all weights of a model; 1e-6 is a usual start",
}
ASKED = (
    "{{ prompt }}\n\nThink step by step inside <reasoning></reasoning>, then give only the final"
    " answer inside <answer></answer>."
)
REWARDS = {
    "correct": {"function": "litgrpo.rewards.library.math.correctness"},
    "coherence": {
        "function": "litgrpo.rewards.library.reasoning.coherence",
        "weight": 0.2,
        "gate": "correct",
    },
    "quality": {
        "function": "litgrpo.rewards.library.quality.explanation_quality",
        "weight": 0.2,
        "gate": "correct",
    },
}
OPTIMIZER = {"class_path": "torch.optim.AdamW"}
GRPO: dict[str, Any] = {
    "model": {
        "class_path": "litgrpo.modules.grpo.GRPO",
        "init_args": {
            "pretrained": "google/gemma-2-2b-it",
            "rewards": REWARDS,
            "objective": {
                "advantages": {"class_path": "Normalized", "init_args": {"baseline": "group"}},
                # The sum over a completion's tokens.
                "weighting": {"class_path": "Constant", "init_args": {"by_limit": False}},
                "kl": "litgrpo.algorithm.kl.absolute",
            },
            "optimizer": OPTIMIZER,
        },
    },
    "data": {
        "class_path": "litgrpo.data.prompts.PromptData",
        "init_args": {"template": ASKED, "chat": True},
    },
}
SFT: dict[str, Any] = {
    "model": {
        "class_path": "litgrpo.modules.sft.SFT",
        "init_args": {"pretrained": "google/gemma-2-2b-it", "optimizer": OPTIMIZER},
    },
    "data": {
        "class_path": "litgrpo.data.pairs.PairData",
        "init_args": {"template": ASKED, "chat": True},
    },
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
    recipe = converted(Path(settings))
    if recipe is None:
        raise ValueError(f"{settings} is no JSON file with options that can be converted.")
    if train is not None:
        recipe["data"]["init_args"]["train"] = train
    if pretrained is not None:
        recipe["model"]["init_args"]["pretrained"] = pretrained
    print(as_yaml(recipe, Path(settings).name), end="")


def with_recipes(words: list[str], folder: Path) -> list[str]:
    """The command line with a recipe, written to `folder`, for each `-c` of old settings."""
    words = list(words)
    for place, (flag, word) in enumerate(pairwise(words), start=1):
        given = flag in ("-c", "--config") and word.endswith(".json")
        recipe = converted(Path(word)) if given else None
        if recipe is not None:
            path = folder / Path(word).with_suffix(".yaml").name  # a run is named after its recipe
            path.write_text(as_yaml(recipe, word), encoding="utf-8")
            words[place] = str(path)
    return words


def converted(path: Path) -> dict[str, Any] | None:
    """The recipe for a file of old settings, after saying what became of them; None for others."""
    settings = old_settings(path)
    if settings is None:
        return None
    recipe, said = recipe_of(settings, str(path))
    lines = "".join(f"  {line}\n" for line in said)
    missing = "Rewards, prompt template and (by --data.train) your data are up to you.\n"
    print(f"{path} is converted:\n{lines}{missing}", end="", file=sys.stderr)
    return recipe


def old_settings(path: Path) -> dict[str, Any] | None:
    """The settings in a JSON file, or None if it holds none of the options known here.

    A recipe of ours may be JSON, too; it has sections.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the parser of recipes says what is wrong
    old = isinstance(settings, dict) and not settings.keys() & {"model", "data", "trainer"}
    return settings if old and settings.keys() & PLACES.keys() else None


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
    for option in settings:
        if option not in PLACES:
            near = difflib.get_close_matches(option, PLACES, 1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"{name}: {option!r} is no option that can be converted: {guess}Known are "
                f"{', '.join(PLACES)}. Take it out, and find its key in our recipes by "
                "`python cli.py fit --model.help GRPO`."
            )
    known = {option: default for option, (default, _) in PLACES.items()} | dict(settings)
    for option, value in settings.items():
        _check_kind(option, value, name)
    if known["use_grpo"] and known["num_completions_per_prompt"] < 2:  # noqa: PLR2004
        raise ValueError(
            f"{name}: num_completions_per_prompt is {known['num_completions_per_prompt']}; "
            "advantages compare completions of one prompt, so it must be at least 2."
        )
    recipe = copy.deepcopy(GRPO if known["use_grpo"] else SFT)
    said = []
    for option, value in known.items():
        place, new, why = _placed(option, value, known)
        given = "" if option in settings else " (its default)"
        if place is not None and value is not None:
            _put(recipe, place, new)
            said.append(f"{option}: {value}{given} -> {place}: {new}{why and f' ({why})'}")
        elif option in settings:
            said.append(f"{option}: {value} -> {why}")
    return recipe, said


def _placed(option: str, value: Any, known: Mapping[str, Any]) -> tuple[str | None, Any, str]:
    """Where an option goes, its value there, and a remark."""
    if option == "use_grpo":
        return "model.class_path", (GRPO if value else SFT)["model"]["class_path"], ""
    if not known["use_grpo"] and option not in OF_BOTH:
        return None, None, "dropped: supervised training samples nothing"
    if option == "use_kl_penalty":
        return None, None, "kl_penalty_coef" if value else "no KL term, and no reference is loaded"
    if option == "kl_penalty_coef" and not known["use_kl_penalty"]:
        return None, None, "dropped: use_kl_penalty is false"
    if option == "normalize_advantages":
        value = "group" if value else "none"
    return PLACES[option][1], value, REMARKS.get(option, "")


def _check_kind(option: str, value: Any, name: str) -> None:
    default = PLACES[option][0]
    kind = KINDS.get(option, type(default))
    whole_is_fine = kind is float and isinstance(value, int) and not isinstance(value, bool)
    if type(value) is not kind and not whole_is_fine:
        raise ValueError(f"{name}: {option} is {value!r}; it must be of type {kind.__name__}.")


def _put(recipe: dict[str, Any], place: str, value: Any) -> None:
    *sections, last = place.split(".")
    for section in sections:
        recipe = recipe.setdefault(section, {})
    recipe[last] = value


def as_yaml(recipe: dict[str, Any], name: str) -> str:
    """The recipe as the text of a file."""
    return HEADER.format(name=name) + yaml.safe_dump(recipe, sort_keys=False, width=100)
