import pytest
import torch

from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels.linear import LinearKernels
from litgrpo.models.reference import FrozenReference
from litgrpo.rewards.reward import Reward
from litgrpo.training import kernel_choice
from litgrpo.training.grpo import GRPO
from tests.support.invariants import fit, module
from tests.support.models import tiny_policy

ONEDNN = LinearKernels(decode="onednn", learn="onednn")
needs_onednn = pytest.mark.skipif(not linears.onednn_works(), reason="torch without oneDNN")


def kernels_of(policy):
    return {layer.kernel for layer in linears.list_linear_layers(policy.model)}


def choosing(kernels):
    grpo = module(max_iterations=1)
    grpo.policy.set_linear_kernels(kernels)
    return grpo


@needs_onednn
def test_a_resumed_run_computes_as_it_did_whatever_this_start_measured(tmp_path):
    fit(choosing(ONEDNN)).save_checkpoint(tmp_path / "last.ckpt")
    resumed = choosing(LinearKernels())
    resumed.max_iterations = 2
    fit(resumed, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.policy.linear_kernels == ONEDNN
    assert kernels_of(resumed.policy) == {"onednn"}


@needs_onednn
def test_the_reference_computes_as_the_policy():
    grpo = choosing(ONEDNN)
    grpo.reference = FrozenReference(tiny_policy("qwen2"))
    fit(grpo)
    assert kernels_of(grpo.reference.policy) == {"onednn"}


def test_another_number_of_threads_is_said():
    grpo = GRPO("", {"none": Reward(lambda prompts, completions: [0.0] * len(prompts))})
    grpo.policy = tiny_policy("qwen2")
    checkpoint = {kernel_choice.KEY: kernel_choice.save_kernels(grpo.policy)}
    kernel_choice.restore(grpo, checkpoint)
    checkpoint[kernel_choice.KEY]["threads"] += 1
    with pytest.warns(UserWarning, match=f"OMP_NUM_THREADS={torch.get_num_threads() + 1}"):
        kernel_choice.restore(grpo, checkpoint)


def test_a_checkpoint_of_a_time_before_kernels_computes_plainly():
    grpo = choosing(LinearKernels())
    kernel_choice.restore(grpo, {})
    assert grpo.policy.linear_kernels == LinearKernels()
