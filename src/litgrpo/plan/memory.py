"""Count the memory of training on each device, with tensors that have no storage.

The model is built and run on torch's `meta` device, where tensors have shapes and no data. Its
weights, optimizer state, KV cache and the activations saved for the backward pass are counted
exactly, for any architecture, in seconds. Buffers of a compiler are not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from litgrpo.plan.sharding import Sharding, total_bytes
from litgrpo.rollout.engines.base import Place
from litgrpo.tensors import head_chunk

MemoryPhase = Literal["always", "rollout", "learning"]
PHASES = get_args(MemoryPhase)
# Tensors [N, V] that filtered sampling holds at once: logits, sorted logits, indices, sums, noise.
SAMPLING_TENSORS = 6
# Tensors [k, V] that a chunk of the head holds at once: logits, capped logits, probabilities,
# gradient.
HEAD_TENSORS = 4
FLOAT32_BYTES = 4
OptimizerState = list[tuple[Tensor, Tensor]]  # (weight, state tensor)


@dataclass(frozen=True)
class MemoryItem:
    """A tensor or group of tensors in memory.

    Args:
        name: its name.
        size: bytes on each device.
        phase: when it is in memory.
        how: how it was counted.
    """

    name: str
    size: int
    phase: MemoryPhase
    how: str


@dataclass(frozen=True)
class IterationSizes:
    """Sizes of one iteration, on all devices together.

    Args:
        rollouts: (B prompts, G completions each) of training and of evaluation.
        prompt_len: P, padded.
        completion_len: C.
        micro_rows: rows of a micro-batch.
        length: tokens of each of these rows.
        cache_bytes: bytes of one number of the KV cache.
        max_rows: rows that a device decodes at once; None: all.
        step_rows: rows of an optimizer step; 0: those of a micro-batch.
        prompt_sharing: rows that share their prompt in a micro-batch.
        sampling: on the devices that train, on servers, or by vLLM colocated with the trainer,
            which sleeps during the update.
    """

    rollouts: tuple[tuple[int, int], ...]
    prompt_len: int
    completion_len: int
    micro_rows: int
    length: int
    cache_bytes: int = FLOAT32_BYTES
    max_rows: int | None = None
    step_rows: int = 0
    prompt_sharing: int = 1
    sampling: Place = "trainer"


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that autograd saves for the backward pass.

    Args:
        outside: outside of the layers, where gradient checkpointing has no effect.
        layers: in each layer.
        layer_input: input of a layer, all that gradient checkpointing saves of it.
    """

    outside: int
    layers: tuple[int, ...]
    layer_input: int

    def size(self, checkpointing: bool) -> int:
        """Return the peak: gradients within one layer are as large as its activations."""
        largest = max(self.layers)
        # without: outside + all layers + gradients of one layer
        # with:    outside + inputs of layers + one recomputed layer + its gradients
        if checkpointing:
            return self.outside + len(self.layers) * self.layer_input + 2 * largest
        return self.outside + sum(self.layers) + largest


