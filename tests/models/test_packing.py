from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from litgrpo.models.architectures import DECODER_ONLY
from litgrpo.models.kernels import packed_attention as flash
from litgrpo.models.kernels.packed_attention import attend_packed
from litgrpo.models.loading.load import LoRA, Precision, build_policy
from litgrpo.models.packing import (
    Packing,
    bucket_by_parent,
    can_share,
    group_similar_lengths,
    sharing_pays,
)
from litgrpo.models.reference import BaseModelReference
from litgrpo.types import TokenRows
from tests.support.models import (
    ARCHITECTURES,
    byte_tokenizer,
    prompt_batch,
    tiny_model,
    tiny_policy,
)
from tests.support.packing import SPECIAL, model_of_type, rows


def test_packing_equals_an_example_computed_by_hand():
    prompt_ids = torch.tensor([[0, 11, 12], [21, 22, 23]])
    completion_ids = torch.tensor([[5, 6, 0], [7, 8, 9], [4, 0, 0]])
    packing = Packing.of_groups(
        TokenRows(
            prompt_ids, prompt_ids > 0, torch.tensor([1, 0, 1]), completion_ids, completion_ids > 0
        )
    )
    # Prompt 0, the completion 7 8 (9 is not fed), prompt 1, the completion 5 (6 is not fed).
    assert packing.num_tokens == 8
    assert packing.ids.tolist() == [11, 12, 7, 8, 21, 22, 23, 5, *[0] * 120]
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, *[0] * 120]
    assert packing.groups == [[0, 2, 4], [4, 7, 8]]
    # 5 6 follow tokens 6 7; 7 8 9 follow 1 2 3; 4 follows 6.
    assert packing.predicting.tolist() == [6, 7, 1, 2, 3, 6]
    (bucket,) = packing.suffixes
    assert bucket.to_grid(packing.ids).tolist() == [[7, 8], [5, 0]]
    assert bucket.from_grid(bucket.to_grid(packing.ids)).tolist() == [7, 8, 5]
    assert packing.prefixes.to_grid(packing.ids).tolist() == [[11, 12, 0], [21, 22, 23]]


@st.composite
def token_rows(draw):
    """Prompts padded on the left, completions of any of them, with token ids that all differ."""
    prompts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    prompt_of = [draw(st.integers(0, len(prompts) - 1)) for _ in lengths]
    width = max(prompts)
    prompt_mask = torch.arange(width) >= width - torch.tensor(prompts)[:, None]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    prompt_ids = 1 + torch.arange(prompt_mask.numel()).view_as(prompt_mask) * prompt_mask
    ids = (100 + torch.arange(mask.numel()).view_as(mask)) * mask
    return TokenRows(prompt_ids * prompt_mask, prompt_mask, torch.tensor(prompt_of), ids, mask)


@given(token_rows())
def test_packed_tokens_are_predicted_by_the_token_before_them(given_rows):
    packing = Packing.of_groups(given_rows)
    before = []  # the token before each completion token, row by row
    for row, own in enumerate(given_rows.prompt_of):
        prompt = given_rows.prompt_ids[own][given_rows.prompt_mask[own]].tolist()
        completion = given_rows.completion_ids[row][given_rows.completion_mask[row]].tolist()
        before += [prompt[-1], *completion[:-1]]
    assert packing.ids[packing.predicting].tolist() == before
    # Prompts and fed tokens occur once each, at their positions, in their grids and back.
    fed = int(given_rows.completion_mask[:, 1:].sum())
    assert packing.num_tokens == int(given_rows.prompt_mask.sum()) + fed
    for bucket in [packing.prefixes, *packing.suffixes]:
        grid = bucket.from_grid(bucket.to_grid(packing.ids))
        assert torch.equal(grid, packing.ids[bucket.tokens])
    tokens = [packing.prefixes.tokens, *(bucket.tokens for bucket in packing.suffixes)]
    assert sorted(torch.cat(tokens).tolist()) == list(range(packing.num_tokens))
    longest = max(
        int(given_rows.prompt_mask[own].sum()) + int(mask.sum()) - 1
        for own, mask in zip(given_rows.prompt_of, given_rows.completion_mask, strict=True)
    )
    assert packing.longest >= longest


