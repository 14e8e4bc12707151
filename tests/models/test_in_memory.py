from pathlib import Path

import pytest
import torch

from litgrpo.models.in_memory import as_folder
from litgrpo.training.grpo import GRPO
from litgrpo.training.sft import SFT
from tests.support.models import byte_tokenizer, tiny_model
from tests.support.training import batches, letters, train


def test_names_and_folders_stay_as_they_are():
    assert as_folder("some/model") == "some/model"
    assert as_folder(None) is None


def test_a_model_at_hand_is_trained_as_a_copy_from_its_own_weights():
    model = tiny_model("llama", seed=3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    grpo = GRPO((model, byte_tokenizer()), [letters], group_size=2, max_completion_length=4)
    grpo.configure_model()
    held = grpo.policy.bare_model.state_dict()
    assert all(torch.equal(held[name], weight) for name, weight in before.items())
    grpo.max_iterations = 1
    grpo.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=10.0)
    train(grpo, batches("ab", "cd"))
    assert any(not torch.equal(held[name], weight) for name, weight in before.items())
    given = model.state_dict()
    assert all(torch.equal(given[name], weight) for name, weight in before.items())


def test_the_tokenizer_comes_from_where_the_model_was_loaded():
    from transformers import AutoModelForCausalLM

    folder = str(Path(__file__).parents[2] / "src/litgrpo/assets/tiny-gemma2")
    sft = SFT(AutoModelForCausalLM.from_pretrained(folder))
    assert sft.fit_tokenizer([]).vocab_size == GRPO(folder, [letters]).fit_tokenizer().vocab_size


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.nn.Linear(2, 2), "pretrained is a Linear; it can be"),
        (tiny_model("llama"), r"without a tokenizer: give pretrained=\(model, tokenizer\)"),
        ((tiny_model("llama"), "gpt2"), "the tokenizer of pretrained is a str"),
    ],
)
def test_what_is_no_model_with_a_tokenizer_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        GRPO(given, [letters])


@pytest.mark.parametrize("kind", [GRPO, SFT])
def test_a_compiled_module_is_refused_in_one_sentence(kind):
    arguments = {"rewards": [letters]} if kind is GRPO else {}
    module = kind("builtin:tiny-gemma2", **arguments, max_iterations=1)
    with pytest.raises(ValueError, match=r"was given as torch.compile\(module\).*hand the trainer"):
        train(torch.compile(module, backend="eager"), batches("ab"))
