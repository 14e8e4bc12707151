"""Completions end where the chat template ends a turn, also for models with another end."""

import pytest
import torch
from lightning import Callback, Trainer
from transformers import AutoModelForCausalLM, GenerationConfig

from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.data.rendering import Chat, build_prompt_format
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import load_policy
from litgrpo.rollout.sampling import Sampling
from tests.support import chat_templates
from tests.support.fitting import QUIET
from tests.support.models import tiny_model
from tests.support.tokenizers import CHATML, PLAIN, tokenizer_of

ASKED = {"role": "user", "content": "yes or no"}


class KeepRollouts(Callback):
    """Keeps what is sampled."""

    def __init__(self):
        self.rollouts = []

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.rollouts.append(outputs["iteration"].rollout)


def count_letters(completions):
    return [float(len(text)) for text in completions]


def model_and_tokenizer(template=CHATML):
    tokenizer = tokenizer_of("byte level", template)
    return tiny_model("llama", vocab_size=len(tokenizer)), tokenizer


def fit(folder, module, data, *callbacks):
    Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        max_epochs=-1,
        **QUIET,
    ).fit(module, data)
    return module


def grpo(pretrained, folder, chat=True, **settings):
    kept = KeepRollouts()
    module = GRPO(
        pretrained,
        rewards=count_letters,
        group_size=8,
        max_completion_length=100,
        max_iterations=1,
        check_invariants=False,
        **settings,
    )
    data = PromptData([{"prompt": [ASKED] if chat else "yes"}] * 4, chat=chat, batch_size=4)
    return fit(folder, module, data, kept), kept.rollouts[0]


def test_a_completion_ends_with_the_token_that_ends_a_turn(tmp_path, caplog):
    model, tokenizer = model_and_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    module, rollout = grpo((model, tokenizer), tmp_path)
    assert module.policy.eos_ids == (tokenizer.eos_token_id, end)
    assert end in [ids[-1] for ids in rollout.token_lists()]
    assert all(end not in ids[:-1] for ids in rollout.token_lists())
    assert not any("<|im_end|>" in text for text in rollout.completions)
    assert "the chat template ends turns with '<|im_end|>'" in caplog.text


def test_plain_prompts_and_a_stop_token_of_the_recipe_change_no_end_token(tmp_path):
    model, tokenizer = model_and_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    module, _ = grpo((model, tokenizer), tmp_path, chat=False)
    assert module.policy.eos_ids == (tokenizer.eos_token_id,)
    module, _ = grpo((model, tokenizer), tmp_path, sampling=Sampling(stop_token_ids=[end]))
    assert module.policy.eos_ids == (tokenizer.eos_token_id,)


def test_the_model_of_supervised_training_ends_with_the_turn_that_it_learned(tmp_path):
    model, tokenizer = model_and_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    talk = {"messages": [ASKED, {"role": "assistant", "content": "yes"}]}
    module = SFT((model, tokenizer), max_iterations=1)
    fit(tmp_path, module, PairData([talk] * 4, chat=True, batch_size=4))
    export(module.policy, tmp_path / "final")
    config = GenerationConfig.from_pretrained(tmp_path / "final")
    assert sorted(config.eos_token_id) == [tokenizer.eos_token_id, end]
    assert load_policy(str(tmp_path / "final")).eos_ids == (tokenizer.eos_token_id, end)
    # transformers' `generate` ends there as well.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.manual_seed(0)
    asked = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_tensors="pt")
    ids = asked if torch.is_tensor(asked) else asked["input_ids"]
    rows = loaded.generate(ids.repeat(32, 1), do_sample=True, max_new_tokens=100, pad_token_id=0)
    found = rows[:, ids.shape[1] :]
    ended = (found == end).any(1)
    assert ended.any()
    for row in found[ended]:
        place = int((row == end).nonzero()[0])
        assert row[place + 1 :].sum() == 0


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (chat_templates.QWEN, "<|im_end|>"),
        (chat_templates.FORGETS, "<|im_end|>"),
        (chat_templates.LLAMA, "<|eot_id|>"),
        (chat_templates.GEMMA, "<end_of_turn>"),
        (chat_templates.NEXT_ROLE, None),
        (PLAIN, None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_stop_token_of_templates(template, token):
    tokenizer = chat_templates.merging_tokenizer(template)
    expected = None if token is None else tokenizer.convert_tokens_to_ids(token)
    assert build_prompt_format(None, Chat()).find_end_token(tokenizer) == expected
    assert build_prompt_format(None, False).find_end_token(tokenizer) is None