@given(token_rows())
def test_packed_rows_of_fine_tuning_are_predicted_by_the_token_before_them(given_rows):
    own = given_rows.prompt_of
    ids = torch.cat([given_rows.prompt_ids[own], given_rows.completion_ids], 1)
    prompt_mask = given_rows.prompt_mask[own]
    mask = torch.cat([prompt_mask, given_rows.completion_mask], 1)
    targets = torch.cat([torch.zeros_like(prompt_mask), given_rows.completion_mask], 1)
    packing = Packing.of_rows(ids, mask, targets)
    assert packing.ids[packing.predicting].tolist() == ids[:, :-1][targets[:, 1:]].tolist()
    assert packing.ids[packing.predicting + 1].tolist() == ids[targets].tolist()
    assert packing.num_tokens == int(mask.sum())


@pytest.mark.parametrize("window", [6, 7, 8, None])
def test_a_window_shorter_than_a_row_by_one_still_hides_a_token(window):
    mask = torch.ones(1, 7, dtype=torch.bool)
    packing = Packing.of_rows(torch.arange(7)[None], mask, mask & (torch.arange(7) > 0))
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, len(packing.ids), 8, generator=generator)
    found, _ = attend_packed(
        torch.nn.Module(), q, k, v, None, packing=packing, scaling=0.5, sliding_window=window
    )
    back = torch.arange(7)[:, None] - torch.arange(7)
    visible = (back >= 0) & (back < (window or 7))
    q, k, v = (x[:, :, :7] for x in (q, k, v))
    weights = (q @ k.mT * 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(found[:, :7], (weights @ v).transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_on_grids_keeps_the_dtype_that_autocast_gives_it(softcap):
    packing = Packing.of_groups(rows())
    q, k, v = torch.randn(3, 1, 2, len(packing.ids), 8)
    settings = dict(packing=packing, scaling=0.5, sliding_window=5, softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend_packed(torch.nn.Module(), q, k, v, None, **settings)
    assert found.dtype == torch.bfloat16  # float32 is the promotion that CUDA does not do


def test_this_processor_has_the_kernel_for_packed_rows():
    assert flash._kernel_works()


@pytest.mark.parametrize("number", [0, 1])
def test_a_kernel_with_one_wrong_gradient_is_not_used(monkeypatch, number):
    backward = flash._attend_backward

    def with_fault(*arguments, **settings):
        found = list(backward(*arguments, **settings))
        found[number] = found[number] * 1.01
        return found

    monkeypatch.setattr(flash, "_attend_backward", with_fault)
    flash._kernel_works.cache_clear()
    assert not flash.has_flash_kernel_for(torch.zeros(1))
    monkeypatch.undo()
    flash._kernel_works.cache_clear()
    assert flash.has_flash_kernel_for(torch.zeros(1))


def test_rows_of_similar_length_share_a_bucket():
    lengths = torch.tensor([100, 1, 59, 60, 0, 40, 16, 3])
    parts = [lengths[part].tolist() for part in group_similar_lengths(lengths)]
    assert parts == [[100, 60], [59, 40], [16, 3, 1]]


def test_unknown_models_and_dropout_read_rows_one_by_one():
    assert can_share(tiny_model("qwen2"))
    assert can_share(tiny_model("gpt2", summary_first_dropout=0.1))  # of a head that is not used
    assert not can_share(tiny_model("gpt2", attn_pdrop=0.1))
    assert not can_share(AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **SPECIAL)))
    off = build_policy(
        tiny_model("qwen2"), byte_tokenizer(), precision=Precision(share_prompts=False)
    )
    assert not off.computes_prompts_once


def test_rows_are_packed_only_if_it_saves_tokens():
    assert sharing_pays(rows())
    longest = prompt_batch("same length", "these do so")
    ids = rows(lengths=(5, 5), prompt_of=(0, 1)).completion_ids
    prompts = longest.prompt_ids, longest.prompt_mask, torch.tensor([0, 1])
    assert not sharing_pays(TokenRows(*prompts, ids, torch.ones_like(ids, dtype=torch.bool)))
    holes = rows().completion_mask & (torch.arange(30) != 1)
    assert not sharing_pays(replace(rows(), completion_mask=holes))


LENGTHS = torch.tensor([3, 9, 1, 9, 4, 4, 30, 0, 2])


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(None, None), (3, None), (None, 25), (4, 31)])
def test_family_buckets_hold_every_row_once_and_share_parents_within_the_limits(
    max_rows, max_tokens
):
    parents = torch.tensor([0, 2, 0, 2, 2, 0, 3, 2, 0])
    of_parents = torch.tensor([7, 99, 2, 20])
    buckets = bucket_by_parent(
        LENGTHS, of_parents, parents, max_rows=max_rows, max_tokens=max_tokens
    )
    assert sorted(torch.cat(buckets).tolist()) == list(range(len(LENGTHS)))
    for each in buckets:
        tokens = int(LENGTHS[each].sum() + of_parents[parents[each].unique()].sum())
        assert len(each) <= (max_rows or len(LENGTHS))
        assert max_tokens is None or tokens <= max_tokens or len(each) == 1


