"""A policy in shared memory: the same object elsewhere, with the same bytes under its weights."""

import pickle

import pytest
import torch

from litgrpo.models.loading import LoRA, as_policy
from litgrpo.rollout.engines.shared_policy import SharedPolicy
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy


@torch.no_grad()
def logits(policy):
    prompts = prompt_batch("hello", "a")
    return policy.dense_logits(prompts.prompt_ids, prompts.prompt_mask, torch.tensor([[3], [4]]))


def adapted():
    return as_policy(tiny_model("qwen2"), byte_tokenizer(), lora=LoRA(rank=2)).eval()


@pytest.mark.parametrize(
    "policy", [tiny_policy("qwen2"), tiny_policy("gemma2"), tiny_policy("t5"), adapted()]
)
def test_what_is_read_is_the_policy_and_sees_what_is_written(policy):
    shared = SharedPolicy(policy)
    other = pickle.loads(pickle.dumps(shared))
    assert torch.equal(logits(other), logits(policy))
    assert not any(weight.requires_grad for weight in other.parameters())
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.25)
    assert not torch.equal(logits(other), logits(policy))  # the policy's own memory is apart
    shared.update()
    assert torch.equal(logits(other), logits(policy))
    mine, theirs = (each.model.get_input_embeddings().weight for each in (policy, other))
    tied = policy.model.get_output_embeddings().weight is mine
    assert (other.model.get_output_embeddings().weight is theirs) is tied


def test_it_is_of_this_policy_as_it_is():
    policy = tiny_policy("qwen2")
    shared = SharedPolicy(policy)
    assert shared.is_of(policy)
    assert not shared.is_of(tiny_policy("qwen2"))
    head = policy.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    assert not shared.is_of(policy)


def test_weights_that_are_no_plain_numbers_here_are_refused():
    policy = tiny_policy("qwen2")
    policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.to("meta"))
    with pytest.raises(ValueError, match="a Parameter on meta: divided, quantized or on a device"):
        SharedPolicy(policy)


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ValueError, match="share weights as Linux does it; this is darwin"):
        SharedPolicy(tiny_policy("qwen2"))
