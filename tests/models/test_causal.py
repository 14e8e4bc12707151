import copy
from dataclasses import replace

import pytest
import torch

from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.models.reference import FrozenReference
from tests.support.causal import TEXTS, dense_logprobs, tokens
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy


def test_logprobs_equal_one_dense_unpadded_row_at_a_time(architecture):
    policy = tiny_policy(architecture)
    arguments = tokens(policy)
    got = policy.logprobs(arguments, temperature=0.7).logprobs
    expected = dense_logprobs(policy, arguments, temperature=0.7)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_gradients_equal_those_of_dense_logits(architecture):
    policy = tiny_policy(architecture)
    arguments = tokens(policy)
    weights = torch.randn(
        arguments.completion_ids.shape, generator=torch.Generator().manual_seed(1)
    )
    grads = []
    for logprobs in (policy.logprobs(arguments).logprobs, dense_logprobs(policy, arguments)):
        policy.zero_grad()
        (logprobs * weights).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 1e-5


def test_chunks_of_the_head_change_neither_values_nor_gradients(architecture):
    policy = tiny_policy(architecture)
    arguments = tokens(policy)
    results = []
    for chunk in (3, 1024):
        policy.few_logits = 2 * chunk * policy.vocab_size
        assert policy.chunk_size(2 * 1024 + 1) == chunk
        policy.zero_grad()
        out = policy.logprobs(arguments, entropy_grad=True)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in policy.parameters()])
        results.append((out.logprobs.detach(), out.entropy.detach(), grads))
    for small, large in zip(*results, strict=True):
        torch.testing.assert_close(small, large, atol=1e-4, rtol=1e-5)


def test_more_left_padding_does_not_change_log_probabilities(architecture):
    policy = tiny_policy(architecture)
    rows = tokens(policy)
    wide = prompt_batch(*TEXTS, length=20)
    narrow = policy.logprobs(rows).logprobs
    wider = replace(rows, prompt_ids=wide.prompt_ids, prompt_mask=wide.prompt_mask)
    padded = policy.logprobs(wider).logprobs
    torch.testing.assert_close(padded, narrow, atol=1e-5, rtol=1e-5)


def test_entropy_is_that_of_the_distribution():
    policy = tiny_policy("gemma2")
    arguments = tokens(policy)
    got = policy.logprobs(arguments).entropy
    prompts = (part[arguments.prompt_of] for part in (arguments.prompt_ids, arguments.prompt_mask))
    logits = policy.dense_logits(*prompts, arguments.completion_ids)[:, :-1]
    expected = torch.distributions.Categorical(logits=logits).entropy() * arguments.completion_mask
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_each_decoding_step_has_the_logits_of_the_plain_forward_pass(architecture, fused):
    policy = tiny_policy(architecture)
    prompts = prompt_batch("a longer prompt than the window", "b")
    fed = torch.randint(3, 259, (4, 5), generator=torch.Generator().manual_seed(0))
    ids, mask = (x.repeat_interleave(2, 0) for x in (prompts.prompt_ids, prompts.prompt_mask))
    expected = policy.dense_logits(ids, mask, fed)
    with policy.decoding(4, fused=fused):
        logits, state = policy.prefill(prompts.prompt_ids, prompts.prompt_mask, 2, 6)
        found = [logits.repeat_interleave(2, 0)]
        for column in range(5):
            found.append(policy.decode_step(fed[:, column], state))
            if architecture != "t5":
                assert state.get_seq_length() == prompts.prompt_ids.shape[1] + column + 1
    torch.testing.assert_close(torch.stack(found, 1), expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_steps_in_static_shapes_have_the_logits_of_the_plain_forward_pass(architecture):
    policy = tiny_policy(architecture)
    prompts = prompt_batch("a longer prompt than the window", "b")
    fed = torch.randint(3, 259, (4, 5), generator=torch.Generator().manual_seed(0))
    ids, mask = (x.repeat_interleave(2, 0) for x in (prompts.prompt_ids, prompts.prompt_mask))
    expected = policy.dense_logits(ids, mask, fed)
    decoder = policy.static_decoder
    with decoder.attention():
        logits, state = decoder.prefill(prompts.prompt_ids, prompts.prompt_mask, 2, 6)
        found = [logits]
        for column in range(5):
            logits, state = decoder.decode_step(fed[:, column], state)
            found.append(logits)
    torch.testing.assert_close(torch.stack(found, 1), expected, atol=2e-4, rtol=1e-4)


def test_tokens_of_an_environment_have_no_log_probability(architecture):
    policy = tiny_policy(architecture)
    rows = tokens(policy)
    observed = rows.completion_mask.clone()
    observed[:, 1::2] = False
    whole, part = policy.logprobs(rows), policy.logprobs(replace(rows, predicted=observed))
    assert not part.logprobs[~observed].any()
    assert not part.entropy[~observed].any()
    torch.testing.assert_close(part.logprobs[observed], whole.logprobs[observed])
    torch.testing.assert_close(part.entropy[observed], whole.entropy[observed])


def test_static_shapes_are_those_of_the_device_unless_set():
    policy = tiny_policy("llama")
    assert not policy.static_shapes
    policy.static_shapes = True
    assert policy.static_shapes
    policy.static_shapes = None
    assert not policy.static_shapes


def test_a_reference_moves_by_its_fraction_to_the_policy():
    policy, reference = tiny_policy("llama"), FrozenReference(tiny_policy("llama", seed=5))
    old = [p.clone() for p in reference.parameters()]
    reference.mix_in(policy, 0.25)
    pairs = zip(old, policy.parameters(), reference.parameters(), strict=True)
    for before, its, after in pairs:
        torch.testing.assert_close(after, 0.75 * before + 0.25 * its)


@pytest.mark.filterwarnings("ignore:.*target_modules.*")
@pytest.mark.parametrize(
    ("architecture", "lora"), [("qwen2", None), ("qwen2", LoRA(rank=4)), ("t5", None)]
)
def test_gradient_checkpointing_changes_no_gradient_and_no_decoder(architecture, lora):
    grads = []
    for checkpointing in (False, True):
        precision = Precision(gradient_checkpointing=checkpointing)
        torch.manual_seed(0)
        model = tiny_model(architecture)
        policy = build_policy(model, byte_tokenizer(), precision=precision, lora=lora)
        if architecture == "qwen2":
            assert policy.eval().can_fuse
        policy.train().logprobs(tokens(policy)).logprobs.sum().backward()
        trained = [p for p in policy.parameters() if p.requires_grad]
        grads.append(torch.cat([p.grad.flatten() for p in trained]))
    assert grads[0].abs().max() > 0
    assert (grads[0] - grads[1]).norm() < 1e-5 * grads[0].norm()


def test_a_frozen_reference_stays_as_it_is_while_the_policy_moves():
    policy = tiny_policy("llama")
    reference = FrozenReference(copy.deepcopy(policy))
    before = reference.logprobs(tokens(policy), temperature=1.0).logprobs
    policy.logprobs(tokens(policy)).logprobs.sum().backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert not [p for p in reference.parameters() if p.requires_grad]
    assert torch.equal(reference.logprobs(tokens(policy), temperature=1.0).logprobs, before)
    assert not reference.train().policy.training


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (2**10, 1), (2**12, 2)])
def test_small_products_of_decoding_use_one_thread(rows, expected, monkeypatch):
    policy, before = tiny_policy("qwen2"), torch.get_num_threads()
    monkeypatch.setattr(policy, "_largest_weight", 2**9)
    torch.set_num_threads(2)
    try:
        with policy.decoding(rows):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
