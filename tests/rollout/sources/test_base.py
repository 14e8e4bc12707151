"""What follows from where completions come from: corrections, and log-probabilities to reuse."""

from dataclasses import replace

import pytest

from litgrpo.algorithms.correction import ImportanceCorrection
from litgrpo.algorithms.objective import Objective
from litgrpo.models.loading.load import Precision
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sources.ahead import Ahead
from litgrpo.rollout.sources.base import (
    OnPolicy,
    can_reuse_sampler_logprobs,
    with_importance_correction,
)
from litgrpo.rollout.sources.stored import StoredRollouts
from tests.support.training import module


def test_a_stale_run_logs_which_terms_are_not_corrected(caplog):
    stale = Ahead(2)
    exact = Objective(kl_coef=0.1, kl_estimator="reverse_kl")

    def read_log(objective, source=stale):
        caplog.clear()
        with caplog.at_level("INFO", logger="litgrpo"):
            with_importance_correction(objective, LocalEngine(), source)
        return caplog.text

    assert "All terms of the loss are corrected" in read_log(Objective(kl_coef=0.1))
    assert "All terms but kl_coef are corrected" in read_log(exact)
    with_bonus = replace(exact, entropy_coef=0.1)
    assert "but kl_coef, entropy_coef are" in read_log(with_bonus)
    by_completion = ImportanceCorrection(level="sequence")
    own = replace(exact, importance_correction=by_completion)
    assert "All terms of the loss are corrected" in read_log(own)
    to_sampler = Objective(old_policy="sampler", log_ratio_coef=0.1)
    assert "but log_ratio_coef are" in read_log(to_sampler)
    assert read_log(exact, OnPolicy()) == read_log(own, OnPolicy()) == ""


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
    assert module(source=stale).objective.importance_correction is not None
