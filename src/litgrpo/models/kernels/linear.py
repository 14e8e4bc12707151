"""CPU kernels of linear layers: torch's default (MKL) or oneDNN, whichever is faster.

Torch multiplies float32 matrices in MKL on every processor. It contains oneDNN as well, and a
product of few rows is faster if the weight is copied into oneDNN's layout once (`pack_weights`)
instead of in every call. A fixed rule selects the kernel (`choose_kernels`), not a measurement at
start-up, so that every run on a machine computes the same digits.

The operators have no public names (`torch_compat`). They are tried once; without them every layer
is a plain `nn.Linear`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from litgrpo.models.kernels.torch_compat import UNAVAILABLE, onednn_linear, pack_onednn_weight

Kernel = Literal["plain", "onednn"]
KernelChoice = Literal["auto", "plain", "onednn"]

# Time of plain / time of oneDNN on Zen 4, for weights of 2^18 to 2^22 elements:
#
#                                         AVX-512       AVX2
#     8 rows, packed, float32             1.2 to 1.7    0.9 to 1.2
#     8 rows, packed, bfloat16            1.3 to 1.7    unavailable
#     512 rows, forward and backward      0.9 to 1.2    0.8 to 0.9
#
# So weights are packed for decoding if there is AVX-512, and training stays plain. Smaller weights
# gain too little to justify digits that differ from torch's.
MIN_PACKED_ELEMENTS = 2**18
PACKING_CAPABILITY = "AVX512"
# Zen 5 multiplies 512 bits at once, which MKL does not use: 116 against oneDNN's 255 GFLOP/s on one
# thread for 2,048 rows, 512 inputs and 1,536 outputs.
MIN_TRAINED_ELEMENTS = 2**15
# Outputs per input from which the transposed weight gradient is faster, measured on Zen 5: clearly
# at 128 -> 512 and 512 -> 8,192, no longer at 512 -> 1,536.
MIN_TRANSPOSED_RATIO = 4
# oneDNN compiles and caches a kernel for every number of rows. Rows are padded to a multiple of
# this, so that there are few kernels; products of fewer rows stay plain.
TILE = 128
# CPU flags of Zen 5: an AMD processor with the instruction that Zen 4 lacks.
DOUBLE_WIDTH = frozenset({"sse4a", "avx512_vp2intersect"})


@dataclass(frozen=True)
class LinearKernels:
    """Kernels of the linear layers.

    Args:
        decode: during sampling; `onednn` packs the weights once per rollout.
        learn: everywhere else, forward and backward.

    Example:
        >>> choose_by_rule(2**20, "AVX512", frozenset({"avx2", "avx512f"}))  # Intel or Zen 4
        LinearKernels(decode='onednn', learn='plain')
    """

    decode: Kernel = "plain"
    learn: Kernel = "plain"


class PackedLinear:
    """A linear layer with its weight [out, in] copied into oneDNN's layout, as it is now.

    It computes in `dtype`, by default the weight's. Results have the dtype of the input if `widen`,
    else `dtype`, as under autocast.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        widen: bool = True,
    ) -> None:
        self.dtype = weight.dtype if dtype is None else dtype
        self.weight = pack_onednn_weight(weight.detach().to(self.dtype).contiguous())
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.widen = widen

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply [..., in] to [..., out]."""
        if x.dtype == self.dtype:
            return onednn_linear(x, self.weight, self.bias)
        y = onednn_linear(x.to(self.dtype), self.weight, self.bias)
        return y.to(x.dtype) if self.widen else y


def round_up_to_tile(number: int) -> int:
    """Return the next multiple of 128: 128 for 128, 256 for 129."""
    return -(-number // TILE) * TILE


class _OneDnn(torch.autograd.Function):
    """A float32 linear layer whose three matrix products run in oneDNN.

    The forward product is padded to whole tiles. In the backward products the rows of an unfinished
    tile are multiplied by plain torch, because padding would copy the larger factor.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        padding = round_up_to_tile(len(rows)) - len(rows)
        tiles = nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows
        return onednn_linear(tiles, weight, bias)[: len(rows)].view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_rows, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        num_tiled = len(rows) // TILE * TILE  # rows in whole tiles
        grad_x = grad_weight = None
        if needs_x:
            grad_x = onednn_linear(grad_rows[:num_tiled], weight.t())
            if num_tiled < len(rows):
                grad_x = torch.cat([grad_x, grad_rows[num_tiled:] @ weight])
            grad_x = grad_x.view_as(x)
        if needs_weight:
            grad_weight = _weight_grad(grad_rows[:num_tiled], rows[:num_tiled])
            if num_tiled < len(rows):
                grad_weight = grad_weight.addmm_(grad_rows[num_tiled:].t(), rows[num_tiled:])
        return grad_x, grad_weight, grad_rows.sum(0) if needs_bias else None


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """Return the weight's gradient [out, in]; oneDNN copies one factor, so take the smaller."""
    if grad.shape[1] >= MIN_TRANSPOSED_RATIO * x.shape[1]:
        return onednn_linear(x.t(), grad.t()).t()
    return onednn_linear(grad.t(), x.t())


class _KernelChoiceMixin(nn.Module):
    """Forward pass with a choice of kernel, added to the two kinds of linear layers."""

    weight: Tensor
    bias: Any
    kernel: Kernel = "plain"
    packed: PackedLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None and not torch.is_grad_enabled():
            return self.packed(x)
        fills_tile = x.numel() >= TILE * x.shape[-1]
        if self.kernel == "onednn" and fills_tile and _is_plain_float32(x, self.weight):
            return _OneDnn.apply(x, weight_matrix(self), self.bias)
        return super().forward(x)


