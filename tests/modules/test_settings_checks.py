"""Settings that contradict each other, the device, the trainer or the data are rejected early."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized
from litgrpo.algorithms.aggregation import MicroBatchTokenMean
from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.data.modules import PairData, PromptData
from litgrpo.models.loading.load import Precision
from litgrpo.modules import settings_checks
from litgrpo.modules.settings_checks import (
    can_reuse_sampler_logprobs,
    check_device,
    check_sizes,
    check_trainer_precision,
    overlong_reward,
    with_candidates,
    with_importance_correction,
)
from litgrpo.modules.sft import SFT
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.engines.static import StaticEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.sources.ahead import Ahead
from litgrpo.rollout.sources.base import OnPolicy
from litgrpo.rollout.sources.data_completions import DataCompletions
from litgrpo.rollout.sources.stored import StoredRollouts
from tests.support.models import tiny_policy
from tests.support.raises import raises_for
from tests.support.training import module, train

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.fixture
def compiles(monkeypatch):
    """A device that compiles a program for each set of shapes."""
    device = SimpleNamespace(static_shapes=True)
    monkeypatch.setattr(settings_checks, "backend", lambda _: device)


def test_a_stale_run_logs_which_terms_are_not_corrected(caplog):
    stale = Ahead(2)
    exact = Objective(kl_coef=0.1, kl_estimator="reverse_kl")

    def read_log(objective, source=stale, **options):
        caplog.clear()
        with caplog.at_level("INFO", logger="litgrpo"):
            with_importance_correction(objective, LocalEngine(), source, **options)
        return caplog.text

    assert "All terms of the loss are corrected" in read_log(Objective(kl_coef=0.1))
    assert "All terms but kl_coef are corrected" in read_log(exact)
    assert "but kl_coef, entropy_coef are" in read_log(exact, entropy_target=True)
    by_completion = ImportanceCorrection(level="sequence")
    own = replace(exact, importance_correction=by_completion)
    assert "All terms of the loss are corrected" in read_log(own)
    to_sampler = Objective(old_policy="sampler", log_ratio_coef=0.1)
    assert "but log_ratio_coef are" in read_log(to_sampler)
    assert read_log(exact, OnPolicy()) == read_log(own, OnPolicy()) == ""


def test_a_device_with_static_shapes_rejects_what_it_cannot_compute(compiles):
    check_device(CPU, StaticEngine(), Objective(), Precision(), OnPolicy())
    check_device(CPU, StaticEngine(), Objective(), Precision(disable_dropout=False), OnPolicy())
    with raises_for("engine", "LocalEngine"):
        check_device(CPU, LocalEngine(), Objective(), Precision(), OnPolicy())
    by_micro_batch = Objective(loss_aggregation=MicroBatchTokenMean())
    with raises_for("objective.loss_aggregation"):
        check_device(CPU, StaticEngine(), by_micro_batch, Precision(), OnPolicy())
    both = Precision(disable_dropout=False, gradient_checkpointing=True)
    with raises_for("precision.disable_dropout", "precision.gradient_checkpointing"):
        check_device(CPU, StaticEngine(), Objective(), both, OnPolicy())
    for source in (StoredRollouts("runs/demo"), DataCompletions("solution")):
        with raises_for("model.source", type(source).__name__):
            check_device(CPU, StaticEngine(), Objective(), Precision(), source)


def test_other_devices_compute_all_of_it():
    by_micro_batch = Objective(loss_aggregation=MicroBatchTokenMean())
    check_device(CPU, LocalEngine(), by_micro_batch, Precision(), OnPolicy())


@pytest.mark.parametrize(
    ("trainer_precision", "precision", "engine", "environment", "staleness", "expected"),
    [
        ("32-true", Precision(), LocalEngine(), None, 0, True),
        ("bf16-mixed", Precision(), LocalEngine(), None, 0, False),
        ("32-true", Precision(dtype="bfloat16"), LocalEngine(), None, 0, False),
        ("32-true", Precision(autocast_dtype="bfloat16"), LocalEngine(), None, 0, False),
        ("32-true", Precision(), LocalEngine(dtype="bfloat16"), None, 0, False),
        ("32-true", Precision(), LocalEngine(), object(), 0, False),
        ("32-true", Precision(), LocalEngine(), None, 1, False),
    ],
)
def test_sampler_logprobs_are_reused_in_full_precision_only(
    trainer_precision, precision, engine, environment, staleness, expected
):
    source = Ahead(staleness) if staleness else OnPolicy()
    given = trainer_precision, precision, engine, environment
    assert can_reuse_sampler_logprobs(*given, source) == expected
    assert not can_reuse_sampler_logprobs(*given, StoredRollouts("runs/demo"))


def test_a_group_of_one_needs_a_baseline_without_a_group():
    with raises_for("group_size"):
        check_sizes(1, 6, None, Objective())
    check_sizes(1, 6, None, Objective(Normalized("batch", "none")))
    with raises_for("max_iterations", "0"):
        check_sizes(4, 6, 0, Objective())


def test_greedy_groups_are_not_trained_on():
    grpo = module(sampling=Sampling(temperature=0.0))
    with raises_for("sampling.temperature", "0"):
        train(grpo, PromptData(["a", "b"], batch_size=2))


def test_the_candidate_set_of_filters_is_bounded():
    assert with_candidates(Sampling()) == Sampling()
    limited = with_candidates(Sampling(top_p=0.9))
    assert limited.top_k == Sampling().max_candidates
    with raises_for("sampling.top_k", "sampling.max_candidates"):
        with_candidates(Sampling(top_k=10_000))


def test_the_end_of_long_completions_is_punished():
    assert overlong_reward(0, 100) == {}
    (reward,) = overlong_reward(0.25, 100).values()
    assert reward.kwargs == {"max_completion_length": 100, "soft_punish_cache": 25}
    assert overlong_reward(0.001, 100)["soft_overlong"].kwargs["soft_punish_cache"] == 1
    for fraction in (-0.1, 1.5):
        with raises_for("overlong_buffer_frac", str(fraction)):
            overlong_reward(fraction, 100)


def test_an_engine_with_other_logprobs_is_corrected_unless_the_config_says_how():
    low, own = LocalEngine(dtype="bfloat16"), ImportanceCorrection(level="sequence")
    on_policy, stale = OnPolicy(), Ahead()
    assert with_importance_correction(Objective(), LocalEngine(), on_policy) == Objective()
    for engine, source in ((low, on_policy), (LocalEngine(), stale)):
        found = with_importance_correction(Objective(), engine, source)
        assert found.importance_correction == ImportanceCorrection()
    stored = StoredRollouts("runs/demo")
    found = with_importance_correction(Objective(), LocalEngine(), stored)
    assert found.importance_correction == ImportanceCorrection()
    given = Objective(importance_correction=own)
    assert with_importance_correction(given, low, stale).importance_correction is own
    to_sampler = Objective(old_policy="sampler")
    assert with_importance_correction(to_sampler, low, stale) == to_sampler
    assert module(source=stale).coefficients.objective.importance_correction is not None


def test_precisions_that_would_convert_prompts_are_rejected():
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        check_trainer_precision(precision)
    with raises_for("trainer.precision", "16-true"):
        check_trainer_precision("16-true")


@pytest.mark.parametrize("long", ["train", "val"])
def test_prompts_beyond_learned_positions_are_rejected_before_training(long):
    texts = {"train": ["a", "b"], "val": ["c", "d"]}
    texts[long] = [*texts[long], "x" * 60]
    grpo = module("gpt2", max_completion_length=12)
    grpo.policy = tiny_policy("gpt2", n_positions=64)
    with raises_for(long, "61", "64"):
        train(grpo, PromptData(**texts, batch_size=2))
    assert grpo.iteration == 0


def test_pairs_beyond_learned_positions_are_rejected():
    rows = [{"prompt": "a" * 60, "completion": "b" * 9}] * 2
    sft = SFT("")
    sft.policy = tiny_policy("gpt2", n_positions=64)
    sft.tokenizer = sft.policy.tokenizer
    with raises_for("71", "data.max_length"):
        train(sft, PairData(rows, batch_size=2))
