"""Linear layers on the fastest matrix kernel of this processor: the same arithmetic, sooner.

Plain torch hands float32 products to one library whatever the processor. Another one, oneDNN, is
in torch too, and a product of few rows gains when the weight is laid out for it once (`packed`)
instead of in every call. Which one is taken is a rule (`choose`), not a stopwatch, so that every
start of a command computes the same digits.

The operators that reach oneDNN directly are not part of torch's public interface. They are tried
once, and without them every layer is the plain one.
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

Kernel = Literal["plain", "onednn"]
KernelChoice = Literal["auto", "plain", "onednn"]

# Measured on a Zen 4 processor, plain over oneDNN in seconds, for weights of 2^18 to 2^22 numbers:
#
#                                         AVX-512       AVX2
#     8 rows, packed, float32             1.2 to 1.7    0.9 to 1.2
#     8 rows, packed, bfloat16            1.3 to 1.7    not there
#     512 rows, forward and backward      0.9 to 1.2    0.8 to 0.9
#
# So weights are packed for decoding where there is AVX-512, and learning stays plain. Smaller
# weights gain too little to compute other digits than torch's own.
PACKING_PAYS = 2**18
PACKING_CAPABILITY = "AVX512"
# On a Zen 5 processor, which multiplies 512 bits at once, plain products run at half the speed:
# 116 against 255 GFLOP/s on one thread for 2,048 rows of 512 numbers and 1,536 outputs.
LEARNING_PAYS = 2**15
# Outputs for each input from which the transposed gradient of a weight is computed sooner, measured
# there: clearly at 128 to 512 and 512 to 8,192, and no longer at 512 to 1,536.
COPY_PAYS = 4
# oneDNN makes and keeps kernels for every number of rows: products take a multiple of this, so that
# they are few, and fewer rows are the plain library's.
TILE = 128
# What Zen 5 has and no other: of AMD, with the instruction that Zen 4 lacks.
DOUBLE_WIDTH = frozenset({"sse4a", "avx512_vp2intersect"})


@dataclass(frozen=True)
class Kernels:
    """Which kernel computes the linear layers.

    Args:
        decode: while completions are sampled; `onednn` packs the weights once per rollout.
        learn: everywhere else, forward and backward.
    """

    decode: Kernel = "plain"
    learn: Kernel = "plain"


class PackedLinear:
    """A linear layer for one rollout, its weight copied into the kernel's own layout.

    Args:
        weight: [out, in].
        bias: [out] or None.
        dtype: float32 or bfloat16 to compute in; None takes the weight's.
        widen: give results in the type of the input; else in `dtype`, as autocast would.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        widen: bool = True,
    ) -> None:
        """Pack; later changes of the weight are not seen."""
        self.dtype = weight.dtype if dtype is None else dtype
        own = weight.detach().to(self.dtype).contiguous()
        # The number is a hint: any but 1 gives the layout that serves all.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(own, 32)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.widen = widen

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.dtype == self.dtype:
            return _onednn(x, self.weight, self.bias)
        y = _onednn(x.to(self.dtype), self.weight, self.bias)
        return y.to(x.dtype) if self.widen else y


def tiled(number: int) -> int:
    """The next multiple of 128.

    Example:
        >>> tiled(128), tiled(129)
        (128, 256)
    """
    return -(-number // TILE) * TILE


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows [..., in] times weight [out, in] transposed, plus bias."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnn(torch.autograd.Function):
    """A float32 linear layer whose three matrix products run in oneDNN.

    The forward product is filled up to whole tiles; the rows of an unfinished tile are the plain
    library's in the backward ones, whose larger factor would have to be copied to fill it up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        missing = tiled(len(rows)) - len(rows)
        filled = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return _onednn(filled, weight, bias)[: len(rows)].view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        whole = len(rows) // TILE * TILE
        of_x = of_weight = None
        if wants_x:
            of_x = _onednn(flat[:whole], weight.t())
            if whole < len(rows):
                of_x = torch.cat([of_x, flat[whole:] @ weight])
            of_x = of_x.view_as(x)
        if wants_weight:
            of_weight = _of_weight(flat[:whole], rows[:whole])
            if whole < len(rows):
                of_weight = of_weight.addmm_(flat[whole:].t(), rows[whole:])
        return of_x, of_weight, flat.sum(0) if wants_bias else None


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """The weight's gradient [out, in]; the smaller factor is the one that is copied."""
    if grad.shape[1] >= COPY_PAYS * x.shape[1]:
        return _onednn(x.t(), grad.t()).t()
    return _onednn(grad.t(), x.t())


class _Fast(nn.Module):
    """What the two classes below add to the library's layers."""

    weight: Tensor
    bias: Any
    kernel: Kernel = "plain"
    packed: PackedLinear | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.packed is not None and not torch.is_grad_enabled():
            return self.packed(x)
        enough = x.numel() >= TILE * x.shape[-1]
        if self.kernel == "onednn" and enough and _is_plain_float32(x, self.weight):
            return _OneDnn.apply(x, matrix(self), self.bias)
        return super().forward(x)


class FastLinear(_Fast, nn.Linear):
    """`nn.Linear` with a choice of kernel; parameters and their names are the same."""


class FastConv1D(_Fast, Conv1D):
    """GPT-2's linear layer, which holds its weight transposed."""


FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}
PLAIN = {fast: plain for plain, fast in FAST.items()}


