import pytest
import torch

from litgrpo.algorithms.objective import Objective
from litgrpo.callbacks.adaptive import ReferenceSync
from litgrpo.models.architectures import DECODER_ONLY
from litgrpo.models.loading.export import export
from litgrpo.models.reference import FrozenReference, round_linears
from tests.support.models import tiny_model, tiny_policy
from tests.support.packing import model_of_type, rows
from tests.support.training import batches, module, train

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_of_a_rounded_reference_are_equal_bit_for_bit(architecture, dtype):
    plain, rounded = (FrozenReference(tiny_policy(architecture)) for _ in range(2))
    rounded.round_weights(dtype)
    with torch.autocast("cpu", dtype):
        expected = plain.logprobs(rows())
        assert torch.equal(rounded.logprobs(rows()).logprobs, expected.logprobs)
    # Without the trainer's autocast as well.
    assert torch.equal(rounded.logprobs(rows()).logprobs, expected.logprobs)
    hidden = rounded.hidden_states(rows())
    with torch.autocast("cpu", dtype):
        assert torch.equal(rounded.head(hidden), plain.head(hidden))
    assert not torch.equal(plain.logprobs(rows()).logprobs, expected.logprobs)


@pytest.mark.parametrize("model_type", DECODER_ONLY)
def test_every_listed_model_type_computes_the_same_when_rounded(model_type):
    model, ids = model_of_type(model_type).eval(), torch.arange(3, 43).view(2, 20)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=ids).logits
        assert round_linears(model, torch.bfloat16)
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert any(each.dtype == torch.bfloat16 for each in model.parameters())


def test_linear_layers_take_half_the_memory_and_other_weights_stay():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    before = sum(each.nbytes for each in model.parameters())
    linear = sum(layer.nbytes for name, layer in model.named_parameters() if "proj" in name)
    assert round_linears(model, torch.bfloat16)
    assert before - sum(each.nbytes for each in model.parameters()) == linear / 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.float32
    # A model type that is not listed is left as it is.
    model = tiny_model("qwen2")
    model.config.model_type = "other"
    assert not round_linears(model, torch.bfloat16)
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_training_in_mixed_precision_loads_a_rounded_reference(tmp_path, monkeypatch):
    def run(**settings):
        trainer = {"precision": settings.pop("precision", "bf16-mixed")}
        trainer["callbacks"] = settings.pop("callbacks", [])
        settings |= {"max_iterations": 2, "check_invariants": False}
        grpo = module(objective=Objective(kl_coef=0.1), **settings)
        grpo.optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
        grpo.pretrained = str(tmp_path)
        train(grpo, batches("a", "hello"), **trainer)
        head = grpo.reference.policy.model.get_output_embeddings().weight
        return head.dtype, [each.detach().clone() for each in grpo.policy.parameters()]

    export(tiny_policy("qwen2"), tmp_path)
    dtype, rounded = run()
    assert dtype == torch.bfloat16
    assert run(callbacks=[ReferenceSync(every=1)])[0] == torch.float32
    assert run(precision="32-true")[0] == torch.float32
    monkeypatch.setattr(FrozenReference, "round_weights", lambda self, dtype: None)
    dtype, plain = run()
    assert dtype == torch.float32
    assert all(torch.equal(*pair) for pair in zip(plain, rounded, strict=True))


@torch.no_grad()
def test_hidden_states_in_static_shapes_are_those_of_ragged_rows():
    policy, given = tiny_policy("qwen2"), rows()
    expected = policy.hidden_states(given)
    policy.static_shapes = True
    mask = given.completion_mask
    torch.testing.assert_close(policy.hidden_states(given)[mask], expected[mask])
