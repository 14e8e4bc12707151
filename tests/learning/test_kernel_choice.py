from types import SimpleNamespace

import pytest
import torch

from litgrpo.distributed.device import Backend
from litgrpo.learning import kernel_choice
from litgrpo.learning.update_config import MOST_LOGITS, MOST_TOKENS, UpdateConfig
from litgrpo.models import causal
from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels.linear import LinearKernels
from litgrpo.models.reference import FrozenReference
from litgrpo.models.transformers_compat import checkpoint_activations
from litgrpo.modules.grpo import GRPO
from litgrpo.rewards.reward import Reward
from litgrpo.tensors import FEW_LOGITS
from tests.support.invariants import fit, module
from tests.support.models import tiny_policy

ONEDNN = LinearKernels(decode="onednn", learn="onednn")
needs_onednn = pytest.mark.skipif(not linears.onednn_works(), reason="torch without oneDNN")


def kernels_of(policy):
    return {layer.kernel for layer in linears.list_linear_layers(policy.model)}


def choosing(kernels):
    grpo = module(max_iterations=1, check_invariants=False)
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


@needs_onednn
@pytest.mark.parametrize(("device", "packs"), [("cpu", True), ("cuda", False)])
def test_weights_are_packed_on_a_cpu_only(device, packs, monkeypatch):
    policy = tiny_policy("qwen2")
    policy.set_linear_kernels(ONEDNN)
    packed = []
    monkeypatch.setattr(causal, "FusedDecoder", lambda *_, dtype, pack: packed.append(pack))
    monkeypatch.setattr(type(policy.model), "device", torch.device(device))
    policy._build_fused_decoder()
    assert packed == [packs]


@needs_onednn
def test_kernels_of_a_cpu_are_dropped_on_another_device(monkeypatch):
    grpo = choosing(ONEDNN)
    checkpoint = {kernel_choice.KEY: {"decode": "onednn", "learn": "onednn", "threads": 99}}
    device = SimpleNamespace(root_device=torch.device("cuda", 0), broadcast=lambda value: value)
    monkeypatch.setattr(grpo, "_trainer", SimpleNamespace(strategy=device))
    kernel_choice.restore(grpo, checkpoint)  # the number of threads does not matter either
    kernel_choice.use_everywhere(grpo, grpo.policy)
    assert grpo.policy.linear_kernels == LinearKernels()


def test_a_checkpoint_of_a_time_before_kernels_computes_plainly():
    grpo = choosing(LinearKernels())
    kernel_choice.restore(grpo, {})
    assert grpo.policy.linear_kernels == LinearKernels()


def sizes_of(grpo):
    return grpo.learner.update_config.max_tokens, grpo.policy.few_logits


def give_memory(monkeypatch, free_bytes):
    monkeypatch.setattr(Backend, "available_memory", lambda self: free_bytes)


def test_sizes_follow_free_memory_and_a_resumed_run_keeps_them(tmp_path, monkeypatch):
    on_cpu = fit(choosing(LinearKernels()))
    give_memory(monkeypatch, 10**11)
    first = choosing(LinearKernels())
    first.reference = FrozenReference(tiny_policy("qwen2"))
    fit(first).save_checkpoint(tmp_path / "last.ckpt")
    assert sizes_of(first) == (MOST_TOKENS, MOST_LOGITS)
    assert first.reference.policy.few_logits == MOST_LOGITS
    give_memory(monkeypatch, 10**7)
    fresh = fit(choosing(LinearKernels()))
    small = sizes_of(fresh.lightning_module)
    assert small[0] < MOST_TOKENS
    assert small[1] == FEW_LOGITS

    resumed = choosing(LinearKernels())
    resumed.max_iterations = 2
    fit(resumed, ckpt_path=tmp_path / "last.ckpt")
    assert sizes_of(resumed) == (MOST_TOKENS, MOST_LOGITS)
    given = choosing(LinearKernels())
    given.update, given.max_iterations = UpdateConfig(micro_batch_tokens=33), 2
    fit(given, ckpt_path=tmp_path / "last.ckpt")
    assert sizes_of(given) == (33, MOST_LOGITS)

    monkeypatch.undo()
    moved = choosing(LinearKernels())
    moved.max_iterations = 2
    fit(moved, ckpt_path=tmp_path / "last.ckpt")
    assert sizes_of(moved) == sizes_of(on_cpu.lightning_module)
    assert moved.policy.few_logits == FEW_LOGITS


def test_ranks_take_the_sizes_of_the_one_with_the_least_memory(monkeypatch):
    policy = tiny_policy("qwen2")
    give_memory(monkeypatch, 10**11)
    monkeypatch.setattr(kernel_choice, "all_gather_object", lambda own: [own, 2**28])
    both = kernel_choice.choose_sizes(policy, torch.device("cpu"))
    monkeypatch.undo()
    give_memory(monkeypatch, 2**28 + 16 * sum(p.numel() for p in policy.parameters()))
    alone = kernel_choice.choose_sizes(policy, torch.device("cpu"))
    assert both == alone


def test_gradients_and_optimizer_states_are_left_free(monkeypatch):
    policy = tiny_policy("qwen2")
    size = sum(p.numel() for p in policy.parameters()) * 4
    device = torch.device("cpu")
    wanted = []
    of = kernel_choice.DeviceSizes.of
    monkeypatch.setattr(
        kernel_choice.DeviceSizes, "of", lambda free, kept: wanted.append(free) or of(free, kept)
    )
    give_memory(monkeypatch, 2**30)
    kernel_choice.choose_sizes(policy, device)
    kernel_choice.choose_sizes(policy.requires_grad_(False), device)
    assert wanted == [2**30 - 3 * size, 2**30]


def test_checkpointed_layers_leave_memory_for_more_tokens(monkeypatch):
    give_memory(monkeypatch, 2**28)
    sizes = []
    for checkpointed in (False, True):
        policy = tiny_policy("qwen2", num_hidden_layers=8)
        if checkpointed:
            checkpoint_activations(policy.model)
        sizes.append(kernel_choice.choose_sizes(policy, torch.device("cpu")).tokens)
    assert sizes[1] >= 2 * sizes[0]
