"""CUDA graphs, and rollouts on a GPU; also on the simulated device."""

import pytest
import torch

from litgrpo.distributed.device import backend
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from tests.cuda_device.run import on_cuda
from tests.support.engines import GROUP, TEXTS, spread_lengths, uniforms_for
from tests.support.models import prompt_batch, tiny_policy
from tests.support.static import ENGINE

GPU = torch.device("cuda")
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def assert_same_on_the_gpu(policy, engine, length, sampling):
    """Compare a rollout on the CPU and two on the GPU."""
    prompts = prompt_batch(*TEXTS)
    numbers = uniforms_for(prompts, length=length)
    expected = LocalEngine().generate(RolloutRequest(policy, prompts, GROUP, numbers, sampling))
    policy.to(GPU)
    for _ in range(2):
        request = RolloutRequest(policy, prompts.to(GPU), GROUP, numbers, sampling)
        found = engine.generate(request)
        assert torch.equal(found.completion_ids.cpu(), expected.completion_ids)
        assert torch.equal(found.truncated.cpu(), expected.truncated)
        assert torch.allclose(
            found.sampler_logprobs.cpu(), expected.sampler_logprobs, rtol=0, atol=1e-4
        )


@ON_A_GPU
@pytest.mark.parametrize("engine", [ENGINE, LocalEngine()])
def test_a_gpu_samples_what_the_cpu_samples(architecture, engine):
    policy = spread_lengths(tiny_policy(architecture))
    assert_same_on_the_gpu(policy, engine, 12, Sampling())


@ON_A_GPU
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5, top_p=0.9)])
def test_rollouts_of_several_recordings_sample_what_the_cpu_samples(architecture, sampling):
    policy = tiny_policy(architecture)
    policy.eos_ids = tuple(range(2, 8))
    assert_same_on_the_gpu(policy, LocalEngine(), 90, sampling)


@ON_A_GPU
def test_a_recording_repeats_a_run_on_the_same_tensors():
    counter, device = torch.zeros(3, device="cuda"), backend(torch.device("cuda", 0))
    replay = device.record(lambda: counter.add_(1))
    assert counter.tolist() == [0.0] * 3
    for _ in range(2):
        replay()
    assert counter.tolist() == [2.0] * 3


@ON_A_GPU
def test_an_error_while_recording_is_raised_and_the_next_recording_works():
    counter, device = torch.zeros(3, device="cuda"), backend(torch.device("cuda", 0))

    def fail():
        counter.add_(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        device.record(fail)
    replay = device.record(lambda: counter.add_(1))
    replay()
    assert counter.tolist() == [1.0] * 3


@on_cuda()
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_token_takes_few_launches_and_sixteen_tokens_one_wait(kind, checkpointing):
    from litgrpo.models.loading.load import Precision, build_policy
    from tests.cuda_device.device import count_work
    from tests.support.models import byte_tokenizer, tiny_model

    precision = Precision(gradient_checkpointing=checkpointing)
    policy = build_policy(tiny_model(kind), byte_tokenizer(), precision=precision).to(GPU)
    policy.eval()  # in training, checkpointed layers keep no keys
    prompts = prompt_batch(*TEXTS).to(GPU)
    policy.eos_ids = (300,)

    def count(length):
        numbers = uniforms_for(prompts, length=length)
        request = RolloutRequest(policy, prompts, GROUP, numbers, Sampling())
        with count_work() as work:
            LocalEngine().generate(request)
        return sum(work.launches.values()), sum(work.waits.values())

    count(2)  # the fused decoder is compared with the model at the first call
    (launches, waits), (more_launches, more_waits) = count(65), count(65 + 128)
    assert more_waits - waits == 128 // 16
    assert (more_launches - launches) / 128 < 8
