"""Models of any kind compute as their own plain forward pass does, or are refused."""

import pytest
import torch

from litgrpo.models import generic as library
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.generic import LibraryPolicy, decoder_only, tried
from litgrpo.models.loading import LoRA, as_policy, export, load_policy
from litgrpo.models.weights import attention_of, model_class
from litgrpo.rollout.engines.static import StaticEngine
from tests.models.table import small_config, try_type
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.training.parts import rollouter_of

PATHS = {
    "opt": "shared prompts in decoding",
    "gpt_oss": "library, its cache",  # attention sinks
    "bloom": "library, its cache",  # no positions
    "llama4": "library, its cache",  # chunked attention
    "qwen3_next": "library, its cache",  # linear attention layers
    "mamba": "library, its cache",  # a recurrent state
    "rwkv": "library, no cache",
}


def random_policy(model_type, **settings):
    config = small_config(model_type)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        how = {"attn_implementation": attention_of(config)}
        model = model_class(config)._from_config(config, **how)
    return as_policy(model, byte_tokenizer()).eval()


@pytest.mark.parametrize("model_type", PATHS)
def test_a_model_type_trains_and_the_invariants_hold(model_type):
    row = try_type(model_type)
    assert row.verdict == "trains"
    assert row.path == PATHS[model_type]
    assert len(row.findings) == 9
    assert all(finding.holds for finding in row.findings)


def test_known_types_are_not_tried(monkeypatch):
    monkeypatch.setattr(library, "tried", lambda policy: pytest.fail("tried"))
    assert type(tiny_policy("llama")) is CausalPolicy


def test_dropping_rows_changes_nothing_for_those_that_go_on():
    policy = random_policy("bloom")
    batch = prompt_batch("a", "hello there", "b")
    tokens = torch.arange(6) + 5
    with torch.no_grad():
        _, whole = policy.prefill(batch.prompt_ids, batch.prompt_mask, 2, 3)
        _, fewer = policy.prefill(batch.prompt_ids, batch.prompt_mask, 2, 3)
        kept = torch.tensor([5, 0, 3])
        fewer.select(kept)
        expected = policy.step(tokens, whole)[kept]
        torch.testing.assert_close(policy.step(tokens[kept], fewer), expected)
        again = policy.step(tokens, whole)[kept[:1]]
        fewer.select(torch.tensor([0]))
        torch.testing.assert_close(policy.step(tokens[kept[:1]], fewer), again)


def test_a_cache_that_is_wrong_is_not_used(monkeypatch):
    right = library.EqualRows.feed

    def forgetful(self, tokens):
        if self.policy.cached:
            tokens = tokens * 0
        return right(self, tokens)

    monkeypatch.setattr(library.EqualRows, "feed", forgetful)
    policy = random_policy("bloom")
    assert isinstance(policy, LibraryPolicy)
    assert (policy.cached, policy.batched) == (False, True)


def test_a_model_whose_batches_are_wrong_reads_row_by_row(monkeypatch):
    right = LibraryPolicy.plain_logits

    logits = torch.linspace(0, 1, 259)
    monkeypatch.setattr(
        LibraryPolicy,
        "plain_logits",
        lambda self, ids, keep=None: right(self, ids, keep) + (len(ids) - 1) * logits,
    )
    policy = random_policy("bloom")
    assert (policy.cached, policy.batched) == (True, False)


def test_a_model_that_sees_later_tokens_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="does not predict a token from those before it alone"):
        random_policy("bert", is_decoder=False)


def test_a_model_that_fails_is_refused_with_its_own_reason(monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("no such operator\n here")

    monkeypatch.setattr(CausalPolicy, "hidden", broken)
    monkeypatch.setattr(LibraryPolicy, "hidden", broken)
    with pytest.raises(ValueError, match="'bloom' cannot be trained here: no such operator here"):
        random_policy("bloom")


def test_trying_leaves_modes_and_weights_as_they_are():
    policy = CausalPolicy(tiny_model("llama").train(), byte_tokenizer(), (2,))
    before = [parameter.clone() for parameter in policy.parameters()]
    assert tried(policy).error < 1e-4
    assert policy.model.training
    assert all(map(torch.equal, before, policy.parameters()))


def test_static_shapes_are_refused():
    policy = random_policy("bloom")
    with pytest.raises(ValueError, match="'bloom' is computed by the library's own"):
        rollouter_of(policy, engine=StaticEngine()).generate(prompt_batch("a"), "train")


def test_adapters_train_on_the_librarys_path():
    model = model_class(small_config("bloom"))(small_config("bloom"))
    policy = as_policy(model, byte_tokenizer(), lora=LoRA(rank=2))
    assert isinstance(policy, LibraryPolicy)
    rollout = rollouter_of(policy).generate(prompt_batch("a", "hello"), "train")
    policy.logprobs(rollout.tokens).logprobs.sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


def test_rwkv_exports_the_weights_that_it_was_given(tmp_path):
    config = small_config("rwkv")
    config.num_hidden_layers, config.rescale_every = 3, 2
    model_class(config)(config).save_pretrained(tmp_path / "start")
    byte_tokenizer().save_pretrained(tmp_path / "start")
    policy = load_policy(str(tmp_path / "start")).eval()
    rollouter_of(policy).generate(prompt_batch("a"), "train")
    export(policy, tmp_path / "end")
    again = load_policy(str(tmp_path / "end"))
    assert again.original_dropout["rescale_every"] == 2
    start = load_policy(str(tmp_path / "start"))
    assert all(map(torch.equal, start.parameters(), again.parameters()))


def test_the_choice_is_said_in_a_line(caplog):
    caplog.set_level("INFO", logger="litgrpo")
    random_policy("bloom")
    assert "'bloom' is computed by transformers' own code, with its cache: exact" in caplog.text


def test_decoder_only_takes_what_a_policy_takes():
    policy = decoder_only(tiny_model("gpt2"), byte_tokenizer(), (2,), {"resid_pdrop": 0.1})
    assert policy.original_dropout == {"resid_pdrop": 0.1}
