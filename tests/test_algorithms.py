"""Every published algorithm is a config and a row of docs/explanation/algorithm.md; all agree.

A config override is merged into a recipe key by key. Arguments that it does not set keep the value
of the recipe, even if it names another class that has an argument of the same name.
"""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace

from litgrpo.algorithms import advantages, surrogates, turns
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import PolicyGradient
from litgrpo.types import TokenLogprobs, TrainingBatch
from tests.support.algorithms import DISTILLING, PUBLISHED
from tests.support.recipes import parse

ROOT = Path(__file__).parents[1]
OVERLAYS = ROOT / "configs" / "algorithms"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MODULES = (advantages, surrogates, turns)
CHOICES = {name: value for module in MODULES for name, value in vars(module).items()}
# A recipe that has chosen everything already, and nothing as any algorithm does.
CONTRARY = """
model:
  init_args:
    objective:
      advantages: {class_path: Normalized, init_args: {baseline: batch, scale: mean, eps: 0.5}}
      importance_sampling_level: sequence
      old_policy: sampler
      surrogate: {class_path: Clipped, init_args: {clip_low: 0.9, clip_high: 0.9, max_ratio: 7.0}}
      loss_aggregation: {class_path: SequenceSum}
      log_ratio_coef: 0.3
      kl_coef: 0.7
      kl_estimator: abs
      kl_bias_correction: true
      exclude_zero_variance: true
      mask_truncated_completions: true
"""


def objective_of(*recipes: Path) -> Objective:
    """The objective that `litgrpo fit` builds from several configs."""
    parser = ArgumentParser()
    parser.add_argument("--objective", type=Objective)
    objective = parse(*recipes).model.init_args.objective
    return parser.instantiate(Namespace(objective=objective)).objective


# Settings outside of the objective.
BESIDES = {"dapo": {"dynamic_sampling_attempts", "overlong_buffer_frac"}}


def read(name: str) -> dict[str, Any]:
    recipe = yaml.safe_load((OVERLAYS / f"{name}.yaml").read_text())
    assert recipe.keys() == {"model"}
    assert recipe["model"].keys() == {"init_args"}
    assert recipe["model"]["init_args"].keys() == {"objective"} | BESIDES.get(name, set())
    return recipe["model"]["init_args"]["objective"]


def test_there_is_one_overlay_for_every_algorithm():
    assert {path.stem for path in OVERLAYS.iterdir()} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_overlay_turns_any_recipe_into_the_algorithm(name, tmp_path):
    contrary = tmp_path / "contrary.yaml"
    contrary.write_text(CONTRARY)
    objective = objective_of(QUICKSTART, contrary, OVERLAYS / f"{name}.yaml")
    if not objective.needs_reference:  # the estimator is unused then
        objective = replace(objective, kl_estimator="k3", kl_bias_correction=True)
    assert objective == PUBLISHED[name]


