import torch

from litgrpo.rollout.engines.base import Requests
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling, draw_uniforms
from tests.benchmarks.rollout_processes import HalvesEngine
from tests.benchmarks.workload import Size, Work


def test_two_threads_of_python_say_what_one_says():
    size = Size(16, 1, 2, 1, 32, 64, prompts=3, prompt_len=4)
    work = Work(size, group=2, max_new=6, hazard=0.2)
    policy = work.policy().eval()
    (prompts,) = work.batches(1)
    numbers = draw_uniforms(0, "train", 0, prompts.index, work.group, work.max_new)
    requests = Requests(policy, prompts, work.group, numbers, Sampling())
    whole, halves = LocalEngine().generate(requests), HalvesEngine().generate(requests)
    assert torch.equal(whole.completion_ids, halves.completion_ids)
    assert torch.equal(whole.completion_mask, halves.completion_mask)
    torch.testing.assert_close(whole.sampler_logprobs, halves.sampler_logprobs)