@dataclass
class MetaModel:
    """A decoder-only model on the meta device.

    Args:
        config: its transformers config.
        dtype: precision of weights and computation.
        adapt: adds adapters; None: no adapters.
        flash: attention saves no scores [rows, heads, length, length], as in fused kernels.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    adapt: Callable[[Any], Any] | None = None
    flash: bool = False
    # {(rows, length): bytes}: a pass takes a second for a large model.
    _saved: dict[tuple[int, int], SavedActivations] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def bare_model(self) -> Any:
        """The transformers model."""
        from transformers import AutoModelForCausalLM

        if self.config.is_encoder_decoder:
            raise ValueError(
                f"plan supports decoder-only models; {self.config.model_type} is an "
                "encoder-decoder model"
            )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.config,
                dtype=self.dtype,
                attn_implementation="eager",
                trust_remote_code=False,
            )

    @cached_property
    def model(self) -> nn.Module:
        """The model with its adapters, in training mode."""
        with torch.device("meta"):
            model: nn.Module = (
                self.bare_model if self.adapt is None else self.adapt(self.bare_model)
            )
        return model.train()

    @cached_property
    def weights(self) -> list[nn.Parameter]:
        """All weights, with adapters."""
        return list(self.model.parameters())

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """Weights that the optimizer updates."""
        return [weight for weight in self.weights if weight.requires_grad]

    @cached_property
    def cache_numbers(self) -> int:
        """Numbers per token in the KV cache, in all layers."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()  # has no sliding window, like litgrpo's engines
        with torch.no_grad():
            self._pass(1, 1, past_key_values=cache, use_cache=True)
        return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)

    def count_activations(self, rows: int, length: int) -> SavedActivations:
        """Count what autograd saves of a pass over [rows, length] tokens, without weights."""
        if (rows, length) not in self._saved:
            self._saved[rows, length] = self._count_saved(rows, length)
        return self._saved[rows, length]

    def _count_saved(self, rows: int, length: int) -> SavedActivations:
        layers = self._layers()
        counted = {t.untyped_storage()._cdata for t in (*self.weights, *self.model.buffers())}
        # Bytes saved outside of the layers, then in each of them.
        sizes = [0] * (1 + len(layers))
        current_layer = [0]
        alive: list[Tensor] = []  # a freed storage's address would be reused

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            scores = self.flash and tensor.shape[1:][-2:] == (length, length)
            if storage._cdata not in counted and not scores:
                counted.add(storage._cdata)
                sizes[current_layer[-1]] += storage.nbytes()
                alive.append(tensor)
            return tensor

        def leave(*_: Any) -> None:
            current_layer.pop()

        hooks = []
        for number, layer in enumerate(layers, start=1):
            hooks.append(
                layer.register_forward_pre_hook(lambda *_, n=number: current_layer.append(n))
            )
            hooks.append(layer.register_forward_hook(leave))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = self._pass(rows, length, use_cache=False)
        for hook in hooks:
            hook.remove()
        return SavedActivations(sizes[0], tuple(sizes[1:]), hidden.numel() * hidden.element_size())

    @cached_property
    def blocks(self) -> list[list[nn.Parameter]]:
        """Weights of each layer."""
        return [list(layer.parameters()) for layer in self._layers()]

    @cached_property
    def outside(self) -> list[nn.Parameter]:
        """Weights in no layer: embedding, head, final norm."""
        inside = {id(weight) for block in self.blocks for weight in block}
        return [weight for weight in self.weights if id(weight) not in inside]

    def _layers(self) -> Sequence[nn.Module]:
        assert self.model is not None  # builds it, which puts adapters into the bare model's layers
        number = self.config.num_hidden_layers
        lists = [list(m) for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return next(layers for layers in lists if len(layers) == number)

    def _pass(self, rows: int, length: int, **cached: Any) -> Tensor:
        """Return the last hidden states, [rows, length, E]."""
        assert self.model is not None  # as above
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        is_visible = torch.zeros(rows, 1, length, length, dtype=self.dtype, device="meta")
        kinds = set(self.config.to_dict().get("layer_types") or ())
        mask = dict.fromkeys(kinds, is_visible) if "sliding_attention" in kinds else is_visible
        output = self.bare_model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=ids, **cached
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def step_optimizer(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], weights: list[nn.Parameter]
) -> OptimizerState | None:
    """Take a step on the meta device and return the optimizer state.

    Returns:
        Pairs of a weight and a state tensor; None if this optimizer cannot step without data.

    Raises:
        ValueError: the optimizer does not support these weights.
    """
    try:
        optimizer = make(weights)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
    except ValueError as error:
        raise ValueError(f"model.optimizer does not support this model: {error}") from error
    except RuntimeError:  # the optimizer reads values
        return None
    finally:
        for weight in weights:
            weight.grad = None
    return [
        (weight, value)
        for weight, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def optimizer_bytes(
    states: OptimizerState | None, weights: list[nn.Parameter], sharding: Sharding
) -> int:
    """Count the optimizer state on each device; tensors shaped like their weight are sharded.

    Args:
        states: from `step_optimizer`; None counts two per weight, as in Adam.
        weights: trained weights.
        sharding: over devices.
    """
    if states is None:
        return 2 * sharding.share(weights)
    replicated = sum(
        s.numel() * s.element_size() for weight, s in states if s.shape != weight.shape
    )
    return replicated + sharding.share(s for weight, s in states if s.shape == weight.shape)


def cache_bytes(model: MetaModel, work: IterationSizes, sharding: Sharding) -> tuple[int, int]:
    """Count prompts and completions in the largest KV cache on each device.

    A prompt is cached once per group. Completions count twice, because the cache of completions
    grows by copying.

    Args:
        model: the model.
        work: sizes of an iteration.
        sharding: over devices.

    Returns:
        Bytes of prompts, bytes of completions.
    """
    token = model.cache_numbers * work.cache_bytes
    sizes = []
    for prompts, group in work.rollouts:
        rows = sharding.rows(prompts) * group  # a cache is divided by prompts
        at_once = min(rows, work.max_rows or rows)
        read = -(-sharding.rows(prompts) * at_once // rows)
        sizes.append((read * work.prompt_len * token, 2 * at_once * work.completion_len * token))
    return max(sizes, key=sum, default=(0, 0))


def count_memory(
    model: MetaModel,
    work: IterationSizes,
    sharding: Sharding,
    *,
    states: OptimizerState | None,
    reference: MetaModel | None,
    checkpointing: bool,
    compute: MetaModel | None = None,
) -> list[MemoryItem]:
    """List everything large in the memory of a device.

    Args:
        model: the policy.
        work: sizes of an iteration.
        sharding: over devices.
        states: optimizer state, from `step_optimizer`.
        reference: the reference model, if it is a separate one.
        checkpointing: recompute activations in the backward pass.
        compute: the policy in a lower compute precision; None: the precision of its weights.
    """
    compute = compute or model
    items = [
        *_always(model, sharding, states, reference),
        *_learning(model, compute, work, sharding, checkpointing),
    ]
    generates = work.sampling == "trainer" and bool(work.rollouts)
    if generates:
        items += _rollout(compute, work, sharding)
    elif work.sampling == "servers":
        largest = max(weight.numel() * weight.element_size() for weight in compute.weights)
        items.append(MemoryItem("publishing", largest, "rollout", "one weight whole at a time"))
    elif work.sampling == "colocated":
        size, how = total_bytes(compute.weights), "weights; the rest is its KV cache"
        items.append(MemoryItem("vLLM", size, "rollout", how))
    if sharding.number > 1:
        items += [
            MemoryItem("gathered", size, phase, how)
            for phase, (size, how) in sharding.gather(compute.blocks, compute.outside).items()
            if generates or phase != "rollout"
        ]
    return sorted((item for item in items if item.size), key=lambda item: PHASES.index(item.phase))


def _always(
    model: MetaModel,
    sharding: Sharding,
    states: OptimizerState | None,
    reference: MetaModel | None,
) -> Iterator[MemoryItem]:
    trained = model.trained
    frozen = [weight for weight in model.weights if not weight.requires_grad]
    for name, weights in {
        "weights": frozen or trained,
        "adapters": trained if frozen else [],
        "reference": [] if reference is None else reference.weights,
    }.items():
        yield MemoryItem(name, sharding.share(weights), "always", _describe_count(weights))
    how = "as Adam's: it cannot be counted" if states is None else "after one step"
    yield MemoryItem("optimizer", optimizer_bytes(states, trained, sharding), "always", how)


def _rollout(model: MetaModel, work: IterationSizes, sharding: Sharding) -> Iterator[MemoryItem]:
    prompts, completions = cache_bytes(model, work, sharding)
    number, group = max(work.rollouts, key=prod)
    rows = min(number * group, work.max_rows or sys.maxsize)
    how = f"{number} x {work.prompt_len} tokens, once per group"
    yield MemoryItem("cache, prompts", prompts, "rollout", how)
    how = f"2 copies of {rows} x {work.completion_len} tokens"
    yield MemoryItem("cache, completions", completions, "rollout", how)
    layer = max(model.count_activations(sharding.rows(number), work.prompt_len).layers)
    yield MemoryItem("prefill", layer, "rollout", "a layer's activations of prompts")
    shape = (sharding.rows(rows), model.config.vocab_size)
    size = SAMPLING_TENSORS * prod(shape) * FLOAT32_BYTES
    yield MemoryItem("sampling", size, "rollout", f"{SAMPLING_TENSORS} x {list(shape)}")


def _learning(
    model: MetaModel,
    compute: MetaModel,
    work: IterationSizes,
    sharding: Sharding,
    checkpointing: bool,
) -> Iterator[MemoryItem]:
    if compute is not model and sharding.casts_weights:
        how = "copy in the compute precision"
        yield MemoryItem("cast weights", sharding.share(compute.weights), "learning", how)
    trained = model.trained
    yield MemoryItem("gradients", sharding.share(trained), "learning", _describe_count(trained))
    rows = sharding.micro_rows(work.micro_rows, work.step_rows)
    how = f"{rows} x {work.length} tokens" + (", checkpointed" if checkpointing else "")
    saved = compute.count_activations(rows, work.length).size(checkpointing)
    yield MemoryItem("activations", saved, "learning", how)
    vocabulary = model.config.vocab_size
    tokens = sharding.logit_rows(work.micro_rows, work.step_rows) * work.completion_len
    shape = (head_chunk(tokens, vocabulary), vocabulary)
    logits = HEAD_TENSORS * prod(shape) * FLOAT32_BYTES
    yield MemoryItem("head", logits, "learning", f"{HEAD_TENSORS} x {list(shape)}")


def _describe_count(weights: Iterable[Tensor]) -> str:
    return f"{sum(weight.numel() for weight in weights):,} numbers"


def peak_bytes(items: Iterable[MemoryItem]) -> int:
    """Return the peak: everything that is always in memory, and the larger of the two phases."""
    total: Counter[MemoryPhase] = Counter()
    for item in items:
        total[item.phase] += item.size
    return total["always"] + max(total["rollout"], total["learning"])
