import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from litgrpo.models.kernels import linear as linears
from litgrpo.models.kernels import packed_attention as flash
from litgrpo.models.kernels.linear import LinearKernels
from litgrpo.models.loading.export import export
from litgrpo.models.loading.load import LoRA, Precision, build_policy, load_policy
from tests.support.models import byte_tokenizer, tiny_model, tiny_policy

needs_onednn = pytest.mark.skipif(not linears.onednn_works(), reason="torch without oneDNN")
packs_bfloat16 = pytest.mark.skipif(
    not linears.can_pack_dtype(torch.bfloat16), reason="needs AVX-512"
)
PLAIN = Precision(linear_kernels="plain")
BOTH = LinearKernels(decode="onednn", learn="onednn")
PACKED = LinearKernels(decode="onednn")


def layer(kind=nn.Linear, into=96, out=160):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(kind(into, out) if kind is nn.Linear else kind(out, into))
        nn.init.normal_(model[0].bias)
        return model, torch.randn(3, 57, into)  # a whole tile and more


def distance(a, b):
    return float(((a - b).norm() / b.norm()).detach())


@needs_onednn
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("out", [160, 480])
@pytest.mark.parametrize("rows", [256, 171, 51])
def test_values_and_gradients_are_those_of_the_plain_layer(kind, out, rows):
    model, x = layer(kind, out=out)
    x = x.repeat(2, 1, 1).flatten(0, 1)[:rows].view(1, rows, -1)
    results = []
    for kernel in ("plain", "onednn"):
        linears.set_kernels(model, LinearKernels(learn=kernel))
        model.zero_grad()
        rows = x.clone().requires_grad_()
        y = model(rows)
        (y**2).sum().backward()
        results.append((y, rows.grad, *[p.grad.clone() for p in model.parameters()]))
    for plain, onednn in zip(*results, strict=True):
        assert distance(onednn, plain) < 1e-6


@needs_onednn
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_packed_layers_return_equal_values_and_are_unpacked_afterwards(kind):
    model, x = layer(kind)
    expected = model(x)
    linears.set_kernels(model, PACKED)
    with linears.pack_weights(model), torch.no_grad():
        got = model(x)
        assert model[0].packed is not None
    assert got.dtype == torch.float32
    assert distance(got, expected) < 1e-6
    assert model[0].packed is None
    assert torch.equal(model(x), expected)


@needs_onednn
@packs_bfloat16
@torch.no_grad()
def test_a_packed_layer_of_lower_precision_returns_the_dtype_of_its_input():
    model, x = layer()
    packed = linears.PackedLinear(model[0].weight, model[0].bias, dtype=torch.bfloat16)
    got = packed(x)
    assert got.dtype == torch.float32
    assert distance(got, model[0](x)) < 1e-2


@needs_onednn
@pytest.mark.parametrize("fused", [True, False])
def test_weights_that_a_processor_cannot_pack_stay_plain(monkeypatch, fused):
    def pack(weight, rows, real=torch.ops.mkldnn._reorder_linear_weight):
        if weight.dtype == torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support")
        return real(weight, rows)

    def said(kernels):
        policy.set_linear_kernels(kernels)
        with policy.decoding(rows=8, dtype=torch.bfloat16, fused=fused):
            _, state = policy.prefill(ids, torch.ones_like(ids, dtype=torch.bool), 2, capacity=3)
            return policy.decode_step(torch.arange(3, 5), state)

    policy, ids = tiny_policy("qwen2"), torch.arange(3, 9)[None]
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", pack)
    linears.can_pack_dtype.cache_clear()
    assert linears.can_pack_dtype(torch.float32)
    assert not linears.can_pack_dtype(torch.bfloat16)
    assert not linears.can_pack_dtype(torch.float16)
    assert torch.equal(said(PACKED), said(LinearKernels()))
    linears.can_pack_dtype.cache_clear()


@needs_onednn
def test_training_uses_the_kernel_only_for_whole_tiles_of_rows(monkeypatch):
    model, x = layer()
    linears.set_kernels(model, BOTH)
    seen, real = set(), linears.onednn_linear

    def record(x, weight, *bias):
        seen.add((x.shape[-2], x.shape[-1]))
        return real(x, weight, *bias)

    monkeypatch.setattr(linears, "onednn_linear", record)
    for rows in (1, 127, 128, 129, 171):
        model(x.flatten(0, 1)[:rows].requires_grad_()).sum().backward()
    assert {number for shape in seen for number in shape} == {96, 128, 160, 256}


