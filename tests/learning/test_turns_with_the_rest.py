"""Episodes with what else a run may have: adapters, precisions, layouts, model types, templates."""

from dataclasses import replace

import pytest
import torch
from lightning import Trainer

from litgrpo.algorithms.objective import Objective
from litgrpo.checks.invariants import gradient
from litgrpo.data.modules import PromptData
from litgrpo.distributed.device import backend
from litgrpo.environments import Tools
from litgrpo.environments.examples import calculate
from litgrpo.learning.micro_batches import BatchLimits
from litgrpo.learning.static_batches import StaticBatches
from litgrpo.models.adapters import LoRA
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.generic import GenericPolicy
from litgrpo.models.loading.load import build_policy, load_policy
from litgrpo.rollout.episodes import EpisodeSettings
from tests.learning.parts import learner_of, rewards_of, rollouter_of
from tests.support.chat_templates import GEMMA, QWEN, merging_tokenizer
from tests.support.limits import random_model
from tests.support.models import byte_tokenizer, prompt_batch, tiny_model, tiny_policy
from tests.support.playing import Echo, episodes_of
from tests.support.training import loader, module

INLINE = EpisodeSettings(
    turn_format="inline", num_workers=0, max_turns=3, max_turn_tokens=4, close_truncated_turns=True
)
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "3*4"}}</tool_call>'


def resolve_auto(grpo, *data, **settings):
    """Two iterations, after all invariants were measured."""
    trainer = Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **settings,
    )  # fmt: skip
    before = [p.detach().clone() for p in grpo.policy.parameters() if p.requires_grad]
    trainer.fit(grpo, *data)
    after = [p for p in grpo.policy.parameters() if p.requires_grad]
    assert trainer.callback_metrics["env/turns"] > 1
    assert trainer.callback_metrics["completion/observation_frac"] > 0
    assert trainer.callback_metrics["env/failed_frac"] == 0
    return [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]


def with_adapters(folder):
    pytest.importorskip("peft")
    tiny_model("qwen2").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return load_policy(str(folder), lora=LoRA(rank=4))


POLICIES = {
    "lora": with_adapters,
    "bf16": lambda _: tiny_policy("llama").to(torch.bfloat16),
    "library": lambda _: build_policy(random_model("bloom"), byte_tokenizer()).eval(),
    "t5": lambda _: tiny_policy("t5"),
    "dynamic_sampling": lambda _: tiny_policy("gpt2"),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_a_fit_with_turns_holds_its_invariants_and_learns(kind, tmp_path):
    resamples, data = kind == "dynamic_sampling", [loader(prompt_batch("a", "hello there"))]
    if resamples:
        rows = [{"prompt": "a"}, {"prompt": "hello there"}]
        data = [None, None, PromptData(rows, batch_size=2)]
    grpo = module(
        environment=Echo((2, 40)),
        episode=INLINE,
        max_completion_length=70,
        max_iterations=2,
        dynamic_sampling_attempts=2 * resamples,
    )
    grpo.policy = POLICIES[kind](tmp_path)
    assert isinstance(grpo.policy, GenericPolicy) == (kind == "library")
    assert any(resolve_auto(grpo, *data))
    if kind == "lora":
        assert all(p.requires_grad == ("lora" in n) for n, p in grpo.policy.named_parameters())


def test_packed_prefixes_plain_rows_and_static_batches_give_the_same_gradient_of_episodes():
    gradients = []
    for share, batching in (
        (True, None),
        (False, None),
        (False, StaticBatches(backend(torch.device("cpu")))),
    ):
        policy = tiny_policy("llama")
        assert isinstance(policy, CausalPolicy)
        policy.share_prompts = share
        rollouter = rollouter_of(policy, episodes=episodes_of(Echo()), max_completion_length=40)
        rollout = rollouter.generate(prompt_batch("a", "hello there", "what is it?"), "train")
        learner = replace(learner_of(policy, Objective(gamma=0.9)), max_completion_length=40)
        learner = learner if batching is None else replace(learner, micro_batching=batching)
        known = learner.old_and_reference_logprobs(rollout)
        training_batch = learner.build_batch(rollout, rewards_of(rollout), known)
        gradients.append(gradient(learner, training_batch, BatchLimits(max_rows=4, shared=share)))
    packed, *others = gradients
    size = sum(float(each.square().sum()) for each in packed) ** 0.5
    assert size > 0
    for found in others:
        off = sum(float((a - b).square().sum()) for a, b in zip(found, packed, strict=True)) ** 0.5
        assert off < 1e-5 * size


class CallsAlways(Tools):
    """Parse the text of a random policy as a tool call."""

    def step(self, action):
        return super().step(CALL)


@pytest.mark.parametrize(
    ("template", "end", "role", "observation"),
    [
        (QWEN, "<|im_end|>", "tool", "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im"),
        (GEMMA, "<end_of_turn>", "user", "<start_of_turn>user\n12<end_of_turn>"),
    ],
)
def test_a_fit_with_a_chat_template_inserts_tool_output_between_turns(
    template, end, role, observation
):
    tokenizer = merging_tokenizer(template)
    tokenizer.eos_token = end
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    episode = EpisodeSettings(
        tool_role=role, num_workers=0, max_turns=3, max_turn_tokens=4, close_truncated_turns=True
    )
    grpo = module(
        environment=CallsAlways(
            functions=[calculate], call_format="hermes", list_tools_in_prompt=role == "user"
        ),
        episode=episode,
        max_completion_length=300,
        max_iterations=2,
    )
    grpo.policy = build_policy(model, tokenizer).eval()
    data = PromptData([{"prompt": "3 times 4"}], chat=True, batch_size=1)
    rollouts = []
    grpo.on_train_batch_end = lambda outputs, *_: rollouts.append(outputs["iteration"].rollout)
    assert any(resolve_auto(grpo, None, None, data))
    text = tokenizer.decode(rollouts[0].completion_ids[0][rollouts[0].completion_mask[0]])
    assert observation in text
