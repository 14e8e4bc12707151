"""Half as much is kept for the backward pass: what costs little is computed again.

Selective activation recomputation (arXiv:2205.05198, section 4). Of a layer of the Llama layout,
autograd keeps four tensors of the MLP's width, and for each norm three of the model's. The output
of a norm follows from its input, the MLP's product from gate and up, element by element: both are
computed again in the backward pass, and no matrix product is. Forward, every digit is the
library's.

Under autocast a norm before products gives its output in the lower precision, to which each product
would round it for itself, so that one copy is made in place of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from litgrpo.models.architectures import MLP, fused_layout, home_of
from litgrpo.tensors import widened

# {class of an activation: its backward pass from the output's gradient and the input}
ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    type(ACT2FN["silu"]): torch.ops.aten.silu_backward,
    type(ACT2FN["gelu_pytorch_tanh"]): partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
# Tensors that can be computed again and that something may still keep.
RECENT = 3


class Recomputed(NamedTuple):
    """The modules of a model that are computed here.

    Args:
        before: norms whose output goes into products, and nowhere else.
        after: all other norms of layers.
        mlps: gated MLPs.
        gemma: norm weights are stored less 1 and multiplied before rounding.
    """

    before: list[Any]
    after: list[Any]
    mlps: list[Any]
    gemma: bool


def recomputed_of(model: PreTrainedModel) -> Recomputed | None:
    """What is computed here of a model of a known layout; None: nothing.

    Args:
        model: perhaps with adapters in its layers.
    """
    layout, home = fused_layout(model), home_of(model)
    if layout is None:
        return None
    last = "pre_feedforward_layernorm" if layout.gemma else "post_attention_layernorm"
    parts = Recomputed([], [], [], layout.gemma)
    body: Any = model.base_model
    for layer in body.layers:
        norms = {name: part for name, part in layer.named_children() if name.endswith("norm")}
        if norms.keys() != layout.layer_norms:
            return None
        heads = [part for name, part in layer.self_attn.named_children() if name.endswith("norm")]
        if not _are_known(layer.mlp, [*norms.values(), *heads], home):
            return None
        before = [norms.pop("input_layernorm"), norms.pop(last)]
        parts.before.extend(before)
        parts.after.extend([*norms.values(), *heads])
        parts.mlps.append(layer.mlp)
    return parts if _agree(parts) else None


def _are_known(mlp: Any, norms: list[Any], home: str) -> bool:
    parts = mlp, *norms
    if any(type(part).__module__ != home or "forward" in vars(part) for part in parts):
        return False  # as by accelerate, whose hooks replace it in the module
    if dict(mlp.named_children()).keys() != MLP or type(mlp.act_fn) not in ACTIVATIONS:
        return False
    # The library computes norms of float64 in float32; weights in shards have a class of their own.
    weights = [norm.weight for norm in norms]
    return all(type(each) is nn.Parameter and each.dtype != torch.float64 for each in weights)


@contextmanager
def recomputing(parts: Recomputed) -> Iterator[None]:
    """Run a forward pass of the model that has these modules; less is kept of it.

    Another thread must not run the model meanwhile. The backward pass may come later.
    """
    again = _Again()
    forwards: list[tuple[Any, Callable[..., Tensor]]] = [
        *((norm, partial(_norm, norm, parts.gemma, again)) for norm in parts.before),
        *((norm, partial(_norm, norm, parts.gemma, None)) for norm in parts.after),
        *((mlp, partial(_mlp, mlp, again)) for mlp in parts.mlps),
    ]
    try:
        for module, forward in forwards:
            module.forward = forward
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            yield
    finally:
        for module, _ in forwards:
            vars(module).pop("forward", None)
        again.recent.clear()


class _Whole(NamedTuple):
    """A tensor, and how often it had been changed: with hooks, torch does not look."""

    tensor: Tensor
    version: int


class _Recipe(NamedTuple):
    """In place of a tensor: how to compute it, and which view of it was kept."""

    compute: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]


class _Again:
    """What autograd keeps in one forward pass: not the tensors that can be computed again."""

    def __init__(self) -> None:
        # Held until others come, so that no other tensor can have the same address.
        self.recent: list[tuple[_Whole, Callable[[], Tensor]]] = []
        self.computed: tuple[Callable[[], Tensor], Tensor] | None = None

    def can(self, tensor: Tensor, compute: Callable[[], Tensor]) -> None:
        """This contiguous tensor is what `compute` gives, at any time until the backward pass."""
        whole = _Whole(tensor.detach(), tensor._version)
        self.recent = [*self.recent[1 - RECENT :], (whole, compute)]

    def pack(self, tensor: Tensor) -> _Whole | _Recipe:
        """What to keep of a tensor."""
        for (known, version), compute in self.recent:
            place = tensor.data_ptr() == known.data_ptr() and tensor.numel() == known.numel() > 0
            if place and tensor.dtype == known.dtype and tensor._version == version:
                return _Recipe(compute, tensor.size(), tensor.stride())
        return _Whole(tensor, tensor._version)

    def unpack(self, kept: _Whole | _Recipe) -> Tensor:
        """The tensor; several products in a row ask for the same.

        Raises:
            RuntimeError: it was changed after the forward pass.
        """
        if isinstance(kept, _Whole):
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    f"A tensor {list(kept.tensor.shape)} that the backward pass needs has been "
                    "modified by an inplace operation since the forward pass."
                )
            return kept.tensor
        if self.computed is None or self.computed[0] is not kept.compute:
            self.computed = kept.compute, kept.compute()
        return self.computed[1].as_strided(kept.size, kept.stride)


def _norm(norm: Any, gemma: bool, again: _Again | None, x: Tensor) -> Tensor:
    """A norm's forward pass; with `again` its output goes into products."""
    device, dtype = x.device.type, None
    if again is not None and torch.is_autocast_enabled(device) and x.dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device)
    eps = norm.eps if gemma else norm.variance_epsilon
    y, scale = _Norm.apply(x, norm.weight, eps, gemma, dtype)
    if again is not None:
        kept = x.detach(), norm.weight.detach(), scale
        again.can(y, lambda: _scaled(*kept, gemma, dtype))
    out: Tensor = y
    return out


