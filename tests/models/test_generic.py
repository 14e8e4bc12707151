"""Models of any type compute what their plain forward pass computes, or raise at load."""

import pytest
import torch

from litgrpo.models import generic
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.generic import GenericPolicy, build_causal_policy, probe
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import LoRA, build_policy, load_policy
from litgrpo.models.weights import choose_attention, find_model_class
from litgrpo.rollout.engines.static import StaticEngine
from tests.learning.parts import rollouter_of
from tests.models.table import small_config, try_type
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.raises import raises_for

PATHS = {
    "opt": "shared prompts in decoding",
    "gpt_oss": "transformers, with cache",  # attention sinks
    "bloom": "transformers, with cache",  # no positions
    "llama4": "transformers, with cache",  # chunked attention
    "qwen3_next": "transformers, with cache",  # linear attention layers
    "mamba": "transformers, with cache",  # a recurrent state
    "rwkv": "transformers, no cache",
}


def random_policy(model_type, **settings):
    config = small_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        how = {"attn_implementation": choose_attention(config)}
        model = find_model_class(config)._from_config(config, **how)
    return build_policy(model, byte_tokenizer()).eval()


@pytest.mark.parametrize("model_type", PATHS)
def test_a_model_type_trains_and_the_invariants_hold(model_type):
    row = try_type(model_type)
    assert row.verdict == "trains"
    assert row.path == PATHS[model_type]
    assert len(row.findings) == 9
    assert all(finding.holds for finding in row.findings)


def test_listed_types_are_not_probed(monkeypatch):
    monkeypatch.setattr(generic, "probe", lambda policy: pytest.fail("probed"))
    assert type(tiny_policy("llama")) is CausalPolicy


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("model_type", ["bloom", "gpt_neo", "gptj", "mamba", "falcon", "llama"])
def test_several_answers_of_a_row_are_predicted_by_all_that_is_before_them(model_type, batched):
    """Rows of two questions and two answers: each token at its place, as transformers reads it."""
    policy = random_policy(model_type)
    policy.batched = batched
    ids = torch.tensor([[1, 70, 71, 80, 2, 90, 91, 81, 82, 2], [1, 72, 83, 2, 73, 84, 2, 0, 0, 0]])
    targets = torch.zeros_like(ids).bool()
    for row, places in enumerate([(3, 4, 7, 8, 9), (2, 3, 5, 6)]):
        targets[row, list(places)] = True
    with torch.no_grad():
        logits = policy.head(policy.target_hidden_states(ids, ids != 0, targets))
        plain = [policy.model(row[row != 0][None]).logits[0] for row in ids]
    expected = torch.cat([plain[0][[2, 3, 6, 7, 8]], plain[1][[1, 2, 4, 5]]])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_dropping_rows_does_not_change_the_remaining_ones():
    policy = random_policy("bloom")
    batch = prompt_batch("a", "hello there", "b")
    tokens = torch.arange(6) + 5
    with torch.no_grad():
        _, whole = policy.prefill(batch.prompt_ids, batch.prompt_mask, 2, 3)
        _, fewer = policy.prefill(batch.prompt_ids, batch.prompt_mask, 2, 3)
        kept = torch.tensor([5, 0, 3])
        fewer.select(kept)
        expected = policy.decode_step(tokens, whole)[kept]
        torch.testing.assert_close(policy.decode_step(tokens[kept], fewer), expected)
        again = policy.decode_step(tokens, whole)[kept[:1]]
        fewer.select(torch.tensor([0]))
        torch.testing.assert_close(policy.decode_step(tokens[kept[:1]], fewer), again)


def test_an_incorrect_cache_is_not_used(monkeypatch):
    right = generic.EqualLengthRows.feed

    def forgetful(self, tokens):
        if self.policy.cached:
            tokens = tokens * 0
        return right(self, tokens)

    monkeypatch.setattr(generic.EqualLengthRows, "feed", forgetful)
    policy = random_policy("bloom")
    assert isinstance(policy, GenericPolicy)
    assert (policy.cached, policy.batched) == (False, True)


def test_a_model_with_incorrect_batches_is_computed_row_by_row(monkeypatch):
    right = GenericPolicy.plain_logits

    logits = torch.linspace(0, 1, 259)
    monkeypatch.setattr(
        GenericPolicy,
        "plain_logits",
        lambda self, ids, keep=None: right(self, ids, keep) + (len(ids) - 1) * logits,
    )
    policy = random_policy("bloom")
    assert (policy.cached, policy.batched) == (True, False)


def test_a_model_that_attends_to_later_tokens_raises():
    with raises_for("bert", "later tokens"):
        random_policy("bert", is_decoder=False)


def test_a_model_whose_code_fails_raises_with_its_error(monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("no such operator\n here")

    monkeypatch.setattr(CausalPolicy, "hidden", broken)
    monkeypatch.setattr(GenericPolicy, "hidden", broken)
    with raises_for("bloom", "no such operator here"):
        random_policy("bloom")


def test_a_probe_restores_modes_and_leaves_weights_unchanged():
    policy = CausalPolicy(tiny_model("llama").train(), byte_tokenizer(), (2,))
    before = [parameter.clone() for parameter in policy.parameters()]
    assert probe(policy).error < 1e-4
    assert policy.model.training
    assert all(map(torch.equal, before, policy.parameters()))


def test_static_shapes_raise():
    policy = random_policy("bloom")
    with raises_for("bloom", "static shapes", "LocalEngine"):
        rollouter_of(policy, engine=StaticEngine()).generate(prompt_batch("a"), "train")


def test_adapters_train_with_a_generic_policy():
    model = find_model_class(small_config("bloom"))(small_config("bloom"))
    policy = build_policy(model, byte_tokenizer(), lora=LoRA(rank=2))
    assert isinstance(policy, GenericPolicy)
    rollout = rollouter_of(policy).generate(prompt_batch("a", "hello"), "train")
    policy.logprobs(rollout.tokens).logprobs.sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


def test_rwkv_exports_the_weights_that_it_was_given(tmp_path):
    config = small_config("rwkv")
    config.num_hidden_layers, config.rescale_every = 3, 2
    find_model_class(config)(config).save_pretrained(tmp_path / "start")
    byte_tokenizer().save_pretrained(tmp_path / "start")
    policy = load_policy(str(tmp_path / "start")).eval()
    rollouter_of(policy).generate(prompt_batch("a"), "train")
    export(policy, tmp_path / "end")
    again = load_policy(str(tmp_path / "end"))
    assert again.original_dropout["rescale_every"] == 2
    start = load_policy(str(tmp_path / "start"))
    assert all(map(torch.equal, start.parameters(), again.parameters()))


def test_the_choice_is_logged(caplog):
    caplog.set_level("INFO", logger="litgrpo")
    random_policy("bloom")
    assert "'bloom' runs transformers' own forward pass with its KV cache" in caplog.text


def test_build_causal_policy_passes_all_arguments():
    policy = build_causal_policy(tiny_model("gpt2"), byte_tokenizer(), (2,), {"resid_pdrop": 0.1})
    assert policy.original_dropout == {"resid_pdrop": 0.1}
