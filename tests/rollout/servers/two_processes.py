"""One of two processes that use a server; a separate file with few imports."""

import torch
from torch import distributed

from litgrpo.distributed.collectives import is_distributed
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.vllm import ServerEngine
from tests.support.engines import GROUP, TEXTS, spread_lengths, uniforms_for
from tests.support.models import prompt_batch, tiny_policy


def one_of_two(rank, url, file, folder):
    """Publish weights together with another process, and request a separate prompt."""
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    policy = spread_lengths(tiny_policy("qwen2"))
    with torch.no_grad():  # what the first process has is what counts
        policy.model.lm_head.weight.mul_(1 + rank)
    engine = ServerEngine([url], send_uniforms=True, timeout_s=20.0)
    engine.sync_weights(policy, 3)
    prompts = prompt_batch(TEXTS[rank])
    asked = RolloutRequest(policy, prompts, GROUP, uniforms_for(prompts), Sampling())
    found = (
        is_distributed(),
        engine.servers.weights.version,
        engine.servers.weights.folder,
        engine.generate(asked),
    )
    torch.save((*found[:3], found[3].token_lists()), f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
