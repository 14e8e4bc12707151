"""Objectives have the values and gradients of TRL 1.16.0, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.surrogates import CISPO
from tests.oracle.adapter import advantages, importance, loss
from tests.oracle.reference import ARRAYS, CASES


def name_of(case) -> str:
    return "-".join(str(case[key]) for key in ("id", "loss_type", "level") if key in case)


@pytest.mark.parametrize("case", CASES["loss"], ids=name_of)
def test_loss_and_gradients_equal_those_of_trl(case):
    value, grad_logprobs, grad_entropies = loss(case, ARRAYS)

    np.testing.assert_allclose(value, ARRAYS[case["loss"]], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grad_logprobs, ARRAYS[case["grad_logps"]], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        grad_entropies, ARRAYS[case["grad_entropies"]], rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("case", CASES["advantages"], ids=name_of)
def test_advantages_equal_those_of_trl(case):
    np.testing.assert_allclose(
        advantages(case, ARRAYS), ARRAYS[case["advantages"]], rtol=1e-5, atol=1e-5
    )


def test_equal_rewards_give_exactly_zero_advantages_where_trl_leaves_rounding_noise():
    case = CASES["advantages"][0] | {"rewards": "noisy", "reward_weights": [1.0]}
    noisy = np.float32(0.1) * np.ones((8, 1), np.float32)
    noisy[::2] = np.nextafter(np.float32(0.1), np.float32(1.0))

    assert np.abs(noisy - noisy.mean()).max() > 0
    assert (advantages(case, {"noisy": noisy}) == 0).all()


def test_the_default_cispo_cap_is_5_and_lower_caps_of_trl_warn():
    capped = [case for case in CASES["loss"] if case["loss_type"] == "cispo"]

    assert {case["epsilon_high"] for case in capped} >= {5.0, 0.28}
    assert CISPO().max_ratio == 5.0
    with pytest.warns(UserWarning, match="max_ratio"):
        CISPO(0.28)


@pytest.mark.parametrize("number", range(len(CASES["importance"]["cases"])))
def test_importance_weights_equal_those_of_trl(number):
    case = CASES["importance"]["cases"][number]
    sampler = ARRAYS["in/sampling_logps"].copy()
    sampler[0, 3] = np.nan

    weights = importance(case, ARRAYS, ARRAYS["in/old_logps"], sampler)

    np.testing.assert_allclose(weights, ARRAYS[case["ratio"]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", range(len(CASES["truncation"]["cases"])))
def test_masks_of_truncated_completions_equal_those_of_trl(number):
    case, cases = CASES["truncation"]["cases"][number], CASES["truncation"]
    ends = (cases["eos_token_id"], cases["pad_token_id"])
    truncated = torch.tensor([ids[-1] not in ends for ids in cases["completion_ids"]])
    mask = torch.from_numpy(ARRAYS["in/completion_mask"]).bool()
    expected = torch.from_numpy(ARRAYS[case["completion_mask"]]).bool()
    objective = Objective(mask_truncated_completions=case["mask_truncated_completions"])
    if case["tool_mask"]:
        tools = torch.from_numpy(ARRAYS[case["tool_mask_out"]]).bool()
        mask, expected = mask & tools, expected & tools

    counted = objective.loss_weights(mask, truncated, max_completion_length=16) > 0

    assert torch.equal(counted, expected)
    assert counted.sum() == case["num_items_in_batch"]
