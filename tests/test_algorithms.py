"""Every published algorithm is a name and a row of docs/explanation/algorithm.md; both agree."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser, Namespace

from litgrpo import GRPO
from litgrpo.algorithms import advantages, surrogates, turns
from litgrpo.algorithms.correction import CORRECTIONS
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import CISPO, Clipped, PolicyGradient
from litgrpo.cli.parser import RecipeCLI
from litgrpo.types import TokenLogprobs
from tests.support.algorithms import ALGORITHMS, DISTILLING, PUBLISHED
from tests.support.by_hand import batch_of
from tests.support.raises import raises_for

ROOT = Path(__file__).parents[1]
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


def settings_of(*words: Path | str) -> Any:
    """The settings of the model that `litgrpo fit` parses from configs and options."""
    recipes = [word for path in words if isinstance(path, Path) for word in ("-c", str(path))]
    options = [word for word in words if isinstance(word, str)]
    return RecipeCLI([*recipes, *options]).config.model.init_args


def objective_of(*words: Path | str) -> Objective:
    """The objective that `litgrpo fit` builds from configs and options."""
    parser = ArgumentParser()
    parser.add_argument("--objective", type=Objective)
    return parser.instantiate(Namespace(objective=settings_of(*words).objective)).objective


def test_there_are_36_published_algorithms_with_their_sources():
    assert len(ALGORITHMS) == 36
    assert all(algorithm.source for algorithm in ALGORITHMS.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_name_turns_any_recipe_into_the_algorithm(name, tmp_path):
    contrary, named = tmp_path / "contrary.yaml", tmp_path / "named.yaml"
    contrary.write_text(CONTRARY)
    named.write_text(f"model: {{objective: {name}}}")

    assert objective_of(QUICKSTART, contrary, named) == PUBLISHED[name]
    assert objective_of(QUICKSTART, contrary, "--model.objective", name) == PUBLISHED[name]


def test_options_beside_a_name_and_after_it_change_the_published_objective(tmp_path):
    named = tmp_path / "named.yaml"
    named.write_text("model: {objective: {name: gspo, kl_coef: 0.01, surrogate: {clip_high: 0.5}}}")
    expected = replace(PUBLISHED["gspo"], kl_coef=0.01, surrogate=Clipped(3e-4, 0.5))

    assert objective_of(QUICKSTART, named) == expected
    after = objective_of(QUICKSTART, named, "--model.objective.surrogate.clip_low", "0.1")
    assert after == replace(expected, surrogate=Clipped(0.1, 0.5))
    words = ("--model.objective", "gspo", "--model.objective.surrogate", "CISPO")
    assert objective_of(QUICKSTART, *words) == replace(PUBLISHED["gspo"], surrogate=CISPO())
    for option in ("--model.objective", "--model.objective.name"):
        assert objective_of(QUICKSTART, named, option, "dapo") == PUBLISHED["dapo"]


def test_a_name_sets_what_belongs_to_it_unless_that_is_given():
    settings = settings_of(QUICKSTART, "--model.objective", "dapo")
    assert (settings.dynamic_sampling_attempts, settings.scoring.overlong_buffer_frac) == (8, 0.2)
    chat = settings_of(QUICKSTART, "--model.objective", "dapo", "--model.scoring.format", "chat")
    assert (chat.scoring.format, chat.scoring.overlong_buffer_frac) == ("chat", 0.2)
    options = ("--model.dynamic_sampling_attempts", "2", "--model.objective", "dapo")
    assert settings_of(QUICKSTART, *options).dynamic_sampling_attempts == 2
    assert settings_of(QUICKSTART, "--model.objective", "gspo").dynamic_sampling_attempts == 0


def test_python_takes_names_too():
    def build(objective: Any, **options: Any) -> GRPO:
        rewards = {"none": lambda prompts, completions: [0.0] * len(completions)}
        return GRPO("builtin:tiny-gemma2", rewards, objective=objective, **options)

    dapo = build("dapo", scoring={"overlong_buffer_frac": 0.5})
    assert dapo.objective == PUBLISHED["dapo"]
    assert dapo.hparams["dynamic_sampling_attempts"] == 8
    assert dapo.scorer.components["soft_overlong"].kwargs["soft_punish_cache"] == 128
    changed = build({"name": "cispo", "surrogate": {"max_ratio": 7.0}})
    assert changed.objective.surrogate == CISPO(7.0)


def test_an_unknown_name_lists_the_nearest_ones():
    for words in (["--model.objective", "dappo"], ["--model.objective", "{name: dappo}"]):
        with raises_for("'dappo'", "dppo, dapo"):
            objective_of(QUICKSTART, *words)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_an_importance_correction_has_a_name(name):
    objective = objective_of(QUICKSTART, "--model.objective.importance_correction", name)
    named = Objective(importance_correction=name)
    assert objective.resolved_correction == named.resolved_correction
    assert objective.resolved_correction == CORRECTIONS[name]
    with raises_for("importance_correction", "tis"):
        Objective(importance_correction="no")


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
    ratios = [] if row.importance_sampling_level == "token" else [row.importance_sampling_level]
    ratios += ["to the sampler"] if row.old_policy == "sampler" else []
    penalties = [f"{row.kl_coef} `{row.kl_estimator}`"] if row.needs_reference else []
    penalties += [f"{row.log_ratio_coef} `s^2`"] if row.log_ratio_coef else []
    return [
        f"`{describe(row.advantages)}`",
        ", ".join([*ratios, f"`{describe(row.surrogate)}`"]),
        f"`{row.loss_aggregation}`{mask}",
        ", ".join(penalties),
        f"`{name}`",
    ]


def test_the_table_of_the_page_says_what_the_code_does():
    page = (ROOT / "docs" / "explanation" / "algorithm.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.search(r"\| `(\w+)` \|$", line) and line.count("|") == 8
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
    training_batch = batch_of(
        mask,
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