def _is_plain_float32(x: Tensor, weight: Tensor) -> bool:
    """Whether torch would compute in float32 here; bfloat16 goes to oneDNN by itself."""
    same = x.dtype == weight.dtype == torch.float32
    return same and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def linears(model: nn.Module) -> list[Any]:
    """The model's linear layers that can change their kernel, adapters' among them."""
    return [module for module in model.modules() if type(module) in FAST.keys() | PLAIN.keys()]


def matrix(layer: Any) -> Tensor:
    """The weight of a linear layer as [out, in]."""
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight


def outputs(model: Any) -> int:
    """Numbers that the linear layers compute for each token, the head not counted."""
    head, known = model.get_output_embeddings(), linears(model)
    own = sum(len(matrix(layer)) for layer in known if layer is not head)
    # Weights in four bits are linear layers of another class.
    others = {each for each in model.modules() if isinstance(each, nn.Linear)} - {*known}
    return max(1, own + sum(each.out_features for each in others))


def use(model: nn.Module, kernels: Kernels) -> None:
    """Take a kernel for the forward and backward passes; `packed` is the one for decoding.

    Layers change their class, so that plain ones cost no more than the library's; names, parameters
    and results stay.
    """
    if kernels != Kernels() and not onednn_works():
        raise ValueError(
            "This torch cannot reach the kernels that were chosen (of a checkpoint of another "
            "machine?). Give precision.kernels: plain, and leave the checkpoint's choice out."
        )
    plain = kernels == Kernels()
    for layer in linears(model):
        kind = type(layer)
        layer.__class__ = PLAIN.get(kind, kind) if plain else FAST.get(kind, kind)
        layer.kernel = kernels.learn


@contextmanager
def packed(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run the model's linear layers from packed weights, as long as nothing needs a gradient.

    Weights must not change meanwhile. Under autocast the weights are packed in its type. Where
    oneDNN cannot be reached, or packs no weights of that type on this processor, nothing happens.

    Args:
        model: the model, its kernels chosen; plain layers stay as they are.
        dtype: to compute in; None takes the weights'. Results keep the type of the inputs.
    """
    autocast = torch.is_autocast_enabled("cpu")
    if autocast:
        dtype = torch.get_autocast_dtype("cpu")
    fast = [each for each in linears(model) if type(each) in PLAIN and can_pack(each.weight)]
    layers = [each for each in fast if packs(dtype or each.weight.dtype)]
    try:
        for layer in layers:
            layer.packed = PackedLinear(matrix(layer), layer.bias, dtype=dtype, widen=not autocast)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def can_pack(weight: Tensor) -> bool:
    """Whether `PackedLinear` takes this weight."""
    return weight.device.type == "cpu" and packs(weight.dtype)


@cache
def onednn_works() -> bool:
    """Whether the operators are there and compute what they should, forward and backward."""
    # Asked for the first time anywhere: under autocast, without gradients.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        x, weight = torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(0, 1, 12).view(4, 3)
        try:
            results = _onednn(x, weight), PackedLinear(weight)(x), _onednn(x.t(), x.t())
        except (AttributeError, RuntimeError, TypeError):  # another torch, or one without oneDNN
            return False
        expected = x @ weight.t(), x @ weight.t(), x.t() @ x
        return all(map(torch.allclose, results, expected))


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether weights of this type can be packed here; bfloat16 wants AVX-512 or AVX-NE-CONVERT."""
    if dtype not in (torch.float32, torch.bfloat16) or not onednn_works():
        return False
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        try:
            PackedLinear(torch.ones(4, 3), dtype=dtype)
        except RuntimeError:
            return False
    return True


def choose(model: nn.Module, choice: KernelChoice) -> Kernels:
    """The kernels to compute with: those asked for, or what the size of the weights says.

    Args:
        model: the model.
        choice: `auto` looks at the shape that holds most of the model's weights.
    """
    shapes: Counter[tuple[int, ...]] = Counter()
    for layer in linears(model):
        if can_pack(layer.weight):
            shapes[tuple(matrix(layer).shape)] += layer.weight.numel()
    if choice == "plain" or not shapes:
        return Kernels()
    if choice == "onednn":
        return Kernels(decode="onednn", learn="onednn")
    (shape, _) = shapes.most_common(1)[0]
    capability = torch.backends.cpu.get_cpu_capability()
    return by_rule(math.prod(shape), capability, processor_flags())


def by_rule(numbers: int, capability: str, flags: frozenset[str]) -> Kernels:
    """What was measured to be clearly faster.

    Args:
        numbers: of the weight that counts most.
        capability: what torch says of the processor.
        flags: what the processor says of itself.
    """
    wide = capability.startswith(PACKING_CAPABILITY)
    learns = wide and flags >= DOUBLE_WIDTH and numbers >= LEARNING_PAYS
    return Kernels(
        decode="onednn" if wide and numbers >= PACKING_PAYS else "plain",
        learn="onednn" if learns else "plain",
    )


@cache
def processor_flags() -> frozenset[str]:
    """Names of the instructions of this machine's first processor, where Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