def _scaled(
    x: Tensor, weight: Tensor, scale: Tensor, gemma: bool, dtype: torch.dtype | None
) -> Tensor:
    """The input times scale and weight, rounded as by the library, then to `dtype` if given."""
    y = widened(x) * scale
    y = (y * (1 + widened(weight))).to(x.dtype) if gemma else weight * y.to(x.dtype)
    return y if dtype is None else y.to(dtype)


class _Norm(torch.autograd.Function):
    """x over its root mean square, times a weight (arXiv:1910.07467, equation 4)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, gemma: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        scale = widened(x).pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.gemma = gemma
        ctx.mark_non_differentiable(scale)
        return _scaled(x, weight, scale, gemma, dtype), scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        factor = widened(weight) + 1 if ctx.gemma else widened(weight)
        rows, grads = widened(x), widened(grad)
        along = (grads * rows).mul_(scale)  # [..., E] of the weight
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = along.flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            inward = along.mul_(factor).mean(-1, keepdim=True).mul_(scale * scale).neg_()
            of_x = (grads * factor).mul_(scale).addcmul_(rows, inward).to(x.dtype)
        return of_x, of_weight, None, None, None


def _mlp(mlp: Any, again: _Again, x: Tensor) -> Tensor:
    """A gated MLP's forward pass."""
    gate, up, act = mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn
    product = _Gated.apply(gate, up, act)
    kept = gate.detach(), up.detach()
    again.can(product, lambda: _gated(*kept, act))
    out: Tensor = mlp.down_proj(product)
    return out


def _gated(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return act(gate).mul_(up)


class _Gated(torch.autograd.Function):
    """act(gate) * up (arXiv:2002.05202, equation 5)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return _gated(gate, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        of_gate = ACTIVATIONS[type(ctx.act)](grad * up, gate)
        return of_gate, ctx.act(gate).mul_(grad), None


@torch.no_grad()
def _agree(parts: Recomputed) -> bool:
    """Whether the library computes the same, on the first of each kind of norm and MLP."""
    kinds = {type(norm): norm for norm in (*parts.before, *parts.after)}.values()
    mlp = parts.mlps[0]
    tries = [(norm, partial(_norm, norm, parts.gemma, None), norm.weight) for norm in kinds]
    tries.append((mlp, partial(_mlp, mlp, _Again()), parts.before[0].weight))
    training = mlp.training
    mlp.eval()  # adapters may have dropout
    try:
        for module, forward, like in tries:
            x = torch.linspace(-2, 2, 2 * len(like), device=like.device, dtype=like.dtype)
            if not torch.allclose(module(x.view(2, -1)), forward(x.view(2, -1))):
                return False
    finally:
        mlp.train(training)
    return True
