"""The learning step on the simulated CUDA device: how often the host waits for it."""

import pytest
import torch

from tests.cuda_device.run import on_cuda


@on_cuda()
@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_host_waits_once_for_a_step_and_for_padded_micro_batches(share_prompts):
    from litgrpo.algorithms.objective import Objective
    from litgrpo.learning.update_config import UpdateConfig
    from litgrpo.models.reference import FrozenReference
    from tests.cuda_device.device import count_work
    from tests.learning.parts import build_training_batch, learner_of, recording
    from tests.support.models import prompt_batch, tiny_policy

    waits, launches = [], []
    for rows in (8, 8, 2):  # the first call also tries kernels
        policy = tiny_policy("qwen2").cuda()
        policy.share_prompts = share_prompts
        reference = FrozenReference(tiny_policy("qwen2", seed=1).cuda())
        config = UpdateConfig(micro_batch_size=rows, micro_batch_tokens=None)
        learner = learner_of(policy, Objective(kl_coef=0.1), config, reference=reference)
        batch = build_training_batch(learner, prompt_batch(*"abcd").to("cuda"))
        with count_work() as work, torch.autocast("cuda", torch.bfloat16):
            learner.logprobs_under(reference, batch.tokens, 1.0)
            learner.update(batch, recording(policy))
        waits.append(sum(work.waits.values()))
        launches.append(sum(work.launches.values()))
    # 8 micro-batches instead of 2, twice.
    assert launches[2] > 2.5 * launches[1]
    if share_prompts:
        # Masks of all rows, of the reference's and of the step's, and numbers of the finished step.
        assert waits[1] == waits[2] <= 5
    else:  # transformers looks once per pass for several sequences in a row
        assert waits[2] - waits[1] <= 2 * (8 - 2)


@on_cuda()
@pytest.mark.parametrize("given", [{}, {"foreach": True}, {"fused": False}])
def test_adam_updates_all_weights_by_one_kernel_unless_the_config_decides(given):
    from litgrpo.learning.optim import DefaultAdamW
    from litgrpo.modules.run_setup import use_fused_kernel
    from tests.cuda_device.device import count_work

    weights = [torch.nn.Parameter(torch.ones(8, 8, device="cuda")) for _ in range(3)]
    plain = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizers = [torch.optim.AdamW(each, 0.1, **given) for each in (weights, plain)]
    assert type(DefaultAdamW(weights).param_groups[0]["fused"]) is type(None)
    use_fused_kernel(optimizers[0])
    assert bool(optimizers[0].param_groups[0]["fused"]) == (not given)
    for _ in range(3):
        for optimizer, each in zip(optimizers, (weights, plain), strict=True):
            for number, weight in enumerate(each):
                weight.grad = torch.full_like(weight, float(number + 1))
            with count_work() as work:
                optimizer.step()
            if optimizer is optimizers[0] and not given:
                assert work.launches["aten::_fused_adamw_"] == 1
    for one, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())
