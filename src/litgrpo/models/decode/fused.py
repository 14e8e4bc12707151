"""Fused decoding step for the Llama layout and related ones: equal arithmetic in fewer calls.

Transformers' forward pass spends most of a small model's time between operators. Here the query,
key and value projections are one matrix product, as are gate and up; the norm weights are
multiplied into the weights that follow; rotary positions are one complex product; weights may be
packed or in lower precision. Prefill, training and all other models use transformers' code.
`is_supported` accepts exact layouts only, and `CausalPolicy.can_fuse` compares logits before the
first use.
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
    find_fused_layout,
    modeling_module_name,
)
from litgrpo.models.decode.fixed import FixedCache, FixedState, make_state
from litgrpo.models.decode.shared_prefix import SharedPrefixCache
from litgrpo.models.kernels.linear import FastLinear, PackedLinear
from litgrpo.models.kernels.torch_compat import has_forward_hooks
from litgrpo.tensors import widen

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
LINEAR = (nn.Linear, FastLinear)


def is_supported(model: PreTrainedModel) -> bool:
    """Check that `FusedDecoder` computes exactly this model, as it is now.

    Every module that the decoder replaces must have the class that it was written for: adapters,
    parametrizations and other wrappers have other classes, and compute with other weights.
    """
    layout, modeling = find_fused_layout(model), modeling_module_name(model)
    if layout is None:
        return False
    if any(has_forward_hooks(module) or "forward" in vars(module) for module in model.modules()):
        return False
    if any(type(p) is not nn.Parameter or not p.is_floating_point() for p in model.parameters()):
        return False
    body: Any = model.base_model
    return (
        all(_is_defined_in(modeling, module) for module in (body, body.norm, body.rotary_emb))
        and body.rotary_emb.rope_type in POSITIONAL_ROPES
        and 2 * len(body.rotary_emb.inv_freq) == body.layers[0].self_attn.head_dim
        and body.embed_tokens is model.get_input_embeddings()
        and _is_plain_embedding(body.embed_tokens, layout, modeling)
        and type(model.get_output_embeddings()) in LINEAR
        and all(_is_supported_layer(layer, layout, modeling) for layer in body.layers)
    )


def _is_defined_in(modeling: str, module: nn.Module) -> bool:
    return type(module).__module__ == modeling


def _is_plain_embedding(module: nn.Module, layout: FusedLayout, modeling: str) -> bool:
    """Check that this is a table of vectors, which Gemma scales."""
    is_plain = _is_defined_in(modeling, module) if layout.gemma else type(module) is nn.Embedding
    return is_plain and getattr(module, "max_norm", None) is None


def _is_supported_layer(layer: Any, layout: FusedLayout, modeling: str) -> bool:
    children, attention, mlp = (
        dict(module.named_children()) for module in (layer, layer.self_attn, layer.mlp)
    )
    expected = layout.layer_norms | {"self_attn", "mlp"}, layout.head_norms | PROJECTIONS, MLP
    if (children.keys(), attention.keys(), mlp.keys()) != expected:
        return False
    modules = {**children, **attention, **mlp}
    del modules["act_fn"]  # any function of one tensor
    projections = [modules.pop(name) for name in list(modules) if name.endswith("_proj")]
    return all(_is_defined_in(modeling, module) for module in (layer, *modules.values())) and all(
        type(projection) in LINEAR or _is_plain_lora(projection) for projection in projections
    )


def _is_plain_lora(layer: Any) -> bool:
    """Check that this is a LoRA layer whose matrices can be added to float32 weights."""
    layer_class = type(layer)
    if layer_class.__module__ != "peft.tuners.lora.layer" or layer_class.__name__ != "Linear":
        return False
    special = (
        layer.lora_variant,
        layer.merged_adapters,
        layer.disable_adapters,
        layer.fan_in_fan_out,
    )
    if any(special) or any((*layer.use_dora.values(), *layer.lora_bias.values())):
        return False
    return type(layer.base_layer) in LINEAR and layer.base_layer.weight.dtype == torch.float32


def _merge_weight(layer: Any) -> Tensor:
    """Return the weight [out, in] of a linear layer with its adapters added."""
    if isinstance(layer, nn.Linear):
        return layer.weight.detach()
    weight = layer.base_layer.weight.detach()
    for name in layer.active_adapters:
        if name in layer.lora_A:
            weight = weight + layer.get_delta_weight(name)
    return weight


def _concatenate_biases(layers: list[Any]) -> Tensor | None:
    """Concatenate the biases of linear layers; None if none has one."""
    bases = [layer if isinstance(layer, nn.Linear) else layer.base_layer for layer in layers]
    if all(base.bias is None for base in bases):
        return None
    return torch.cat(
        [
            base.weight.new_zeros(len(base.weight)) if base.bias is None else base.bias.detach()
            for base in bases
        ]
    )


class FusedLinear:
    """A linear layer whose weight [out, in] is copied for one rollout."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, pack: bool) -> None:
        self.packed = PackedLinear(weight, bias, dtype=dtype) if pack else None
        self.weight = weight.to(dtype).t()
        self.bias = None if bias is None else bias.to(dtype)
        if pack:
            self.weight = self.weight[:0]  # the packed copy is enough

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply [n, in] to [n, out] in the dtype of x, and add a residual [n, out]."""
        if self.packed is not None:
            y = self.packed(x)
        elif x.dtype != self.weight.dtype:
            y = torch.mm(x.to(self.weight.dtype), self.weight)
            y = (y if self.bias is None else y + self.bias).to(x.dtype)
        else:
            summand = self.bias if residual is None else residual
            if summand is None:
                return torch.mm(x, self.weight)
            y = torch.addmm(summand, x, self.weight)
            return y if residual is None or self.bias is None else y + self.bias
        return y if residual is None else y.add_(residual)


@dataclass(frozen=True)
class FusedLayer:
    """Weights of one decoder layer, with E hidden, Q query heads, H kv heads of size D."""

    # Query, key and value projections with the weight of the norm before them; in each query and
    # key head, the two numbers that rotate together are adjacent.
    qkv: FusedLinear
    out: FusedLinear  # output projection of the attention
    gate_up: FusedLinear  # both input projections of the MLP with the weight of the norm before
    down: FusedLinear  # output projection of the MLP
    act: Callable[[Tensor], Tensor]  # activation function of the MLP
    head_norm: Tensor | None  # [Q + H, D] weights of the norms of query and key heads (Qwen 3)
    # [E] weights of the norms of attention's and MLP's output (Gemma 2).
    output_norms: tuple[Tensor, Tensor] | None
    window: int | None  # positions that a token attends to; None: all


class FusedDecoder:
    """A supported model with its weights copied for one rollout, in which they must not change.

    `dtype` is that of the matrix products, by default the weights'; `pack` copies weights into
    oneDNN's layout; `scale_logits` applies logit scale and soft-cap.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scale_logits: Callable[[Tensor], Tensor] | None,
        *,
        dtype: torch.dtype | None = None,
        pack: bool = False,
    ) -> None:
        body: Any = model.base_model
        attention = body.layers[0].self_attn
        config: Any = model.config
        self.embedding = body.embed_tokens.weight.detach()
        self.dtype = torch.promote_types(self.embedding.dtype, torch.float32)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = attention.head_dim
        layout = find_fused_layout(model)
        assert layout is not None
        gemma = layout.gemma
        self.offset = 1.0 if gemma else 0.0  # Gemma stores norm weights minus 1
        self.rms_eps = float(config.rms_norm_eps)
        self.eps = torch.tensor(config.rms_norm_eps, dtype=self.dtype, device=self.embedding.device)
        self.embed_scale = float(body.embed_tokens.embed_scale) if gemma else 1.0
        self.softcap = config.attn_logit_softcapping if gemma else None
        self.scaling = attention.scaling / (self.softcap or 1.0)
        self.matmul_dtype, self.pack = dtype or self.embedding.dtype, pack
        # Transformers rotates entries i and i + D/2 together. Here they are entries 2i and 2i + 1,
        # so that a pair is one complex number.
        self.pairs = torch.arange(self.head_size, device=self.eps.device).view(2, -1).t().flatten()
        self.layers = [self._fuse_layer(layer, gemma) for layer in body.layers]
        self.last_norm = self._norm_weight(body.norm)
        self.head = self._fuse_linear([model.get_output_embeddings()])
        self.scale_logits = scale_logits
        self.rotary = body.rotary_emb
        self.rotations = torch.empty(0)

    def _norm_weight(self, norm: Any) -> Tensor:
        return norm.weight.detach().to(self.dtype) + self.offset

    def _fuse_linear(
        self, layers: list[Any], norm: Any = None, order: Tensor | None = None
    ) -> FusedLinear:
        """Concatenate linear layers, multiply in the norm before them, permute their outputs."""
        weights, bias = [_merge_weight(layer) for layer in layers], _concatenate_biases(layers)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if norm is not None:
            weight = (weight * self._norm_weight(norm)).to(weight.dtype)
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return FusedLinear(weight, bias, self.matmul_dtype, self.pack)

    def _fuse_layer(self, layer: Any, gemma: bool) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        num_rotated = (self.heads + self.kv_heads) * self.head_size
        order = torch.arange(num_rotated + self.kv_heads * self.head_size, device=self.pairs.device)
        order[:num_rotated] = order[:num_rotated].view(-1, self.head_size)[:, self.pairs].flatten()
        head_norm = output_norms = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm, self.heads), (attention.k_norm, self.kv_heads)
            weights = [self._norm_weight(norm)[self.pairs].expand(n, -1) for norm, n in norms]
            head_norm = torch.cat(weights)
        mlp_norm = layer.post_attention_layernorm
        if gemma:
            mlp_norm = layer.pre_feedforward_layernorm
            norms = layer.post_attention_layernorm, layer.post_feedforward_layernorm
            output_norms = (self._norm_weight(norms[0]), self._norm_weight(norms[1]))
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        return FusedLayer(
            qkv=self._fuse_linear(qkv, layer.input_layernorm, order),
            out=self._fuse_linear([attention.o_proj]),
            gate_up=self._fuse_linear([mlp.gate_proj, mlp.up_proj], mlp_norm),
            down=self._fuse_linear([mlp.down_proj]),
            act=mlp.act_fn,
            head_norm=head_norm,
            output_norms=output_norms,
            window=getattr(attention, "sliding_window", None),  # Llama has none
        )

    def convert_cache(self, prefill: DynamicCache, positions: int) -> DynamicCache:
        """Permute the prompt keys of transformers' cache, and prepare this many positions."""
        layers: list[Any] = prefill.layers
        for layer in layers:
            layer.keys = layer.keys.to(self.dtype)[..., self.pairs]
            layer.values = layer.values.to(self.dtype)
        self._prepare_rotations(positions)
        return prefill

    def make_fixed_state(
        self, prefill: DynamicCache, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> FixedState:
        """Return the state of `decode_grid_step`, in the dtype of the matrix products."""
        layers: list[Any] = prefill.layers
        prompts: list[Tensor] = []
        for layer in layers:
            keys = layer.keys[..., self.pairs]
            prompts += (keys.to(self.matmul_dtype), layer.values.to(self.matmul_dtype))
            layer.keys = layer.values = None  # free the wider copy
        self._prepare_rotations(prompt_mask.shape[1] + capacity)
        return make_state(prompt_mask, prompts, group_size, capacity)

    def _prepare_rotations(self, positions: int) -> None:
        """Compute the rotations [positions, D / 2] of the first positions."""
        if positions > len(self.rotations):
            position_ids = torch.arange(positions, device=self.pairs.device)[None]
            cos, sin = self.rotary(self.eps, position_ids)
            half = self.head_size // 2
            self.rotations = torch.complex(cos[0, :, :half], sin[0, :, :half])

    def _inverse_rms(self, x: Tensor) -> Tensor:
        """Return 1 / sqrt(mean(x^2) + eps) over the last dimension, [..., 1]."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    @torch.inference_mode()
    def decode_step(self, tokens: Tensor, cache: SharedPrefixCache) -> Tensor:
        """Feed one token [n] to every live row and return the logits [n, V] of the next."""
        positions = cache.begin_step().squeeze(1)
        rotations = self.rotations.index_select(0, positions)[:, None]  # [n, 1, D / 2]
        x = self.embedding.index_select(0, tokens).to(self.dtype)  # [n, E]
        if self.embed_scale != 1:
            x.mul_(self.embed_scale)
        for number, layer in enumerate(self.layers):
            y = self._attention(number, layer, x * self._inverse_rms(x), rotations, cache)
            x = self._add_residual(x, y, layer.out, layer, 0)
            gate, up = layer.gate_up(x * self._inverse_rms(x)).chunk(2, 1)
            x = self._add_residual(x, layer.act(gate).mul_(up), layer.down, layer, 1)
        cache.num_fed += 1
        logits = self.head((x * self._inverse_rms(x)).mul_(self.last_norm))
        return logits if self.scale_logits is None else self.scale_logits(logits)

    def _attention(
        self, number: int, layer: FusedLayer, x: Tensor, rotations: Tensor, cache: SharedPrefixCache
    ) -> Tensor:
        """Compute attention [n, Q * D] of normed [n, E], before the output projection."""
        n, num_rotated = len(x), self.heads + self.kv_heads
        heads = layer.qkv(x).view(n, -1, self.head_size // 2, 2)
        pairs, values = heads.split((num_rotated, self.kv_heads), 1)  # of query and key heads
        if layer.head_norm is not None:
            pairs = pairs.flatten(2)
            pairs = (pairs * self._inverse_rms(pairs)).mul_(layer.head_norm)
            pairs = pairs.view(n, num_rotated, -1, 2)
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * rotations)
        query, keys = rotated.view(n, num_rotated, self.head_size).split(
            (self.heads, self.kv_heads), 1
        )
        cache.write(number, keys, values.view(n, self.kv_heads, self.head_size))
        query = (query * self.scaling).view(n * self.kv_heads, -1, self.head_size)
        output = cache.attend(number, query, softcap=self.softcap, window=layer.window)
        return output.view(n, self.heads * self.head_size)

    def _add_residual(
        self, x: Tensor, y: Tensor, linear: FusedLinear, layer: FusedLayer, norm: int
    ) -> Tensor:
        """Add linear(y) to the residual stream x, after a norm if the layer has one (Gemma 2)."""
        if layer.output_norms is None:
            return linear(y, residual=x)
        y = linear(y)
        return torch.addcmul(x, y * self._inverse_rms(y), layer.output_norms[norm])

    # --- the same step for devices that record it: fewer and smaller operations ---

    @torch.inference_mode()
    def decode_grid_step(self, tokens: Tensor, state: FixedState) -> tuple[Tensor, FixedState]:
        """Feed one token [N] to every row of a grid; no shape and no address depends on a value.

        The residual stream has the dtype of the matrix products. Norms and softmax compute in
        float32. Returns logits [N, V], float32 or as the head's product returns them, and the
        advanced state, which is written in place.
        """
        cache = FixedCache(state)
        rotations = self._grid_rotations(cache.positions.squeeze(1))
        x = self.embedding.index_select(0, tokens).to(self.dtype).mul_(self.embed_scale)
        x = x.to(self.matmul_dtype)
        for number, layer in enumerate(self.layers):
            heads = layer.qkv(self._norm(x)).view(len(x), -1, self.head_size).to(self.dtype)
            if layer.head_norm is not None:
                qk_heads = heads[:, : len(layer.head_norm)]
                torch.mul(self._norm(qk_heads), layer.head_norm, out=qk_heads)
            pairs = torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2))
            heads = torch.view_as_real(pairs * rotations).flatten(2)
            query, kv = heads.split((self.heads, 2 * self.kv_heads), 1)
            cache.write(number, kv.unflatten(1, (2, -1)))
            y = cache.attend(number, query, softcap=self.softcap, window=layer.window)
            x = self._add_grid_residual(x, y, layer.out, layer, 0)
            gate, up = layer.gate_up(self._norm(x)).chunk(2, 1)
            x = self._add_grid_residual(x, layer.act(gate).mul_(up), layer.down, layer, 1)
        logits = self.head(self._norm(x, self.last_norm))
        if self.scale_logits is not None:
            logits = self.scale_logits(widen(logits))
        return logits, cache.advance()

    def _norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Normalize the last dimension, computing in float32."""
        weight = None if weight is None else weight.to(x.dtype)
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, self.rms_eps)

    def _grid_rotations(self, positions: Tensor) -> Tensor:
        """Return rotations [n, Q + 2 * H, D / 2]: of queries also their scale, of values none."""
        rotations = self.rotations.index_select(0, positions)[:, None]
        heads = (
            (rotations * self.scaling, self.heads),
            (rotations, self.kv_heads),
            (torch.ones_like(rotations), self.kv_heads),
        )
        return torch.cat([factor.expand(-1, count, -1) for factor, count in heads], 1)

    def _add_grid_residual(
        self, x: Tensor, y: Tensor, linear: FusedLinear, layer: FusedLayer, norm: int
    ) -> Tensor:
        """Add linear(y) to the residual stream x, after a norm if the layer has one (Gemma 2)."""
        if layer.output_norms is None:
            return linear(y, residual=x)
        return self._norm(linear(y), layer.output_norms[norm]).add_(x)
