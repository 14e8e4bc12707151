"""Objectives have the values and gradients of verl 0.9.0, in float64."""

import json
from pathlib import Path

import pytest
import torch

from litgrpo.algorithms.advantages import Normalized, PassAtK, ReMax, Whitened
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    ClipCov,
    Clipped,
    KLCov,
    PolicyGradient,
)
from litgrpo.types import RewardTable, TokenLogprobs
from tests.support.by_hand import batch_of

VERL = json.loads((Path(__file__).parent / "verl.json").read_text())
MASK = torch.arange(5) < torch.tensor(VERL["lengths"])[:, None]
CLIP = Clipped(0.2, 0.28, max_ratio=3.0)
# {name in verl.json: the same loss here}
LOSSES = {
    "vanilla token-mean": Objective(surrogate=CLIP),
    "vanilla seq-mean-token-mean": Objective(surrogate=CLIP, loss_aggregation="sequence_mean"),
    "vanilla seq-mean-token-sum": Objective(surrogate=CLIP, loss_aggregation="sequence_sum"),
    "vanilla seq-mean-token-sum-norm": Objective(
        surrogate=CLIP, loss_aggregation="constant_length"
    ),
    "dppo_tv": Objective(surrogate=DPPO("tv", 0.05, 0.08, 1.2)),
    "dppo_kl": Objective(surrogate=DPPO("kl", 0.004, 0.003, 1.2)),
    "gspo": Objective(
        importance_sampling_level="sequence_token",
        surrogate=Clipped(0.1, 0.15),
        loss_aggregation="sequence_mean",
    ),
    "sapo": Objective(surrogate=SAPO(), loss_aggregation="sequence_mean"),
    "gpg": Objective(surrogate=PolicyGradient()),
    "clip_cov": Objective(surrogate=ClipCov(1.0, 0.1, 1.0, Clipped(0.2, 0.28))),
    "kl_cov": Objective(surrogate=KLCov(0.3, 0.5)),
    "geo_mean": Objective(surrogate=GMPO(0.4, 0.4), loss_aggregation="sequence_mean"),
    "dro": Objective(surrogate=PolicyGradient(), log_ratio_coef=0.3),
    "cispo": Objective(surrogate=CISPO(1.28)),
}
# verl adds 1e-6 to standard deviations, and 1e-8 to the variance over tokens.
ESTIMATES = {
    "grpo": Normalized(eps=1e-6),
    "grpo without std": Normalized(scale="none"),
    "grpo_passk": PassAtK(scale="group", eps=1e-6),
    "rloo": Normalized("others", "none"),
    "opo": Normalized("length_weighted", "none"),
    "reinforce_plus_plus": Whitened(Normalized("none", "none"), eps=0.0),
    "reinforce_plus_plus_baseline": Whitened(eps=0.0),
    "remax": ReMax(),
}


def read(name: str) -> torch.Tensor:
    return torch.tensor(VERL[name], dtype=torch.float64)


def test_every_value_of_verl_is_compared():
    assert LOSSES.keys() == VERL["losses"].keys()
    assert ESTIMATES.keys() == VERL["estimates"].keys()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_those_of_verl(name):
    objective, expected = LOSSES[name], VERL["losses"][name]
    rows = batch_of(
        MASK,
        completion_ids=torch.arange(30).view(6, 5),
        sampler_logprobs=read("old_logprobs"),
        advantages=read("advantages")[:, None].expand(6, 5),
        loss_weights=objective.loss_weights(
            MASK, torch.zeros(6, dtype=torch.bool), 5, dtype=torch.float64
        ),
        old_logprobs=read("old_logprobs"),
    )
    logprobs = read("logprobs").requires_grad_()

    found = objective.loss(TokenLogprobs(logprobs, torch.zeros_like(logprobs)), rows).loss
    found.backward()

    # verl adds 1e-8 to lengths; the 1.05 of SAPO is a float32 here, as in TRL.
    assert found.item() == pytest.approx(expected["loss"], rel=1e-6)
    gradient = torch.tensor(expected["gradient"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("name", ESTIMATES)
def test_advantages_equal_those_of_verl(name):
    total = read("rewards").view(2, 3)
    valid = torch.ones(2, 3, dtype=torch.bool)
    table = RewardTable({"r": total}, {"r": 1.0}, total, valid, greedy=read("greedy"))

    found = Objective(ESTIMATES[name]).token_advantages(table, MASK)

    expected = torch.tensor(VERL["estimates"][name])
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", VERL["kl"])
def test_the_kl_of_tokens_equals_that_of_verl(estimator):
    found = KLInReward(estimator=estimator).token_kl(read("logprobs"), read("ref_logprobs"), MASK)

    expected = torch.tensor(VERL["kl"][estimator], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
