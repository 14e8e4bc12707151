"""What a training keeps in memory on each chip, counted on tensors without storage.

The model is built and run on torch's `meta` device, where tensors have shapes and no numbers: so
its weights, what the optimizer keeps of them, its cache and what autograd keeps for the backward
pass are counted exactly, for any architecture, in seconds. What a compiler makes of it is not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from litgrpo.tensors import head_chunk
from litgrpo.tools.plan.division import Division, bytes_of, size

Phase = Literal["always", "rollout", "learning"]
# Tensors [N, V] that filtered sampling holds at once: logits, sorted ones, places, sums, noise.
SAMPLING_TENSORS = 6
# Tensors [k, V] that a chunk of the head holds at once: logits, capped ones, probabilities,
# gradient.
HEAD_TENSORS = 4
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Item:
    """One line of the account.

    Args:
        name: what is kept.
        size: bytes on each chip.
        phase: when it is there.
        how: how it was counted.
    """

    name: str
    size: int
    phase: Phase
    how: str


@dataclass(frozen=True)
class Work:
    """Sizes of one iteration, on all chips together.

    Args:
        rollouts: (B prompts, G completions of each) of training and of evaluation.
        prompt_len: P, as padded.
        completion_len: C.
        micro_rows: rows that go through the model at once in learning.
        length: tokens of each of them.
        cache_bytes: of one number of the cache.
        max_rows: rows that a device decodes at once; None: all.
        step_rows: rows that share an optimizer step; 0: no fewer than those of a micro-batch.
        sharing: rows that share their prompt in a micro-batch.
        sampled: by the devices that learn, by others, or by vLLM beside the trainer, which sleeps
            while the trainer learns.
    """

    rollouts: tuple[tuple[int, int], ...]
    prompt_len: int
    completion_len: int
    micro_rows: int
    length: int
    cache_bytes: int = FLOAT32_BYTES
    max_rows: int | None = None
    step_rows: int = 0
    sharing: int = 1
    sampled: Literal["here", "elsewhere", "colocated"] = "here"


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps of one pass for the way back.

    Args:
        outside: of the layers, which gradient checkpointing does not touch.
        layers: in each layer.
        layer_input: what enters a layer, which is all that gradient checkpointing keeps of it.
    """

    outside: int
    layers: tuple[int, ...]
    layer_input: int

    def size(self, checkpointing: bool) -> int:
        """Bytes at the worst moment: with one layer's gradients as large as what it keeps."""
        at_work = max(self.layers)
        # outside + sum of layers + gradients in one           without checkpointing
        # outside + inputs of layers + one layer again + its gradients   with it
        if checkpointing:
            return self.outside + len(self.layers) * self.layer_input + 2 * at_work
        return self.outside + sum(self.layers) + at_work


