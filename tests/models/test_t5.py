"""Tests of encoder-decoder models; tests of all policies are in the other files."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import LoRA, build_policy, load_policy
from litgrpo.models.loading.scratch import Scratch
from litgrpo.models.reference import BaseModelReference
from litgrpo.models.t5 import Seq2SeqPolicy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.types import pad_left
from tests.support.causal import dense_logprobs, tokens
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.raises import raises_for
from tests.support.reference_engine import ReferenceEngine
from tests.support.t5 import SIZES, VARIANTS, variant

TEXTS = ("a", "what is 3+4?", "hello")


def said(policy, engine, group_size=3, length=10):
    """A rollout in which completions end at different lengths."""
    policy.eos_ids = tuple(range(2, 30))
    prompts = prompt_batch(*TEXTS)
    uniforms = draw_uniforms(5, "train", 0, prompts.index, group_size, length)
    return engine.generate(RolloutRequest(policy, prompts, group_size, uniforms, Sampling()))


@pytest.mark.parametrize("name", VARIANTS)
def test_both_engines_generate_equal_tokens_for_every_t5_variant(name):
    fast, plain = (said(variant(name), engine) for engine in (LocalEngine(), ReferenceEngine()))
    assert torch.equal(fast.completion_ids, plain.completion_ids)
    torch.testing.assert_close(fast.sampler_logprobs, plain.sampler_logprobs, atol=1e-5, rtol=1e-5)
    assert len(set(fast.lengths.tolist())) > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_logprobs_of_the_whole_family_equal_the_librarys_forward(name):
    policy = variant(name)
    got = policy.logprobs(tokens(policy), temperature=0.7).logprobs
    expected = dense_logprobs(policy, tokens(policy), temperature=0.7)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_exported_member_of_the_family_reloads_as_itself(name, tmp_path):
    policy = variant(name)
    export(policy, tmp_path)
    again = load_policy(str(tmp_path))
    assert isinstance(again, Seq2SeqPolicy)
    expected = policy.logprobs(tokens(policy)).logprobs
    torch.testing.assert_close(again.logprobs(tokens(policy)).logprobs, expected)
    tied = name == "more decoder layers"
    config = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert config["decoder_start_token_id"] == 0
    assert (tmp_path / "config.json").read_text().count('"tie_word_embeddings": true') == tied


def test_the_encoder_reads_each_prompt_once_for_all_completions_of_it():
    policy, rows = tiny_policy("t5"), []
    policy.encoder.register_forward_hook(lambda _, args, out: rows.append(len(out[0])))
    said(policy, LocalEngine())
    assert rows == [len(TEXTS)]
    policy.logprobs(tokens(policy))
    assert rows == [len(TEXTS)] * 2


def test_prompts_are_computed_once_unless_shapes_are_static():
    policy = tiny_policy("t5")
    assert policy.computes_prompts_once
    policy.static_shapes = True
    assert not policy.computes_prompts_once


@torch.no_grad()
def test_cross_attention_keys_are_held_once_per_prompt_and_leave_with_its_last_row():
    policy, prompts = tiny_policy("t5"), prompt_batch(*TEXTS)
    _, state = policy.prefill(prompts.prompt_ids, prompts.prompt_mask, 4, capacity=5)
    length = prompts.prompt_ids.shape[1]
    assert {keys.shape[0] for keys in state.prompt_keys} == {3}
    assert {keys.shape[:3] for keys in state.keys} == {(12, 4, 6)}  # rows, heads, C + start
    state.select(torch.tensor([8, 1, 11, 9]))
    for keys, values in zip(state.prompt_keys, state.prompt_values, strict=True):
        assert keys.shape[:3] == values.shape[:3] == (2, 4, length)
    logits = policy.decode_step(torch.tensor([70, 71, 72, 73]), state)
    plain = policy.dense_logits(
        prompts.prompt_ids[[2, 0, 2, 2]],
        prompts.prompt_mask[[2, 0, 2, 2]],
        torch.tensor([[70], [71], [72], [73]]),
    )
    torch.testing.assert_close(logits, plain[:, -1], atol=1e-5, rtol=1e-5)


def test_logprobs_do_not_depend_on_the_order_of_rows_or_on_prompts_without_rows():
    policy = tiny_policy("t5")
    asked = tokens(policy)
    whole = policy.logprobs(asked).logprobs
    rows = torch.tensor([5, 0, 4])  # two of the last prompt, around one of the first
    of_rows = ("prompt_of", "completion_ids", "completion_mask")
    chosen = replace(asked, **{name: getattr(asked, name)[rows] for name in of_rows})
    some = policy.logprobs(chosen).logprobs
    torch.testing.assert_close(some, whole[rows], atol=1e-5, rtol=1e-5)


def test_tokens_at_padding_positions_of_a_prompt_are_ignored():
    policy = tiny_policy("t5")
    asked = tokens(policy)
    whole = policy.logprobs(asked).logprobs
    other = asked.prompt_ids.masked_fill(~asked.prompt_mask, 77)
    filled = policy.logprobs(replace(asked, prompt_ids=other)).logprobs
    torch.testing.assert_close(filled, whole, atol=1e-6, rtol=0)


def test_lora_trains_adapters_only_and_its_base_is_the_reference(tmp_path):
    base = tiny_policy("t5")
    start = base.logprobs(tokens(base)).logprobs.detach()
    policy = build_policy(tiny_model("t5"), byte_tokenizer(), lora=LoRA(rank=4))
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert {part for name in trained for part in ("encoder", "decoder") if part in name} == {
        "encoder",
        "decoder",
    }
    assert all("lora_" in name for name in trained)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the first step moves only one of the two matrices
        policy.logprobs(tokens(policy)).logprobs.sum().backward()
        optimizer.step()
    moved = policy.logprobs(tokens(policy)).logprobs
    assert (moved - start).abs().max() > 1e-3
    reference = BaseModelReference(policy).logprobs(tokens(policy), temperature=1.0).logprobs
    torch.testing.assert_close(reference, start, atol=1e-5, rtol=1e-5)
    export(policy, tmp_path)
    merged = load_policy(str(tmp_path)).logprobs(tokens(policy)).logprobs
    torch.testing.assert_close(merged, moved, atol=1e-3, rtol=1e-4)


def test_predictors_of_pairs_are_those_of_prompts_and_completions():
    policy = tiny_policy("t5")
    rows = [([1, 70, 71], [80, 2]), ([1, 72], [81, 82, 83, 2])]
    ids, right = pad_left([[*reversed(prompt + said)] for prompt, said in rows], 0)
    ids, mask = ids.flip(1), right.flip(1)
    targets = mask & (torch.arange(ids.shape[1]) >= torch.tensor([[3], [2]]))
    logits = policy.head(policy.target_hidden_states(ids, mask, targets))
    for prompt, said in rows:
        part, logits = logits[: len(said)], logits[len(said) :]
        asked = torch.tensor([prompt])
        plain = policy.dense_logits(asked, torch.ones_like(asked).bool(), torch.tensor([said]))
        torch.testing.assert_close(part, plain[0, :-1], atol=1e-5, rtol=1e-5)
    assert not len(logits)


@pytest.mark.parametrize("places", [(2, 3, 5), (2, 3)], ids=["two answers", "more behind it"])
def test_a_row_with_anything_behind_its_answer_raises(places):
    ids = torch.tensor([[1, 70, 80, 2, 71, 81]])
    targets = torch.zeros_like(ids).bool()
    targets[0, list(places)] = True
    with raises_for("encoder-decoder", "train_on_turns"):
        tiny_policy("t5").target_hidden_states(ids, ids != 0, targets)


def test_a_type_with_other_cross_attention_raises():
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, vocab_size=259)
    heads = dict(encoder_attention_heads=1, decoder_attention_heads=1)
    ffn = dict(encoder_ffn_dim=8, decoder_ffn_dim=8)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **sizes, **heads, **ffn))
    with raises_for("bart", "t5"):
        build_policy(model, byte_tokenizer())


def test_a_t5_from_scratch_hides_its_sentinel_and_starts_at_the_pad_token(tmp_path):
    scratch = Scratch(
        {"model_type": "t5", **SIZES},
        vocab_size=300,
        tags=["<yes>"],
        sentinels=["<extra_id_0>"],
        add_bos=False,
    )
    tokenizer = scratch.build_tokenizer(["i like dogs", "i have two dogs"])
    ids = tokenizer("<extra_id_0> i like <yes>dogs").input_ids
    assert ids[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>")
    assert ids.count(tokenizer.convert_tokens_to_ids("<yes>")) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == " i like <yes>dogs"
    policy = build_policy(scratch.build_model(tokenizer, seed=1), tokenizer)
    assert policy.start_id == tokenizer.pad_token_id
    assert policy.eos_ids == (tokenizer.eos_token_id,)
    export(policy, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("<extra_id_0> i like <yes>dogs").input_ids == ids
    assert load_policy(str(tmp_path)).start_id == tokenizer.pad_token_id
