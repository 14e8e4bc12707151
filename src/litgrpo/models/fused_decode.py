"""A decoding step of our own for the Llama layout and its kin: the same arithmetic, fewer calls.

The library's forward pass spends most of a small model's time between its operators. Here the
query, key and value projections are one matrix product, as are gate and up; the norms' weights are
in the products' weights; positions are turned by one complex product; weights may be packed or in
lower precision. Everything else (prefill, any other model, learning) is the library's. What is not
known exactly is not attempted (`is_known`), and a policy compares logits at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from litgrpo.models.architectures import (
    MLP,
    POSITIONAL_ROPES,
    FusedLayout,
    fused_layout,
    home_of,
)
from litgrpo.models.kernels.linear import FastLinear, PackedLinear
from litgrpo.models.shared_prefix import SharedPrefixCache

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
LINEAR = (nn.Linear, FastLinear)


def is_known(model: PreTrainedModel) -> bool:
    """Whether this is exactly a layout that `FusedDecoder` computes."""
    layout, home = fused_layout(model), home_of(model)
    if layout is None:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return False
    if any(type(p) is not nn.Parameter or not p.is_floating_point() for p in model.parameters()):
        return False
    body: Any = model.base_model
    rotary, attention = body.rotary_emb, body.layers[0].self_attn
    if rotary.rope_type not in POSITIONAL_ROPES or 2 * len(rotary.inv_freq) != attention.head_dim:
        return False
    return (
        type(model.get_output_embeddings()) in LINEAR
        and type(body.norm).__module__ == home
        and all(_is_known_layer(layer, layout, home) for layer in body.layers)
    )


def _is_known_layer(layer: Any, layout: FusedLayout, home: str) -> bool:
    outer, inner, mlp = (dict(p.named_children()) for p in (layer, layer.self_attn, layer.mlp))
    expected = layout.layer_norms | {"self_attn", "mlp"}, layout.head_norms | PROJECTIONS, MLP
    if (outer.keys(), inner.keys(), mlp.keys()) != expected:
        return False
    rest = {**outer, **inner, **mlp}
    del rest["act_fn"]
    projections = [rest.pop(name) for name in list(rest) if name.endswith("_proj")]
    own = all(type(part).__module__ == home for part in (layer, *rest.values()))
    return own and all(type(each) in LINEAR or _is_plain_adapter(each) for each in projections)


def _is_plain_adapter(part: nn.Module) -> bool:
    """Whether this is a LoRA layer whose matrices can be added to float32 weights."""
    kind = type(part)
    if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ != "Linear":
        return False
    layer: Any = part
    odd = layer.lora_variant, layer.merged_adapters, layer.disable_adapters, layer.fan_in_fan_out
    if any(odd) or any((*layer.use_dora.values(), *layer.lora_bias.values())):
        return False
    return type(layer.base_layer) in LINEAR and layer.base_layer.weight.dtype == torch.float32


def _weight(part: Any) -> Tensor:
    """[out, in] of a linear layer, adapters added."""
    if isinstance(part, nn.Linear):
        return part.weight.detach()
    weight = part.base_layer.weight.detach()
    for name in part.active_adapters:
        if name in part.lora_A:
            weight = weight + part.get_delta_weight(name)
    return weight


def _bias(parts: list[Any]) -> Tensor | None:
    """The biases of some linear layers one after the other."""
    bases = [part if isinstance(part, nn.Linear) else part.base_layer for part in parts]
    if all(base.bias is None for base in bases):
        return None
    none = [base.weight.new_zeros(len(base.weight)) for base in bases]
    pairs = zip(bases, none, strict=True)
    return torch.cat([zero if base.bias is None else base.bias.detach() for base, zero in pairs])


class Product:
    """A linear layer made ready for one rollout.

    Args:
        weight: [out, in].
        bias: [out] or None.
        dtype: to compute in.
        pack: lay the weight out for oneDNN.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, pack: bool) -> None:
        """Convert or pack."""
        self.packed = PackedLinear(weight, bias, dtype=dtype) if pack else None
        self.weight = weight.to(dtype).t()
        self.bias = None if bias is None else bias.to(dtype)
        if pack:
            self.weight = self.weight[:0]  # the packed copy is enough

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """[n, in] -> [n, out] of the same type, plus `add`."""
        if self.packed is not None:
            y = self.packed(x)
        elif x.dtype != self.weight.dtype:
            y = torch.mm(x.to(self.weight.dtype), self.weight)
            y = (y if self.bias is None else y + self.bias).to(x.dtype)
        else:
            first = self.bias if add is None else add
            y = torch.mm(x, self.weight) if first is None else torch.addmm(first, x, self.weight)
            return y if add is None or self.bias is None else y + self.bias
        return y if add is None else y.add_(add)


