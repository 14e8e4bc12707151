"""Selective activation recomputation: recompute norms and the gated MLP product in backward.

Source: arXiv:2205.05198, section 4. For a layer of the Llama layout autograd keeps four tensors of
the MLP's width, and three of the model's width per norm. A norm's output follows elementwise from
its input, and the MLP's product from gate and up. Both are recomputed in the backward pass, which
halves the activations; no matrix product is recomputed. The forward pass computes transformers'
digits.

Under autocast a norm before linear layers returns the lower precision, so that one rounded copy is
made instead of one per linear layer.

Why not `torch.utils.checkpoint.create_selective_checkpoint_contexts`: it runs every operator of
forward and recomputation through a Python dispatch mode. Measured with "save all matrix products
and attention" on one thread of a CPU, a forward and backward pass of a Llama took

    hidden 128, 4 layers, 512 tokens       44 ms without, 45 ms here, 59 ms by torch's contexts
    hidden 512, 8 layers, 2,048 tokens     4.27 s without, 4.15 s here, 4.36 s by torch's contexts

Here only the recomputed modules run Python code, and their fused backward pass is faster than
autograd's chain of operators.
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

from litgrpo.models.architectures import MLP, find_fused_layout, modeling_module_name
from litgrpo.tensors import widen

# {activation class: gradient of its input, from the output's gradient and the input}
ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    type(ACT2FN["silu"]): torch.ops.aten.silu_backward,
    type(ACT2FN["gelu_pytorch_tanh"]): partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
# Recomputable tensors that autograd may still save: the outputs of the last norm, MLP and norm.
RECENT = 3


class RecomputedModules(NamedTuple):
    """Modules of a model whose outputs are recomputed.

    Args:
        before: norms whose output goes into linear layers only.
        after: all other norms of layers.
        mlps: gated MLPs.
        gemma: norm weights are stored minus 1 and multiplied before rounding.

    Example:
        A Llama of 2 layers has 4 norms in `before`, none in `after` and 2 `mlps`.
    """

    before: list[Any]
    after: list[Any]
    mlps: list[Any]
    gemma: bool


def find_recomputed_modules(model: PreTrainedModel) -> RecomputedModules | None:
    """Return the modules of a model of a supported layout; None if it is another one.

    Args:
        model: may have adapters in its layers.
    """
    layout, home = find_fused_layout(model), modeling_module_name(model)
    if layout is None:
        return None
    last = "pre_feedforward_layernorm" if layout.gemma else "post_attention_layernorm"
    parts = RecomputedModules([], [], [], layout.gemma)
    body: Any = model.base_model
    for layer in body.layers:
        norms = {name: part for name, part in layer.named_children() if name.endswith("norm")}
        if norms.keys() != layout.layer_norms:
            return None
        heads = [part for name, part in layer.self_attn.named_children() if name.endswith("norm")]
        if not _are_supported(layer.mlp, [*norms.values(), *heads], home):
            return None
        before = [norms.pop("input_layernorm"), norms.pop(last)]
        parts.before.extend(before)
        parts.after.extend([*norms.values(), *heads])
        parts.mlps.append(layer.mlp)
    return parts if _match_transformers(parts) else None


def _are_supported(mlp: Any, norms: list[Any], home: str) -> bool:
    parts = mlp, *norms
    if any(type(part).__module__ != home or "forward" in part.__dict__ for part in parts):
        return False  # accelerate's hooks replace `forward` in the instance
    if dict(mlp.named_children()).keys() != MLP or type(mlp.act_fn) not in ACTIVATIONS:
        return False
    # Transformers computes float64 norms in float32; FSDP's sharded weights are DTensors.
    weights = [norm.weight for norm in norms]
    return all(type(each) is nn.Parameter and each.dtype != torch.float64 for each in weights)


@contextmanager
def recompute_in_backward(parts: RecomputedModules) -> Iterator[None]:
    """Run a forward pass of the model that has these modules, keeping fewer activations.

    Another thread must not run the model within. The backward pass may come later.
    """
    saved = _SavedTensors()
    forwards: list[tuple[Any, Callable[..., Tensor]]] = [
        *((norm, partial(_norm, norm, parts.gemma, saved)) for norm in parts.before),
        *((norm, partial(_norm, norm, parts.gemma, None)) for norm in parts.after),
        *((mlp, partial(_mlp, mlp, saved)) for mlp in parts.mlps),
    ]
    try:
        # Replacing `forward` on the instance leaves classes, hooks and state dicts unchanged.
        for module, forward in forwards:
            module.forward = forward
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield
    finally:
        for module, _ in forwards:
            module.__dict__.pop("forward", None)
        saved.recent.clear()


class _KeptTensor(NamedTuple):
    """A tensor and its version: torch does not check for in-place changes if hooks are used."""

    tensor: Tensor
    version: int


class _Recomputation(NamedTuple):
    """Saved instead of a tensor: a function that computes it, and the view that was saved."""

    compute: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]


class _SavedTensors:
    """Hooks for the tensors that autograd saves in one forward pass.

    A module announces its output by `register`; when autograd then saves a tensor of that storage,
    the function is kept in its place. Matching by address is safe because `recent` holds the
    announced tensors, so that no other tensor can have their address.
    """

    def __init__(self) -> None:
        self.recent: list[tuple[_KeptTensor, Callable[[], Tensor]]] = []
        self.computed: tuple[Callable[[], Tensor], Tensor] | None = None

    def register(self, tensor: Tensor, compute: Callable[[], Tensor]) -> None:
        """Announce a contiguous tensor that `compute` returns at any time until backward."""
        kept = _KeptTensor(tensor.detach(), tensor._version)
        self.recent = [*self.recent[1 - RECENT :], (kept, compute)]

    def pack(self, tensor: Tensor) -> _KeptTensor | _Recomputation:
        """Return what to save in place of a tensor."""
        for (known, version), compute in self.recent:
            same = tensor.data_ptr() == known.data_ptr() and tensor.numel() == known.numel() > 0
            if same and tensor.dtype == known.dtype and tensor._version == version:
                return _Recomputation(compute, tensor.size(), tensor.stride())
        # With its node, the tensor would be part of a reference cycle through C++, which no garbage
        # collector finds: a pass that fails before backward would leave all activations in memory.
        return _KeptTensor(tensor.detach(), tensor._version)

    def unpack(self, kept: _KeptTensor | _Recomputation) -> Tensor:
        """Return a saved tensor; the last recomputed one is cached for several linear layers.

        Raises:
            RuntimeError: it was modified in place after the forward pass.
        """
        if isinstance(kept, _KeptTensor):
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    f"A tensor {list(kept.tensor.shape)} that the backward pass needs has been "
                    "modified by an inplace operation since the forward pass."
                )
            return kept.tensor
        if self.computed is None or self.computed[0] is not kept.compute:
            self.computed = kept.compute, kept.compute()
        return self.computed[1].as_strided(kept.size, kept.stride)


def _norm(norm: Any, gemma: bool, saved: _SavedTensors | None, x: Tensor) -> Tensor:
    """Compute a norm; with `saved` its output goes into linear layers and is recomputed."""
    device, dtype = x.device.type, None
    if saved is not None and torch.is_autocast_enabled(device) and x.dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device)
    eps = norm.eps if gemma else norm.variance_epsilon
    y, scale = _Norm.apply(x, norm.weight, eps, gemma, dtype)
    if saved is not None:
        kept = x.detach(), norm.weight.detach(), scale
        saved.register(y, lambda: _apply_scale(*kept, gemma, dtype))
    out: Tensor = y
    return out


def _apply_scale(
    x: Tensor, weight: Tensor, scale: Tensor, gemma: bool, dtype: torch.dtype | None
) -> Tensor:
    """Multiply by scale and weight, rounded as in transformers, then to `dtype` if given."""
    y = widen(x) * scale
    y = (y * (1 + widen(weight))).to(x.dtype) if gemma else weight * y.to(x.dtype)
    return y if dtype is None else y.to(dtype)


class _Norm(torch.autograd.Function):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, equation 4)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, gemma: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        scale = widen(x).pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.gemma = gemma
        ctx.mark_non_differentiable(scale)
        return _apply_scale(x, weight, scale, gemma, dtype), scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        factor = widen(weight) + 1 if ctx.gemma else widen(weight)
        rows, grads = widen(x), widen(grad)
        # With s = 1 / sqrt(mean(x^2) + eps):   y = w s x
        #     dw = sum over rows of s x dy
        #     dx = s w dy - s^3 x mean(w x dy)
        weighted = (grads * rows).mul_(scale)  # [..., E] s x dy
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = weighted.flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            inward = weighted.mul_(factor).mean(-1, keepdim=True).mul_(scale * scale).neg_()
            grad_x = (grads * factor).mul_(scale).addcmul_(rows, inward).to(x.dtype)
        return grad_x, grad_weight, None, None, None


def _mlp(mlp: Any, saved: _SavedTensors, x: Tensor) -> Tensor:
    """Compute a gated MLP; the product of gate and up is recomputed."""
    gate, up, act = mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn
    product = _Gated.apply(gate, up, act)
    kept = gate.detach(), up.detach()
    saved.register(product, lambda: _multiply_gate(*kept, act))
    out: Tensor = mlp.down_proj(product)
    return out


def _multiply_gate(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    return act(gate).mul_(up)


class _Gated(torch.autograd.Function):
    """Gated product act(gate) * up (arXiv:2002.05202, equation 5)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return _multiply_gate(gate, up, act)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate = ACTIVATIONS[type(ctx.act)](grad * up, gate)
        return grad_gate, ctx.act(gate).mul_(grad), None


@torch.no_grad()
def _match_transformers(parts: RecomputedModules) -> bool:
    """Compare with transformers' modules, on the first of each kind of norm and MLP."""
    kinds = {type(norm): norm for norm in (*parts.before, *parts.after)}.values()
    mlp = parts.mlps[0]
    tries = [(norm, partial(_norm, norm, parts.gemma, None), norm.weight) for norm in kinds]
    tries.append((mlp, partial(_mlp, mlp, _SavedTensors()), parts.before[0].weight))
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