@needs_onednn
def test_a_packed_layer_still_gives_gradients():
    model, x = layer()
    linears.set_kernels(model, PACKED)
    with linears.pack_weights(model):
        model(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


@needs_onednn
def test_packed_layers_return_the_dtype_of_autocast():
    model, x = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = model(x)
        linears.set_kernels(model, BOTH)
        assert torch.equal(model(x), expected)
        with linears.pack_weights(model):
            got = model(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert distance(got.float(), expected.float()) < 1e-2


def test_float64_stays_plain():
    model, x = layer()
    model.double()
    expected = model(x.double())
    linears.set_kernels(model, BOTH)
    with linears.pack_weights(model), torch.no_grad():
        assert torch.equal(model(x.double()), expected)
    assert linears.choose_kernels(model, "onednn") == LinearKernels()


def test_without_the_operators_every_layer_is_plain(monkeypatch):
    def missing(*_):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")

    for answer in (linears.onednn_works, linears.can_pack_dtype):
        answer.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(linears, "onednn_linear", missing)
        assert not linears.onednn_works()
        policy = tiny_policy("qwen2")
        assert linears.choose_kernels(policy.model, "onednn") == LinearKernels()
        with linears.pack_weights(policy.model):
            assert not any(
                type(layer) in linears.PLAIN for layer in linears.list_linear_layers(policy.model)
            )
    for answer in (linears.onednn_works, linears.can_pack_dtype):
        answer.cache_clear()


@pytest.mark.parametrize(
    ("elements", "capability", "flags", "kernels"),
    [
        (128 * 512, "AVX512", {"sse4a"}, LinearKernels()),  # the quickstart's
        (512 * 1536, "AVX512", {"sse4a"}, PACKED),
        (512 * 1536, "AVX512", {"avx512_vp2intersect"}, PACKED),
        (512 * 1536, "AVX2", linears.DOUBLE_WIDTH, LinearKernels()),
        (512 * 1536, "DEFAULT", set(), LinearKernels()),
        (512 * 1536, "AVX512", linears.DOUBLE_WIDTH, BOTH),
        (128 * 512, "AVX512", linears.DOUBLE_WIDTH, LinearKernels(learn="onednn")),
        (64 * 64, "AVX512", linears.DOUBLE_WIDTH, LinearKernels()),
    ],
)
def test_onednn_is_chosen_if_it_was_measured_to_be_faster(elements, capability, flags, kernels):
    assert linears.choose_by_rule(elements, capability, frozenset(flags)) == kernels


def test_cpu_flags_are_read_from_proc_cpuinfo(monkeypatch, tmp_path):
    linears.read_cpu_flags.cache_clear()
    assert linears.read_cpu_flags() or not Path("/proc/cpuinfo").exists()
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(linears, "Path", lambda _: file)
    for text, flags in (
        (None, set()),
        ("processor : 0\n", set()),
        ("flags\t\t: fpu sse4a\n", {"fpu", "sse4a"}),
    ):
        if text is not None:
            file.write_text(text)
        linears.read_cpu_flags.cache_clear()
        assert linears.read_cpu_flags() == flags
    linears.read_cpu_flags.cache_clear()


@needs_onednn
def test_the_shape_with_most_weights_decides(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(linears, "read_cpu_flags", frozenset)
    small, large = nn.Linear(8, 8), nn.Linear(512, 1536)
    for layers, decode in (([small], "plain"), ([small, large], "onednn")):
        model = nn.Sequential(*layers)
        linears.set_kernels(model, PACKED)
        assert {linears.choose_kernels(model, "auto") for _ in range(3)} == {
            LinearKernels(decode=decode)
        }


def test_names_shapes_and_export_stay(architecture, tmp_path):
    plain = tiny_model(architecture)
    policy = tiny_policy(architecture)
    assert linears.list_linear_layers(policy.model)
    state, expected = policy.model.state_dict(), plain.state_dict()
    assert state.keys() == expected.keys()
    policy.set_linear_kernels(BOTH)
    export(policy, tmp_path)
    again = load_policy(
        str(tmp_path), precision=Precision(linear_kernels="plain")
    ).model.state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@needs_onednn
def test_log_probabilities_are_equal_with_every_kernel(architecture):
    policy = tiny_policy(architecture)
    ids = torch.randint(3, 259, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    grads, logits = [], []
    for kernels in (LinearKernels(), BOTH):
        policy.set_linear_kernels(kernels)
        policy.zero_grad()
        out = policy.dense_logits(ids[:, :4], mask[:, :4], ids[:, 4:])
        (out**2).mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        with torch.no_grad(), policy.decoding(rows=8):
            first, state = policy.prefill(ids, mask, 2, capacity=3)
            logits.append(torch.cat([first, policy.decode_step(torch.arange(3, 11), state)]))
    assert distance(grads[1], grads[0]) < 1e-5
    assert distance(logits[1], logits[0]) < 1e-5


@needs_onednn
@pytest.mark.filterwarnings("ignore:.*target_modules.*")
def test_adapters_and_their_base_weights_use_the_kernel(tmp_path):
    precision = Precision(linear_kernels="onednn")
    policy = build_policy(tiny_model("qwen2"), byte_tokenizer(), precision=precision, lora=LoRA(4))
    layers = linears.list_linear_layers(policy.model)
    assert all(layer.kernel == "onednn" for layer in layers)
    assert sum("lora" in name for name, _ in policy.named_parameters()) < len(layers)
    ids = torch.arange(3, 9)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)
    policy.dense_logits(ids, mask, ids).sum().backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
    export(copy.deepcopy(policy), tmp_path)
    assert load_policy(str(tmp_path)).model.config.vocab_size == 259


def test_small_decoding_steps_use_one_thread():
    before = torch.get_num_threads()
    policy = tiny_policy("qwen2")
    with policy.decoding(rows=8):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("works", [linears.onednn_works, flash._kernel_works])
def test_kernel_probes_give_equal_results_under_autocast_and_inference_mode(works):
    expected = works()
    for around in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
        works.cache_clear()
        with around:
            assert works() == expected


def test_plain_layers_are_the_librarys_own():
    policy = tiny_policy("gpt2")
    assert {type(layer) for layer in linears.list_linear_layers(policy.model)} == {
        nn.Linear,
        Conv1D,
    }
    if linears.onednn_works():
        policy.set_linear_kernels(BOTH)
        assert {type(layer) for layer in linears.list_linear_layers(policy.model)} == {
            *linears.PLAIN
        }
        policy.set_linear_kernels(LinearKernels())
        assert {type(layer) for layer in linears.list_linear_layers(policy.model)} == {
            nn.Linear,
            Conv1D,
        }