@dataclass(frozen=True)
class Layer:
    """What one layer computes with.

    Args:
        qkv: all projections of the attention's input, its norm's weight included; in each query
            and key head, the two numbers that are turned together are neighbors.
        out: projection of the attention's output.
        gate_up: both projections of the MLP's input, its norm's weight included.
        down: projection of the MLP's output.
        act: between them.
        head_norm: [Q + H, D] weights of the norms of query and key heads (Qwen 3), or None.
        after: [E] weights of the norms of attention's and MLP's output (Gemma 2), or None.
        window: positions that a token attends to; None: all.
    """

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    act: Callable[[Tensor], Tensor]
    head_norm: Tensor | None
    after: tuple[Tensor, Tensor] | None
    window: int | None


class FusedDecoder:
    """A known model, its weights made ready for one rollout; they must not change meanwhile.

    Args:
        model: of a known layout.
        finish: what the model does to logits after its head.
        dtype: of the matrix products; None takes the weights'.
        pack: lay weights out for oneDNN.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        finish: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype | None = None,
        pack: bool = False,
    ) -> None:
        """Merge the weights; a copy of nearly all of them."""
        body: Any = model.base_model
        attention = body.layers[0].self_attn
        config: Any = model.config
        self.embedding = body.embed_tokens.weight.detach()
        self.dtype = torch.promote_types(self.embedding.dtype, torch.float32)
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = attention.head_dim
        layout = fused_layout(model)
        assert layout is not None
        gemma = layout.gemma
        self.offset = 1.0 if gemma else 0.0  # Gemma stores its norms' weights less 1
        self.eps = torch.tensor(config.rms_norm_eps, dtype=self.dtype, device=self.embedding.device)
        self.embed_scale = float(body.embed_tokens.embed_scale) if gemma else 1.0
        self.softcap = config.attn_logit_softcapping if gemma else None
        self.scaling = attention.scaling / (self.softcap or 1.0)
        self.product_args = (dtype or self.embedding.dtype, pack)
        # Neighbors 2i, 2i + 1 were numbers i, i + D/2.
        self.pairs = torch.arange(self.size, device=self.eps.device).view(2, -1).t().flatten()
        self.layers = [self._layer(layer, gemma) for layer in body.layers]
        self.last_norm = self._norm_weight(body.norm)
        self.head = self._product([model.get_output_embeddings()])
        self.finish = finish
        self.rotary = body.rotary_emb
        self.turns = torch.empty(0)

    def _norm_weight(self, norm: Any) -> Tensor:
        return norm.weight.detach().to(self.dtype) + self.offset

    def _product(self, parts: list[Any], norm: Any = None, rows: Tensor | None = None) -> Product:
        """Linear layers side by side, after a norm, with their outputs in another order."""
        weights, bias = [_weight(part) for part in parts], _bias(parts)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if norm is not None:
            weight = (weight * self._norm_weight(norm)).to(weight.dtype)
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return Product(weight, bias, *self.product_args)

    def _layer(self, layer: Any, gemma: bool) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        turned = (self.heads + self.groups) * self.size
        order = torch.arange(turned + self.groups * self.size, device=self.pairs.device)
        order[:turned] = order[:turned].view(-1, self.size)[:, self.pairs].flatten()
        parts = dict(attention.named_children())
        head_norm = after = None
        if "q_norm" in parts:
            norms = (attention.q_norm, self.heads), (attention.k_norm, self.groups)
            weights = [self._norm_weight(norm)[self.pairs].expand(n, -1) for norm, n in norms]
            head_norm = torch.cat(weights)
        before_mlp = layer.post_attention_layernorm
        if gemma:
            before_mlp = layer.pre_feedforward_layernorm
            norms = layer.post_attention_layernorm, layer.post_feedforward_layernorm
            after = (self._norm_weight(norms[0]), self._norm_weight(norms[1]))
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        windowed = "sliding_window" in vars(attention)  # Llama has none
        return Layer(
            qkv=self._product(qkv, layer.input_layernorm, order),
            out=self._product([attention.o_proj]),
            gate_up=self._product([mlp.gate_proj, mlp.up_proj], before_mlp),
            down=self._product([mlp.down_proj]),
            act=mlp.act_fn,
            head_norm=head_norm,
            after=after,
            window=attention.sliding_window if windowed else None,
        )

    def receive(self, prefill: DynamicCache, positions: int) -> DynamicCache:
        """Bring the library's prompt keys into the order of ours; `positions` there will be."""
        layers: list[Any] = prefill.layers
        for layer in layers:
            layer.keys = layer.keys.to(self.dtype)[..., self.pairs]
            layer.values = layer.values.to(self.dtype)
        if positions > len(self.turns):
            numbers = torch.arange(positions, device=self.pairs.device)[None]
            cos, sin = self.rotary(self.eps, numbers)
            half = self.size // 2
            self.turns = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return prefill

    def _scale(self, x: Tensor) -> Tensor:
        """[..., 1] one over the root mean square of the last dimension."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: SharedPrefixCache) -> Tensor:
        """Feed one token to every live row.

        Args:
            tokens: [n] the tokens just sampled.
            cache: of these rows; it advances.

        Returns:
            [n, V] logits of the next token.
        """
        turns = self.turns.index_select(0, cache.begin_step().squeeze(1))[:, None]  # [n, 1, D/2]
        x = self.embedding.index_select(0, tokens).to(self.dtype)  # [n, E]
        if self.embed_scale != 1:
            x.mul_(self.embed_scale)
        for number, layer in enumerate(self.layers):
            attended = self._attention(number, layer, x * self._scale(x), turns, cache)
            x = self._added(x, attended, layer.out, layer, 0)
            gate, up = layer.gate_up(x * self._scale(x)).chunk(2, 1)
            x = self._added(x, layer.act(gate).mul_(up), layer.down, layer, 1)
        cache.fed += 1
        return self.finish(self.head((x * self._scale(x)).mul_(self.last_norm)))

    def _attention(
        self, number: int, layer: Layer, x: Tensor, turns: Tensor, cache: SharedPrefixCache
    ) -> Tensor:
        """[n, E] after its norm -> [n, Q * D] before the output projection."""
        n, turned = len(x), self.heads + self.groups
        heads = layer.qkv(x).view(n, -1, self.size // 2, 2)
        turning, values = heads.split((turned, self.groups), 1)
        if layer.head_norm is not None:
            turning = turning.flatten(2)
            turning = (turning * self._scale(turning)).mul_(layer.head_norm)
            turning = turning.view(n, turned, -1, 2)
        pairs = torch.view_as_real(torch.view_as_complex(turning) * turns)
        query, keys = pairs.view(n, turned, self.size).split((self.heads, self.groups), 1)
        cache.write(number, keys, values.view(n, self.groups, self.size))
        query = (query * self.scaling).view(n * self.groups, -1, self.size)
        output = cache.attend(number, query, softcap=self.softcap, window=layer.window)
        return output.view(n, self.heads * self.size)

    def _added(self, x: Tensor, y: Tensor, product: Product, layer: Layer, place: int) -> Tensor:
        """What a product of y adds to the stream x, after a norm where there is one."""
        if layer.after is None:
            return product(y, add=x)
        y = product(y)
        return torch.addcmul(x, y * self._scale(y), layer.after[place])
