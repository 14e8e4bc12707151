"""A small training of one or several processes; a real server samples for several."""

import torch

from litgrpo.data.modules import PromptData
from litgrpo.models.loading.load import ASSETS
from litgrpo.models.loading.sharded_weights import gather_weights
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.servers.vllm import ServerEngine
from tests.distributed.fsdp import training

KIND, LENGTH = "tiny-gemma2", 40
TEXTS = ["12+5=", "3+4=", "What is 7+88?", "6+6="]


def digits(prompts, completions):
    return [sum(letter.isdigit() for letter in text) / LENGTH for text in completions]


def learn(processes, url, folder):
    """Two iterations; the first process leaves whole weights."""
    engine = LocalEngine() if processes == 1 else ServerEngine([url], send_uniforms=True)
    sizes = {"max_completion_length": LENGTH, "check_invariants": True}
    module = training.grpo(ASSETS, KIND, reward=digits, engine=engine, **sizes)
    torch.manual_seed(0)
    runner = training.trainer(processes)
    runner.fit(module, PromptData(TEXTS, batch_size=4))
    weights = {name: each.detach().clone() for name, each in gather_weights(module.policy.model)}
    if runner.is_global_zero:
        torch.save(weights, folder / f"{processes}.pt")