def parts(node: Any) -> Iterator[dict[str, Any]]:
    """Yield every class of a config override, with its arguments."""
    if isinstance(node, dict):
        if "class_path" in node:
            yield node
        for value in node.values():
            yield from parts(value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_overlay_states_all_that_makes_an_algorithm(name):
    chosen = read(name)
    default = Objective()
    differs = {
        field.name
        for row in PUBLISHED.values()
        for field in fields(row)
        if getattr(row, field.name) != getattr(default, field.name)
    }
    penalty = {"kl_estimator", "kl_bias_correction"}
    expected = differs | penalty if PUBLISHED[name].needs_reference else differs - penalty
    assert chosen.keys() == expected
    for part in parts(chosen):
        arguments = {field.name for field in fields(CHOICES[part["class_path"]])}
        assert part.get("init_args", {}).keys() == arguments


@pytest.mark.parametrize("name", ["on_policy", "gkd"])
def test_a_config_of_distillation_turns_the_quickstart_into_it(name):
    config = ROOT / "configs" / "distillation" / f"{name}.yaml"
    assert objective_of(QUICKSTART, config) == DISTILLING[name]


# --- the table of docs/explanation/algorithm.md ---


def describe(part: Any) -> str:
    """A choice as the table writes it: `Clipped(0.2, 0.28)`; without what is not given, or eps."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    texts = []
    for name, value in values.items():
        if is_dataclass(value):
            texts.append(describe(value))
        elif isinstance(value, bool):
            texts.append(name if value else f"not {name}")
        elif value is not None and name != "eps":
            texts.append(f"{value}")
    return type(part).__name__ + (f"({', '.join(texts)})" if texts else "")


def cells(name: str) -> list[str]:
    """Return the table cells of an algorithm, without name and paper."""
    row = PUBLISHED[name]
    mask = ", `mask_truncated_completions`" if row.mask_truncated_completions else ""
    mask += ", `exclude_zero_variance`" if row.exclude_zero_variance else ""
    level = row.importance_sampling_level
    level += ", to the sampler" if row.old_policy == "sampler" else ""
    penalties = [f"{row.kl_coef} `{row.kl_estimator}`"] if row.needs_reference else []
    penalties += [f"{row.log_ratio_coef} `s^2`"] if row.log_ratio_coef else []
    return [
        f"`{describe(row.advantages)}`",
        f"{level}, `{describe(row.surrogate)}`",
        f"`{row.loss_aggregation}`{mask}",
        ", ".join(penalties) or "none",
        f"[{name}.yaml](../../configs/algorithms/{name}.yaml)",
    ]


def test_the_table_of_the_page_says_what_the_code_does():
    page = (ROOT / "docs" / "explanation" / "algorithm.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.search(r"\(\.\./\.\./configs/algorithms/\w+\.yaml\) \|$", line)
    ]
    assert [row[2:] for row in rows] == [cells(name) for name in PUBLISHED]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_choice_of_an_algorithm_has_one_formula(name):
    page = (ROOT / "docs" / "explanation" / "algorithm.md").read_text()
    formulas = [line for line in page.splitlines() if line.startswith("| `") and "$" in line]
    row = PUBLISHED[name]
    choices = {*re.findall(r"[A-Z]\w+", f"{describe(row.advantages)} {describe(row.surrogate)}")}
    choices = {choice for choice in choices if choice in CHOICES}
    assert choices
    for choice in (*choices, row.importance_sampling_level, row.loss_aggregation):
        assert len([line for line in formulas if re.match(rf"\| `{choice}\b", line)]) == 1, choice


# --- what that page says about them ---


def gradient(objective: Objective) -> torch.Tensor:
    """[4, 5] gradient of the loss by log-probabilities, before the policy has moved."""
    generator = torch.Generator().manual_seed(0)
    now = -torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 2, 1, 4])[:, None]
    truncated = torch.tensor([True, False, False, False])
    training_batch = TrainingBatch(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_of=torch.zeros(4, dtype=torch.long),
        completion_ids=torch.zeros(4, 5, dtype=torch.long),
        completion_mask=mask,
        loss_mask=mask,
        sampler_logprobs=now.clone(),
        advantages=torch.tensor([[1.5], [-0.5], [-1.25], [0.25]]).double().expand(4, 5),
        loss_weights=objective.loss_weights(mask, truncated, 8, dtype=torch.float64),
    )
    now.requires_grad_()
    objective.loss(TokenLogprobs(now, torch.zeros_like(now)), training_batch).loss.backward()
    assert now.grad is not None
    return now.grad


@pytest.mark.parametrize("name", PUBLISHED)
def test_with_one_optimizer_step_per_rollout_every_surrogate_is_the_policy_gradient(name):
    row = replace(PUBLISHED[name], kl_coef=0.0)
    plain = replace(row, importance_sampling_level="token", surrogate=PolicyGradient())
    torch.testing.assert_close(gradient(row), gradient(plain))