@dataclass
class Blueprint:
    """A decoder-only model without numbers.

    Args:
        config: the library's configuration of it.
        dtype: of the weights, and of what is computed with them.
        adapt: puts adapters around it, or leaves it as it is.
        flash: attention keeps no scores [rows, heads, length, length], as fused kernels do.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    adapt: Callable[[Any], Any] | None = None
    flash: bool = False
    _kept: dict[tuple[int, int], Kept] = field(default_factory=dict, repr=False)

    @cached_property
    def bare_model(self) -> Any:
        """The library's model."""
        from transformers import AutoModelForCausalLM

        if self.config.is_encoder_decoder:
            raise ValueError(
                f"plan counts decoder-only models, and {self.config.model_type} is an "
                "encoder-decoder model"
            )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.config, dtype=self.dtype, attn_implementation="eager"
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
        """Every weight once, adapters included."""
        return list(self.model.parameters())

    @cached_property
    def trained(self) -> list[nn.Parameter]:
        """Those that the optimizer is given."""
        return [weight for weight in self.weights if weight.requires_grad]

    @cached_property
    def cache_numbers(self) -> int:
        """Numbers that a cache holds of each token, in all layers."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()  # keeps what is beyond sliding windows, as our engines do
        with torch.no_grad():
            self._pass(1, 1, past_key_values=cache, use_cache=True)
        return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)

    def kept(self, rows: int, length: int) -> Kept:
        """What autograd keeps of a pass over [rows, length] tokens; weights do not count."""
        if (rows, length) not in self._kept:
            self._kept[rows, length] = self._count(rows, length)
        return self._kept[rows, length]

    def _count(self, rows: int, length: int) -> Kept:
        layers = self._layers()
        counted = {t.untyped_storage()._cdata for t in (*self.weights, *self.model.buffers())}
        # Bytes kept outside of the layers, then in each of them.
        sizes = [0] * (1 + len(layers))
        place = [0]
        alive: list[Tensor] = []  # or a storage's address would be given to another

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            scores = self.flash and tensor.shape[1:][-2:] == (length, length)
            if storage._cdata not in counted and not scores:
                counted.add(storage._cdata)
                sizes[place[-1]] += storage.nbytes()
                alive.append(tensor)
            return tensor

        def leave(*_: Any) -> None:
            place.pop()

        hooks = []
        for number, layer in enumerate(layers, start=1):
            hooks.append(layer.register_forward_pre_hook(lambda *_, n=number: place.append(n)))
            hooks.append(layer.register_forward_hook(leave))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = self._pass(rows, length, use_cache=False)
        for hook in hooks:
            hook.remove()
        return Kept(sizes[0], tuple(sizes[1:]), hidden.numel() * hidden.element_size())

    @cached_property
    def blocks(self) -> list[list[nn.Parameter]]:
        """Weights of each layer."""
        return [list(layer.parameters()) for layer in self._layers()]

    @cached_property
    def outside(self) -> list[nn.Parameter]:
        """Weights in no layer: embedding, head, the last norm."""
        inside = {id(weight) for block in self.blocks for weight in block}
        return [weight for weight in self.weights if id(weight) not in inside]

    def _layers(self) -> Sequence[nn.Module]:
        assert self.model is not None  # adapters are in the bare model's layers from now on
        number = self.config.num_hidden_layers
        lists = [list(m) for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return next(layers for layers in lists if len(layers) == number)

    def _pass(self, rows: int, length: int, **cached: Any) -> Tensor:
        """Last hidden states [rows, length, E]."""
        assert self.model is not None  # as above
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        seen = torch.zeros(rows, 1, length, length, dtype=self.dtype, device="meta")
        kinds = set(self.config.to_dict().get("layer_types") or ())
        mask = dict.fromkeys(kinds, seen) if "sliding_attention" in kinds else seen
        output = self.bare_model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=ids, **cached
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


def optimizer_states(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], weights: list[nn.Parameter]
) -> list[tuple[Tensor, Tensor]] | None:
    """What an optimizer keeps of each weight after a step; that step is taken, without numbers.

    Args:
        make: builds the optimizer.
        weights: without storage.

    Returns:
        Pairs of a weight and a tensor; None if this optimizer cannot step without numbers.

    Raises:
        ValueError: the optimizer refuses these weights.
    """
    try:
        optimizer = make(weights)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer.step()
    except ValueError as error:
        raise ValueError(f"the optimizer refuses this model: {error}") from error
    except RuntimeError:  # it looks at numbers
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


def states_share(
    states: list[tuple[Tensor, Tensor]] | None, weights: list[nn.Parameter], chips: Division
) -> int:
    """Bytes of an optimizer's states on each chip; those shaped as their weight lie as it does.

    Args:
        states: see `optimizer_states`; None counts two per weight, as Adam has.
        weights: that are trained.
        chips: to divide over.
    """
    if states is None:
        return 2 * chips.share(weights)
    whole = sum(s.numel() * size(s) for weight, s in states if s.shape != weight.shape)
    return whole + chips.share(s for weight, s in states if s.shape == weight.shape)


def cache_share(blueprint: Blueprint, work: Work, chips: Division) -> tuple[int, int]:
    """Bytes of prompts and of completions in the largest cache on each chip.

    Prompts stand there once for their group. A row of completions is written by making a new
    tensor, so that theirs exist twice.

    Args:
        blueprint: the model.
        work: sizes of an iteration.
        chips: to divide over.
    """
    token = blueprint.cache_numbers * work.cache_bytes
    parts = []
    for prompts, group in work.rollouts:
        rows = chips.rows(prompts * group)
        at_once = min(rows, work.max_rows or rows)
        read = -(-chips.rows(prompts) * at_once // rows)
        parts.append((read * work.prompt_len * token, 2 * at_once * work.completion_len * token))
    return max(parts, key=sum, default=(0, 0))


def account(
    blueprint: Blueprint,
    work: Work,
    chips: Division,
    *,
    states: list[tuple[Tensor, Tensor]] | None,
    reference: Blueprint | None,
    checkpointing: bool,
    computed: Blueprint | None = None,
) -> list[Item]:
    """Everything of weight that a chip holds.

    Args:
        blueprint: the policy.
        work: sizes of an iteration.
        chips: to divide over.
        states: what the optimizer keeps.
        reference: the frozen model, if it is one of its own.
        checkpointing: whether activations are recomputed in the backward pass.
        computed: the policy in the lower precision that is computed in; None: in its own.
    """
    at_work = computed or blueprint
    gathered = chips.gathered(at_work.weights, at_work.blocks, at_work.outside)
    items = [
        *_always(blueprint, chips, states, reference),
        *_rollout(at_work, work, chips, gathered.rollout),
        *_learning(blueprint, at_work, work, chips, checkpointing),
        Item("gathered", gathered.learning, "learning", gathered.what_learning),
    ]
    if work.sampled == "elsewhere":
        largest = max(weight.numel() * size(weight) for weight in at_work.weights)
        items = [item for item in items if item.phase != "rollout"]
        items.append(Item("publishing", largest, "rollout", "one weight whole at a time"))
    if work.sampled == "colocated":
        items = [item for item in items if item.phase != "rollout"]
        served = bytes_of(at_work.weights)
        items.append(Item("vLLM", served, "rollout", "its weights; the rest of the room is cache"))
    return [item for item in items if item.size]


def _always(
    blueprint: Blueprint,
    chips: Division,
    states: list[tuple[Tensor, Tensor]] | None,
    reference: Blueprint | None,
) -> Iterator[Item]:
    trained = blueprint.trained
    frozen = [weight for weight in blueprint.weights if not weight.requires_grad]
    for name, weights in {
        "weights": frozen or trained,
        "adapters": trained if frozen else [],
        "reference": [] if reference is None else reference.weights,
    }.items():
        yield Item(name, chips.share(weights), "always", _count_of(weights))
    how = "two per weight, as Adam's: not countable" if states is None else "after one step"
    yield Item("optimizer", states_share(states, trained, chips), "always", how)


def _rollout(
    blueprint: Blueprint, work: Work, chips: Division, gathered: tuple[int, str]
) -> Iterator[Item]:
    if not work.rollouts:
        return
    prompts, completions = cache_share(blueprint, work, chips)
    number, group = max(work.rollouts, key=prod)
    rows = min(number * group, work.max_rows or sys.maxsize)
    shape = (chips.rows(rows), blueprint.config.vocab_size)
    for name, each, how in (
        (
            "cache, prompts",
            prompts,
            f"up to {number} prompts of {work.prompt_len} tokens, once per group",
        ),
        (
            "cache, completions",
            completions,
            f"up to {rows} rows of {work.completion_len} tokens, twice while written",
        ),
        (
            "reading",
            max(blueprint.kept(chips.rows(number), work.prompt_len).layers),
            "one layer's activations over the prompts",
        ),
        (
            "sampling",
            SAMPLING_TENSORS * prod(shape) * FLOAT32_BYTES,
            f"{SAMPLING_TENSORS} x {list(shape)}",
        ),
        ("gathered", *gathered),
    ):
        yield Item(name, each, "rollout", how)


def _learning(
    blueprint: Blueprint, at_work: Blueprint, work: Work, chips: Division, checkpointing: bool
) -> Iterator[Item]:
    if at_work is not blueprint and chips.casts_weights:
        how = "all weights once more, in the precision computed in"
        yield Item("cast weights", chips.share(at_work.weights), "learning", how)
    trained = blueprint.trained
    yield Item("gradients", chips.share(trained), "learning", _count_of(trained))
    rows = chips.micro_rows(work.micro_rows, work.step_rows)
    how = f"{rows} rows of {work.length} tokens" + (", checkpointed" if checkpointing else "")
    kept = at_work.kept(rows, work.length).size(checkpointing)
    yield Item("activations", kept, "learning", how)
    vocabulary = blueprint.config.vocab_size
    tokens = chips.head_rows(work.micro_rows, work.step_rows) * work.completion_len
    shape = (head_chunk(tokens, vocabulary), vocabulary)
    logits = HEAD_TENSORS * prod(shape) * FLOAT32_BYTES
    yield Item("head", logits, "learning", f"{HEAD_TENSORS} x {list(shape)}")


def _count_of(weights: Iterable[Tensor]) -> str:
    return f"{sum(weight.numel() for weight in weights):,} numbers"


def peak(items: Iterable[Item]) -> int:
    """Bytes at the worst moment: what is always there, and the larger of the two phases."""
    total: Counter[Phase] = Counter()
    for item in items:
        total[item.phase] += item.size
    return total["always"] + max(total["rollout"], total["learning"])
