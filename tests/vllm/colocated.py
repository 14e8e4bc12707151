"""`ColocatedEngine` in an environment that has vLLM: `python -m tests.vllm.colocated`.

Prints what was found; pytest of the trainer's environment reads it.
"""

import inspect
import json

import torch
from torch.nn.utils.rnn import pad_sequence

from litgrpo.models.loading.load import load_policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from litgrpo.rollout.servers.vllm import ColocatedEngine
from litgrpo.types import PromptBatch

TEXTS, GROUP, LENGTH, TEMPERATURE = ("12+5=", "What is 7+88?"), 4, 24, 0.7


def main():
    policy = load_policy("builtin:tiny-gemma2").eval()
    # litgrpo.data needs Lightning, which an environment for vLLM may lack.
    rows = [torch.tensor(policy.tokenizer(text).input_ids) for text in TEXTS]
    ids, mask = (
        pad_sequence(each, batch_first=True, padding_value=fill, padding_side="left")
        for each, fill in ((rows, policy.pad_id), ([torch.ones_like(row) for row in rows], 0))
    )
    batch = PromptBatch(ids, mask.bool(), list(TEXTS), {}, torch.arange(len(TEXTS)))
    numbers = draw_uniforms(0, "train", 0, batch.index, GROUP, LENGTH)
    requests = RolloutRequest(policy, batch, GROUP, numbers, Sampling(temperature=TEMPERATURE))

    def gap(rollout):
        with torch.no_grad():
            found = policy.logprobs(rollout.tokens, temperature=TEMPERATURE).logprobs
        off = (found - rollout.sampler_logprobs).abs().masked_fill(~rollout.loss_mask, 0)
        return float(off.max())

    engine_args = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16}
    engine = ColocatedEngine(max_model_len=128, enable_sleep_mode=False, engine_args=engine_args)
    engine.sync_weights(policy, 0)
    one, two = (engine.generate(requests) for _ in range(2))
    found = {"first": gap(one), "repeated": one.token_lists() == two.token_lists()}
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    found["before"] = gap(engine.generate(requests))
    engine.sync_weights(policy, 1)
    found["after"] = gap(engine.generate(requests))
    found["from_memory"] = engine._started[0].loads_from_memory
    # Sleeping needs a GPU: only the calls are checked. `bind` raises for unknown arguments.
    inspect.signature(engine.llm.sleep).bind(level=2)
    inspect.signature(engine.llm.wake_up).bind()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