def test_rows_of_a_prompt_stay_together_if_they_fit():
    lengths, parents = torch.full((6,), 10), torch.tensor([0, 1, 0, 1, 0, 1])
    buckets = bucket_by_parent(lengths, torch.tensor([5, 5]), parents, max_tokens=69)
    assert [each.tolist() for each in buckets] == [[0, 2, 4], [1, 3, 5]]
    none = torch.tensor([], dtype=torch.long)
    assert bucket_by_parent(none, none, none) == []


@pytest.fixture(params=[name for name in ARCHITECTURES if name != "t5"])
def architecture(request) -> str:
    """The decoder-only architectures: an encoder has its own way to share a prompt."""
    return request.param


def both(policy, arguments, **kwargs):
    """Log-probs, entropies and gradients: packed, and of each row with its own prompt."""
    weights = torch.randn(
        arguments.completion_ids.shape, generator=torch.Generator().manual_seed(1)
    )
    results = []
    for policy.share_prompts in (True, False):
        policy.zero_grad()
        out = policy.logprobs(arguments, **kwargs)
        (out.logprobs * weights).sum().backward()
        grads = [p.grad.double().flatten() for p in policy.parameters() if p.grad is not None]
        results.append((out.logprobs.detach(), out.entropy.detach(), torch.cat(grads)))
    return results


