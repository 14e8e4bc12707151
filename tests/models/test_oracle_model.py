"""A causal policy has the log-probabilities and gradients of TRL 1.16.0."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.models.loading.load import build_policy
from litgrpo.types import TokenRows
from tests.oracle import reference
from tests.support.models import byte_tokenizer

CASE = reference.CASES["model"]
ARRAYS = {
    name: torch.from_numpy(array)
    for name, array in reference.ARRAYS.items()
    if name.startswith(("D/", "in/"))
}


def qwen2(dtype):
    """Return the two-layer Qwen2 whose log-probabilities TRL computed."""
    config = AutoConfig.for_model("qwen2", **CASE["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    weights = {name: ARRAYS[f"D/model/{name}"] for name in model.state_dict()}
    model.load_state_dict(weights)
    return model


def tokens():
    """Return completions of separate prompts."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    prompt_ids, prompt_mask, ids, mask = (ARRAYS[CASE[name]] for name in names)
    return TokenRows(prompt_ids, prompt_mask.bool(), torch.arange(len(ids)), ids, mask.bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_log_probabilities_and_gradients_equal_those_of_trl(dtype):
    policy = build_policy(qwen2(dtype), byte_tokenizer())
    new = policy.logprobs(tokens(), temperature=CASE["temperature"])
    np.testing.assert_allclose(new.logprobs.detach(), ARRAYS[CASE["logps"]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(new.entropy, ARRAYS[CASE["entropies"]], rtol=1e-5, atol=1e-5)

    (new.logprobs * ARRAYS[CASE["weights"]]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert gradients.keys() == CASE["grads"].keys()
    for name, where in CASE["grads"].items():
        expected = ARRAYS[where]
        error = (gradients[name] - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name} differs by {error:.1e}"


def test_tokens_at_padding_positions_do_not_change_log_probabilities():
    rows = tokens()
    policy = build_policy(qwen2(torch.float64), byte_tokenizer())
    junk = replace(
        rows,
        prompt_ids=torch.where(rows.prompt_mask, rows.prompt_ids, 7),
        completion_ids=torch.where(rows.completion_mask, rows.completion_ids, 5),
    )
    with torch.no_grad():
        one, other = policy.logprobs(rows), policy.logprobs(junk)
    assert torch.equal(one.logprobs, other.logprobs)
    assert (one.logprobs[~rows.completion_mask] == 0).all()
