import math

import pytest
import torch
from lightning import Callback, Trainer

from litgrpo.algorithms.objective import Objective
from litgrpo.data.modules import PromptData
from litgrpo.evaluation.evaluator import Evaluation
from litgrpo.models.loading.load import LoRA, load_policy
from litgrpo.models.policy import Policy
from litgrpo.modules import initial_policy as start
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards import Scoring
from litgrpo.rewards.scorer import Reward
from tests.support.models import prompt_batch

MODEL = "builtin:tiny-gemma2"
BATCH = prompt_batch("a", "hello")


def ones(prompts, completions, **_):
    return [1.0] * len(completions)


LIMITS = ("max_iterations", "max_generated_tokens")


def module(kl_coef: float = 0.0, lora: LoRA | None = None, **settings) -> GRPO:
    limits = {name: settings.pop(name) for name in LIMITS if name in settings}
    evaluation = {"num_samples": 2, "pass_at_k": [1], "greedy": False} | settings
    grpo = GRPO(
        MODEL,
        {"ones": Reward(ones)},
        objective=Objective(kl_coef=kl_coef),
        evaluation=Evaluation(**evaluation),
        max_completion_length=6,
        lora=lora,
        scoring=Scoring(num_workers=0),
        **limits,
    )
    grpo.configure_model()
    return grpo


def move(grpo: GRPO) -> GRPO:
    """The module after an iteration that changed its weights."""
    grpo.iteration = 1
    with torch.no_grad():
        for parameter in grpo.policy.parameters():
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.add_(noise * parameter.requires_grad)
    return grpo


def numbers(grpo: GRPO) -> dict[str, float]:
    grpo.rollout = grpo.validation_step(BATCH, 0)["rollout"]
    start.measure_initial_distance(grpo)
    return grpo.evaluator.report("val")


def compute_expected(grpo: GRPO) -> tuple[float, float]:
    """Perplexity and KL under a newly loaded policy, all rows at once."""
    rollout = grpo.rollout
    with torch.no_grad():
        at_start = load_policy(MODEL).logprobs(rollout.tokens).logprobs[rollout.loss_mask]
    now = rollout.sampler_logprobs[rollout.loss_mask]
    return math.exp(-at_start.mean()), float((now - at_start).mean())


def test_before_training_the_start_is_the_policy_and_costs_nothing(monkeypatch):
    monkeypatch.setattr(start, "load_reference", None)
    grpo = module()
    found = numbers(grpo)
    assert found["val/initial_kl"] == 0
    assert found["val/initial_perplexity"] == pytest.approx(compute_expected(grpo)[0], rel=1e-4)


@pytest.mark.parametrize(
    "settings", [{"kl_coef": 0.1}, {"lora": LoRA(rank=2)}, {}], ids=["reference", "lora", "loaded"]
)
def test_after_training_the_samples_are_asked_of_the_start(settings, monkeypatch):
    grpo = move(module(**settings))
    if settings:  # the reference is in memory
        monkeypatch.setattr(start, "load_reference", None)
    found = numbers(grpo)
    perplexity, kl = compute_expected(grpo)
    assert found["val/initial_perplexity"] == pytest.approx(perplexity, rel=1e-3)
    assert found["val/initial_kl"] == pytest.approx(kl, rel=1e-3)
    assert kl > 0.01


def test_the_weights_and_what_is_kept_stay_as_they_are():
    grpo = move(module())
    before = {name: value.clone() for name, value in grpo.state_dict().items()}
    numbers(grpo)
    assert before.keys() == grpo.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in grpo.state_dict().items())
    assert grpo.reference is None


def test_where_the_start_is_gone_a_line_says_so_and_nothing_is_lost():
    grpo = move(module())
    grpo.pretrained = "/nowhere/at/all"
    with pytest.warns(UserWarning, match="initial_perplexity and initial_kl are not measured"):
        found = numbers(grpo)
    assert found["val/ones"] == 1
    assert "val/initial_kl" not in found


def test_it_can_be_switched_off():
    found = numbers(move(module(text_quality=False)))
    assert not [name for name in found if "initial" in name or "distinct" in name]


class Reports(Callback):
    """Keeps the report of each evaluation, of the one before training first."""

    def __init__(self):
        self.reports = []

    def on_validation_end(self, trainer, pl_module):
        self.reports.append(pl_module.evaluation_report)


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({"max_iterations": 3}, {}),
        ({"max_generated_tokens": 100}, {}),  # 48 in an iteration
        ({}, {"max_epochs": 3}),
        ({}, {"max_steps": 3}),
    ],
    ids=["iterations", "tokens", "epochs", "steps"],
)
def test_the_start_is_loaded_for_the_evaluation_that_ends_a_run(settings, limits, tmp_path):
    grpo, reports = module(**settings), Reports()
    trainer = Trainer(
        callbacks=[reports], enable_progress_bar=False, default_root_dir=tmp_path, **limits
    )
    trainer.fit(grpo, PromptData(["b"], val=["a", "hello"], batch_size=1))
    assert grpo.iteration == 3
    have = ["val/initial_kl" in report for report in reports.reports]
    assert have == [True, False, False, True]
    grpo.evaluation_report = {}
    trainer.validate(grpo, PromptData(val=["a", "hello"]), verbose=False)
    assert grpo.evaluation_report == pytest.approx(reports.reports[-2], abs=1e-6)


def test_an_evaluation_at_another_temperature_asks_the_start_at_it():
    grpo = module(temperature=0.5)
    grpo.iteration = 1  # the weights have not moved, so the distance is 0 at the right temperature
    assert numbers(grpo)["val/initial_kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "fits"), [({"kl_coef": 0.1}, 1), ({"lora": LoRA(rank=2)}, 2), ({}, 1), ({}, 0)]
)
def test_an_evaluation_compares_fewer_rows_at_once_if_memory_needs_it(monkeypatch, settings, fits):
    grpo = move(module(**settings))
    expected = numbers(grpo)
    logprobs = Policy.logprobs

    def limit_rows(self, rows, **options):
        if len(rows.completion_ids) > fits:
            raise torch.OutOfMemoryError("a test")
        return logprobs(self, rows, **options)

    monkeypatch.setattr(Policy, "logprobs", limit_rows)
    with pytest.warns(UserWarning, match="Out of memory with|are not measured"):
        found = numbers(grpo)
    assert grpo.learning_limit.max_rows == max(fits, 1)
    if fits:
        assert found == pytest.approx(expected, rel=1e-4)
    else:  # at the end of a run, which keeps its weights
        assert "val/initial_kl" not in found