def assert_same(packed, plain, *, nats=1e-5, relative=1e-5):
    for one, other in zip(packed[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, other, atol=nats, rtol=nats)
    assert (packed[2] - plain[2]).norm() <= relative * plain[2].norm()


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def fused(request, monkeypatch):
    """With the fused kernel, and as where there is none."""
    if not request.param:
        monkeypatch.setattr(flash, "has_flash_kernel_for", lambda query: False)
    return request.param


def test_packed_rows_equal_plain_rows(architecture, fused):
    policy = tiny_policy(architecture)
    assert_same(*both(policy, rows(), temperature=0.7))


def test_packed_rows_equal_plain_rows_to_the_last_digits_in_float64(fused):
    policy = tiny_policy("gpt2")  # the others compute their norms in float32 even so
    policy.model.double()
    assert_same(*both(policy, rows(), temperature=0.7), nats=1e-10, relative=1e-10)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_equals_its_definition_in_float64(window, softcap, fused):
    packing = Packing.of_groups(rows())
    generator = torch.Generator().manual_seed(0)

    def random(heads):
        shape = (1, heads, len(packing.ids), 8)
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    inputs = query, keys, values = random(4), random(2), random(2)
    settings = dict(scaling=0.3, sliding_window=window, softcap=softcap)
    got, _ = attend_packed(None, *inputs, None, packing=packing, **settings)

    keys, values = (x.repeat_interleave(2, 1) for x in (keys, values))
    scores = query @ keys.transpose(2, 3) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    expected = scores.masked_fill(~visible(packing, window), -torch.inf).softmax(-1) @ values
    expected = expected.transpose(1, 2).clone()
    expected[:, packing.num_tokens :] = 0  # nothing depends on these
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    weights = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    grads = [torch.autograd.grad((x * weights).sum(), inputs) for x in (got, expected)]
    for found, of_definition in zip(*grads, strict=True):
        torch.testing.assert_close(found, of_definition, atol=1e-10, rtol=1e-10)


def visible(packing, window):
    """[T, T] the attention mask, token by token: the own row's earlier tokens and its prompt's."""
    prompt_of, mask = rows().prompt_of, rows().completion_mask
    row, prompt = torch.full((2, len(packing.ids)), -1)
    for number, (start, middle, end) in enumerate(packing.groups):
        prompt[start:end], row[start:middle] = number, -1
        here, at = [m for m in range(len(mask)) if prompt_of[m] == number], middle
        for m in here:
            fed = int(mask[m].sum()) - 1
            row[at : at + fed] = m
            at += fed
        assert at == end
    back = packing.positions[:, None] - packing.positions
    seen = (prompt[:, None] == prompt) & ((row[:, None] == row) | (row == -1)) & (back >= 0)
    return seen if window is None else seen & (back < window)


def test_under_bfloat16_autocast_packed_rows_are_as_near_to_float32_as_plain_rows(
    architecture, fused
):
    policy = tiny_policy(architecture, initializer_range=0.05)
    exact = both(policy, rows())[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = both(policy, rows())
    errors = [float((r[2] - exact[2]).norm() / exact[2].norm()) for r in results]
    assert errors[0] < 1.5 * errors[1] < 0.15
    for result in results:
        assert (result[0] - exact[0]).abs().max() < 0.1


def test_a_window_below_the_length_is_kept_with_and_without_soft_caps(fused):
    settings = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
    assert_same(*both(tiny_policy("gemma2", **settings), rows()))
    sliding = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert_same(*both(tiny_policy("qwen2", **sliding), rows()))


def test_completions_of_one_token_need_no_suffix(architecture, fused):
    arguments = rows(lengths=(1, 1, 1, 1, 1, 1, 1, 1))
    assert not Packing.of_groups(arguments).suffixes
    assert_same(*both(tiny_policy(architecture), arguments))


def test_recomputing_activations_does_not_change_the_gradient(architecture):
    precision = Precision(gradient_checkpointing=True)
    frugal = build_policy(tiny_model(architecture), byte_tokenizer(), precision=precision).train()
    _, plain = both(tiny_policy(architecture), rows())
    assert_same(both(frugal, rows())[0], plain)


@pytest.mark.filterwarnings("ignore:.*target_modules.*")
@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*")
def test_packed_adapters_and_their_base_equal_plain_rows(
    architecture,
):
    policy = build_policy(tiny_model(architecture), byte_tokenizer(), lora=LoRA(rank=4))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    assert_same(*both(policy, rows()))
    reference = BaseModelReference(policy)
    said = []
    for policy.share_prompts in (True, False):
        said.append(reference.logprobs(rows(), temperature=1.0).logprobs)
    torch.testing.assert_close(*said, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", DECODER_ONLY)
def test_every_model_type_that_shares_prompts_equals_plain_rows(model_type, fused):
    policy = build_policy(model_of_type(model_type), byte_tokenizer())
    assert policy.computes_prompts_once
    assert_same(*both(policy, rows()))


def test_rows_without_padding_equal_padded_rows(architecture, fused):
    policy = tiny_policy(architecture)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 259, (4, 20), generator=generator)
    lengths = torch.tensor([20, 3, 11, 7])[:, None]
    for mask in (torch.arange(20) < lengths, torch.arange(19, -1, -1) < lengths):
        targets = mask & (mask.cumsum(1) > 2)
        grads, said = [], []
        for policy.share_prompts in (True, False):
            policy.zero_grad()
            hidden = policy.target_hidden_states(ids, mask, targets)
            (hidden**2).sum().backward()
            said.append(hidden)
            learned = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
            grads.append(torch.cat(learned))
        torch.testing.assert_close(*said, atol=1e-5, rtol=1e-5)
        assert (grads[0] - grads[1]).norm() < 1e-5 * grads[1].norm()
