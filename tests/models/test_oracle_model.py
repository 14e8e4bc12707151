"""A causal policy's log-probabilities and gradients against those of a widely used trainer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.models.loading import build_policy
from litgrpo.types import TokenRows
from tests.support.models import byte_tokenizer

FOLDER = Path(__file__).parents[3] / "shared" / "oracle"
if not FOLDER.is_dir():
    pytest.skip(f"the oracle is not here: {FOLDER}", allow_module_level=True)

CASE = json.loads((FOLDER / "oracle.json").read_text())["model"]
with np.load(FOLDER / "oracle.npz") as file:
    ARRAYS = {name: torch.from_numpy(file[name]) for name in file if name[:2] in ("D/", "in")}


def oracle_model(dtype):
    """The oracle's two-layer Qwen2, with its weights."""
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
def test_log_probabilities_and_gradients_equal_the_oracle(dtype):
    policy = build_policy(oracle_model(dtype), byte_tokenizer())
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


def test_padding_holds_junk_and_does_not_matter():
    rows = tokens()
    policy = build_policy(oracle_model(torch.float64), byte_tokenizer())
    junk = replace(
        rows,
        prompt_ids=torch.where(rows.prompt_mask, rows.prompt_ids, 7),
        completion_ids=torch.where(rows.completion_mask, rows.completion_ids, 5),
    )
    with torch.no_grad():
        one, other = policy.logprobs(rows), policy.logprobs(junk)
    assert torch.equal(one.logprobs, other.logprobs)
    assert (one.logprobs[~rows.completion_mask] == 0).all()