class FastLinear(_KernelChoiceMixin, nn.Linear):
    """`nn.Linear` with a choice of kernel; parameters and their names are the same."""


class FastConv1D(_KernelChoiceMixin, Conv1D):
    """GPT-2's linear layer, which holds its weight transposed."""


FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}
PLAIN = {fast: plain for plain, fast in FAST.items()}


def _is_plain_float32(x: Tensor, weight: Tensor) -> bool:
    """Check that torch would compute in float32; it uses oneDNN for bfloat16 already."""
    is_float32 = x.dtype == weight.dtype == torch.float32
    return is_float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def list_linear_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers that can change their kernel, including adapters."""
    return [module for module in model.modules() if type(module) in FAST.keys() | PLAIN.keys()]


def weight_matrix(layer: Any) -> Tensor:
    """Return the weight of a linear layer as [out, in]."""
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight


def count_linear_outputs(model: Any) -> int:
    """Count the outputs of all linear layers per token, without the head (a memory estimate)."""
    head, layers = model.get_output_embeddings(), list_linear_layers(model)
    num_outputs = sum(len(weight_matrix(layer)) for layer in layers if layer is not head)
    # 4-bit weights are linear layers of another class.
    quantized = {layer for layer in model.modules() if isinstance(layer, nn.Linear)} - {*layers}
    return max(1, num_outputs + sum(layer.out_features for layer in quantized))


def set_kernels(model: nn.Module, kernels: LinearKernels) -> None:
    """Set the kernel of forward and backward passes; `pack_weights` is the one of decoding.

    Layers change their class, so that plain ones cost no more than `nn.Linear`; names, parameters
    and state dicts are unchanged.
    """
    if kernels != LinearKernels() and not onednn_works():
        raise ValueError(
            "This torch build has no oneDNN kernels, but model.precision.linear_kernels or the "
            "checkpoint (of another machine?) selects them. Set model.precision.linear_kernels: "
            "plain and start from exported weights instead of the checkpoint."
        )
    plain = kernels == LinearKernels()
    for layer in list_linear_layers(model):
        layer_class = type(layer)
        classes = PLAIN if plain else FAST
        layer.__class__ = classes.get(layer_class, layer_class)
        layer.kernel = kernels.learn


@contextmanager
def pack_weights(model: nn.Module) -> Iterator[None]:
    """Compute the linear layers from packed weights, in passes without gradient.

    Weights must not change within. Under autocast they are packed in its dtype. Does nothing if
    oneDNN is unavailable or cannot pack this dtype on this processor.
    """
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else None
    layers = [
        layer
        for layer in list_linear_layers(model)
        if type(layer) in PLAIN
        and can_pack(layer.weight)
        and can_pack_dtype(dtype or layer.weight.dtype)
    ]
    try:
        for layer in layers:
            layer.packed = PackedLinear(
                weight_matrix(layer), layer.bias, dtype=dtype, widen=not autocast
            )
        yield
    finally:
        for layer in layers:
            layer.packed = None


def can_pack(weight: Tensor) -> bool:
    """Check that `PackedLinear` can hold this weight."""
    return weight.device.type == "cpu" and can_pack_dtype(weight.dtype)


@cache
def onednn_works() -> bool:
    """Check that the operators exist and compute correct products, forward and backward."""
    # The first call may come from anywhere, e.g. under autocast or in inference mode.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        x, weight = torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(0, 1, 12).view(4, 3)
        try:
            results = onednn_linear(x, weight), PackedLinear(weight)(x), onednn_linear(x.t(), x.t())
        except UNAVAILABLE:
            return False
        expected = x @ weight.t(), x @ weight.t(), x.t() @ x
        return all(map(torch.allclose, results, expected))


@cache
def can_pack_dtype(dtype: torch.dtype) -> bool:
    """Check that weights of this dtype can be packed; bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    if dtype not in (torch.float32, torch.bfloat16) or not onednn_works():
        return False
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        try:
            PackedLinear(torch.ones(4, 3), dtype=dtype)
        except RuntimeError:
            return False
    return True


def choose_kernels(model: nn.Module, choice: KernelChoice) -> LinearKernels:
    """Choose kernels; `auto` applies `choose_by_rule` to the shape that holds most weights."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for layer in list_linear_layers(model):
        if can_pack(layer.weight):
            shapes[tuple(weight_matrix(layer).shape)] += layer.weight.numel()
    if choice == "plain" or not shapes:
        return LinearKernels()
    if choice == "onednn":
        return LinearKernels(decode="onednn", learn="onednn")
    (shape, _) = shapes.most_common(1)[0]
    capability = torch.backends.cpu.get_cpu_capability()
    return choose_by_rule(math.prod(shape), capability, read_cpu_flags())


def choose_by_rule(elements: int, capability: str, flags: frozenset[str]) -> LinearKernels:
    """Choose the kernels that were measured to be clearly faster (constants above).

    `elements` are those of one weight, `capability` is torch's, `flags` are of `/proc/cpuinfo`.
    """
    wide = capability.startswith(PACKING_CAPABILITY)
    trains = wide and flags >= DOUBLE_WIDTH and elements >= MIN_TRAINED_ELEMENTS
    return LinearKernels(
        decode="onednn" if wide and elements >= MIN_PACKED_ELEMENTS else "plain",
        learn="onednn" if trains else "plain",
    )


@cache
def read_cpu_flags() -> frozenset[str]:
    """Return the flags of the first processor in /proc/cpuinfo; empty if not on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
