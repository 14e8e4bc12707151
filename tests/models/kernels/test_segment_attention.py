"""Packed attention by the kernel of segments, on the simulated CUDA device."""

import pytest
import torch

from tests.cuda_device.run import on_cuda


def attend(packing, dtype, segments, heads=4, key_heads=2, size=16):
    """Outputs and gradients [t, ...] of the used tokens, as float32."""
    from litgrpo.models.kernels import packed_attention

    with pytest.MonkeyPatch.context() as patch:
        if not segments:
            patch.setattr(packed_attention, "has_segment_kernel_for", lambda *_: False)
        generator = torch.Generator().manual_seed(0)

        def random(number):
            numbers = torch.randn(1, number, len(packing.ids), size, generator=generator)
            return numbers.cuda().to(dtype).requires_grad_()

        inputs = random(heads), random(key_heads), random(key_heads)
        found, _ = packed_attention.attend_packed(None, *inputs, None, packing=packing, scaling=0.3)
        used = found[:, : packing.num_tokens]
        weights = torch.randn(used.shape, generator=generator).cuda()
        grads = torch.autograd.grad((used.float() * weights).sum(), inputs)
    return [x.float().cpu() for x in (used, *(g[:, :, : packing.num_tokens] for g in grads))]


def packings():
    """Packed rows on the device: groups, completions of one token, whole rows."""
    from dataclasses import fields, replace

    from litgrpo.models.packing import Packing
    from tests.support.packing import rows

    def move(tokens):
        given = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
        tensors = {name: value.cuda() for name, value in given.items() if value is not None}
        return replace(tokens, **tensors)

    mask = (torch.arange(20) < torch.tensor([20, 3, 11, 7])[:, None]).cuda()
    ids = torch.randint(3, 259, mask.shape).cuda()
    return [
        Packing.of_groups(move(rows())),
        Packing.of_groups(move(rows(lengths=(1,) * 8))),
        Packing.of_rows(ids, mask, mask & (mask.cumsum(1) > 2)),
    ]


@on_cuda()
def test_segments_equal_padded_grids_in_half_precision_forward_and_backward():
    from tests.cuda_device.device import count_work

    for packing in packings():
        exact = attend(packing, torch.float32, segments=True)
        for dtype, most in ((torch.bfloat16, 0.01), (torch.float16, 0.002)):
            with count_work() as work:
                found = attend(packing, dtype, segments=True)
            calls = 2 if len(packing.key_sets.suffix_tokens) else 1
            assert work.launches["aten::_flash_attention_forward"] >= calls
            assert work.launches["aten::_flash_attention_backward"] >= calls
            on_grids = attend(packing, dtype, segments=False)
            for one, other, correct in zip(found, on_grids, exact, strict=True):
                size = correct.norm()
                assert (one - correct).norm() <= max(most * size, 1.5 * (other - correct).norm())


@on_cuda()
def test_other_dtypes_and_head_sizes_use_padded_grids():
    from tests.cuda_device.device import count_work

    for dtype, size in ((torch.float32, 16), (torch.bfloat16, 12)):
        with count_work() as work:
            attend(packings()[0], dtype, segments=True, size=size)
        assert "aten::_flash_attention_forward" not in work.launches


@on_cuda()
def test_a_device_without_the_kernel_uses_padded_grids():
    from litgrpo.models.kernels import packed_attention

    def missing(*_, **__):
        raise NotImplementedError("Could not run 'aten::_flash_attention_forward'")

    expected = attend(packings()[0], torch.bfloat16, segments=False)
    with pytest.MonkeyPatch.context() as patch:
        packed_attention._segment_kernel_works.cache_clear()
        patch.setattr(packed_attention, "segment_attention", missing)
        found = attend(packings()[0], torch.bfloat16, segments=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@on_cuda()
def test_packed_policies_equal_plain_rows_under_autocast():
    from litgrpo.models.packing import Packing
    from litgrpo.types import TokenRows
    from tests.cuda_device.device import count_work
    from tests.support.models import tiny_policy
    from tests.support.packing import rows

    given = rows()
    tokens = TokenRows(
        *(x.cuda() for x in (given.prompt_ids, given.prompt_mask, given.prompt_of)),
        *(x.cuda() for x in (given.completion_ids, given.completion_mask)),
    )
    assert Packing.of_groups(tokens).key_sets is not None
    policy = tiny_policy("qwen2").cuda()
    weights = torch.randn(tokens.completion_ids.shape).cuda()
    results = []
    for policy.share_prompts, dtype in (
        (True, torch.bfloat16),
        (False, torch.bfloat16),
        (False, None),
    ):
        policy.zero_grad()
        with count_work() as work, torch.autocast("cuda", dtype, enabled=dtype is not None):
            out = policy.logprobs(tokens)
        assert ("aten::_flash_attention_forward" in work.launches) == policy.share_prompts
        (out.logprobs * weights).sum().backward()
        grads = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
        results.append((out.logprobs.detach(), torch.cat(grads)))
    exact = results.pop()
    errors = [float((r[1] - exact[1]).norm() / exact[1].norm()) for r in results]
    assert errors[0] < 1.5 * errors[1] < 0.15
    assert (results[0][0] - exact[0]).abs().max() < 0.1
