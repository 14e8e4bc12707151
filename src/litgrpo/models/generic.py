"""Decoder-only models of unlisted types, by transformers' own forward pass and KV cache.

Prompts are not shared and rows are not padded on the left, so recurrent models and every kind of
transformers cache work. Slower than `CausalPolicy` and as exact as the model itself.

`build_causal_policy` selects the policy of a model. A listed type gets `CausalPolicy`. An unlisted
one is probed: each of `CANDIDATES` decodes and scores a few tokens, fastest first, and the first
whose log-probabilities equal those of plain forward passes is used.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from litgrpo.arguments import find_page
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.models.architectures import ARCHITECTURES, LAYER_TYPES, NO_LEFT_PADDING
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.packing import pack_left
from litgrpo.models.policy import DecodeState, Policy
from litgrpo.models.transformers_compat import prepare_generation, update_generation_inputs
from litgrpo.tensors import predicting, widen
from litgrpo.types import TokenRows

# Lengths of the prompts and completions of the probe; each prompt has two completions.
PROMPTS, COMPLETIONS = (5, 3), (3, 2, 3, 1)


@dataclass
class EqualLengthRows:
    """Rows of the same length that decode together, with the model's own cache if it has one."""

    policy: GenericPolicy
    ids: Tensor  # [n, t] tokens so far
    # Keyword arguments of the next forward pass (cache, mask).
    inputs: dict[str, Any] = field(default_factory=dict)

    def prefill(self, capacity: int) -> Tensor:
        """Compute the prompts; return the logits [n, V] of the first completion token."""
        self.inputs = {"attention_mask": torch.ones_like(self.ids), "use_cache": True}
        prepare_generation(
            self.policy.bare_model,
            self.inputs,
            num_rows=len(self.ids),
            max_length=self.ids.shape[1] + capacity,
        )
        return self._last_logits(is_first_iteration=True)

    def feed(self, tokens: Tensor) -> Tensor:
        """Feed one token [n] to every row; return the logits [n, V] of the next."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return self._last_logits(next_sequence_length=1)

    def _last_logits(self, **step: Any) -> Tensor:
        policy = self.policy
        if not policy.cached:
            return policy.plain_logits(self.ids, keep=1)[:, -1]
        model: Any = policy.bare_model
        inputs = model.prepare_inputs_for_generation(self.ids, **step, **self.inputs)
        output = model(**inputs, **policy.logits_to_keep(1), return_dict=True)
        self.inputs = update_generation_inputs(model, output, self.inputs)
        return output.logits[:, -1]


class GenericDecodeState(DecodeState):
    """Rows of several lengths, decoded in batches of equal length.

    Dropped rows continue to be fed (with token 0) as long as their batch has live rows, because the
    caches of arbitrary models cannot be indexed by row.
    """

    def __init__(self, batches: list[EqualLengthRows], batch_of: Tensor, slot_of: Tensor) -> None:
        self.batches = batches
        self.batch_of, self.slot_of = batch_of, slot_of  # [n] batch of each live row, and row there

    def select(self, rows: Tensor) -> None:
        """Keep some rows; a batch without live rows is not computed any more."""
        self.batch_of, self.slot_of = self.batch_of[rows], self.slot_of[rows]

    def feed(self, tokens: Tensor) -> Tensor:
        """Feed one token [n] to every live row; return the logits [n, V] of the next."""
        logits: list[Tensor] = []
        order: list[Tensor] = []
        for number in self.batch_of.unique().tolist():
            rows = (self.batch_of == number).nonzero().squeeze(1)
            slots = self.slot_of[rows]
            batch_tokens = tokens.new_zeros(len(self.batches[number].ids))
            batch_tokens[slots] = tokens[rows]
            logits.append(self.batches[number].feed(batch_tokens)[slots])
            order.append(rows)
        return torch.cat(logits)[torch.cat(order).argsort()]


class GenericPolicy(Policy):
    """A decoder-only model of any type; its "hidden states" are the logits themselves."""

    cached = True  # decode with the model's cache; else compute the whole row for every token
    batched = True  # compute rows of several lengths together, padded on the right

    @property
    def vocab_size(self) -> int:
        return int(self.bare_model.config.get_text_config().vocab_size)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] unchanged."""
        return hidden

    def logits_to_keep(self, number: int) -> dict[str, int]:
        """Return the argument that limits logits to the last positions, if the model accepts it."""
        return {"logits_to_keep": number} if "logits_to_keep" in self._forward_arguments else {}

    @property
    def _forward_arguments(self) -> set[str]:
        return set(inspect.signature(self.bare_model.forward).parameters)

    def plain_logits(self, ids: Tensor, keep: int | None = None) -> Tensor:
        """Compute logits [M, T, V] of rows [M, T] without left padding, or their last `keep`."""
        options: dict[str, Any] = {} if keep is None else self.logits_to_keep(keep)
        if "use_cache" in self._forward_arguments:
            options["use_cache"] = False
        return self.bare_model(input_ids=ids, **options).logits

    def hidden(self, rows: TokenRows) -> Tensor:
        """Compute the logits [K, V] of the completion tokens."""
        prompt_mask = rows.prompt_mask[rows.prompt_of]
        ids = torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1)
        mask = torch.cat([prompt_mask, rows.completion_mask], 1)
        targets = torch.cat([torch.zeros_like(prompt_mask), rows.completion_mask], 1)
        return self.target_hidden_states(ids, mask, targets)

    def target_hidden_states(self, ids: Tensor, mask: Tensor, target_mask: Tensor) -> Tensor:
        """Compute [K, V] logits of rows padded on either side."""
        targets = pack_left(target_mask.long(), mask)[0].bool()
        ids, mask = pack_left(ids, mask)
        if self.batched:
            return predicting(self.plain_logits(ids), targets)
        logits = [
            predicting(self.plain_logits(ids[row, is_real][None]), targets[row, is_real][None])
            for row, is_real in enumerate(mask)
        ]
        return torch.cat(logits)

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Compute the prompts, once for each completion."""
        lengths = prompt_mask.sum(1)
        batch_of, slot_of = torch.zeros_like(lengths), torch.zeros_like(lengths)  # [B]
        batches, logits = [], []
        for number, length in enumerate(lengths.unique().tolist()):
            prompts = (lengths == length).nonzero().squeeze(1)
            batch_of[prompts] = number
            slot_of[prompts] = torch.arange(len(prompts), device=prompts.device)
            ids = prompt_ids[prompts][prompt_mask[prompts]].view(len(prompts), length)
            batches.append(EqualLengthRows(self, ids.repeat_interleave(group_size, 0)))
            logits.append(batches[-1].prefill(capacity)[::group_size])
        keys = torch.stack([batch_of, slot_of], 1)
        order = sorted(range(len(keys)), key=lambda prompt: keys[prompt].tolist())
        prompt_logits = torch.cat(logits)[torch.tensor(order, device=lengths.device).argsort()]
        copies = torch.arange(group_size, device=lengths.device)
        slots = (slot_of[:, None] * group_size + copies).flatten()
        return prompt_logits, GenericDecodeState(
            batches, batch_of.repeat_interleave(group_size), slots
        )

    def decode_step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        assert isinstance(state, GenericDecodeState)
        return state.feed(tokens)

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Compute one unpadded row at a time."""
        logits = [
            self.plain_logits(torch.cat([prompt[mask], completion])[None])[:, int(mask.sum()) - 1 :]
            for prompt, mask, completion in zip(
                prompt_ids, prompt_mask, completion_ids, strict=True
            )
        ]
        return torch.cat(logits)


# --- selection of a policy ---


class Candidate(NamedTuple):
    """Settings of a `GenericPolicy`."""

    cached: bool
    batched: bool


# Fastest first. Some models have no cache (RWKV), others mix up rows of unequal length.
CANDIDATES = (
    Candidate(cached=True, batched=True),
    Candidate(cached=True, batched=False),
    Candidate(cached=False, batched=True),
    Candidate(cached=False, batched=False),
)


@dataclass(frozen=True)
class ModelProbeResult:
    """Outcome of a probe."""

    # Largest difference (nats) between the policy's log-probabilities and those of plain forward
    # passes; infinite if computing them failed.
    error: float
    reason: str = ""  # why it failed


def build_causal_policy(*arguments: Any) -> Policy:
    """Build the fastest exact policy for a decoder-only model, from the arguments of `Policy`.

    A ValueError if no candidate is exact: a token attends to later ones, or results depend on the
    length of the text.
    """
    policy = CausalPolicy(*arguments)
    config = policy.bare_model.config
    if config.model_type in ARCHITECTURES:
        return policy
    tolerance = max(1e-3, 32 * torch.finfo(policy.bare_model.dtype).eps)
    layers = set(getattr(config, "layer_types", None) or ())
    left_padding_works = layers <= LAYER_TYPES and config.model_type not in NO_LEFT_PADDING
    if left_padding_works and probe(policy).error <= tolerance:
        return policy
    for candidate in CANDIDATES:
        generic = GenericPolicy(*arguments)
        generic.cached, generic.batched = candidate
        result = probe(generic)
        if result.error <= tolerance:
            rank_zero_info(
                f"Model type {config.model_type!r} runs transformers' own forward pass "
                f"{'with' if candidate.cached else 'without'} its KV cache: exact, but slower than "
                f"the types that share prompts ({find_page('docs/reference/models.md')})."
            )
            return generic
    raise ValueError(
        f"Models of type {config.model_type!r} cannot be trained: "
        + (
            result.reason
            or "a token's prediction depends on later tokens (log-probabilities of the same tokens "
            f"differ by {result.error:.1g} nats if others follow)"
        )
        + f". {find_page('docs/reference/models.md')} lists the types that can."
    )


@torch.no_grad()
def probe(policy: Policy) -> ModelProbeResult:
    """Decode and score a few tokens and compare with a plain forward pass of each row."""
    training = {module: module.training for module in policy.modules()}
    policy.eval()
    try:
        with torch.autocast(policy.model.device.type, enabled=False):
            return ModelProbeResult(_largest_error(policy))
    except Exception as error:
        # Model code of any type runs here with arguments that it may not support, so any exception
        # is a result of the probe: it is reported if no candidate works.
        return ModelProbeResult(
            torch.inf, " ".join(str(error).split())[:200] or type(error).__name__
        )
    finally:
        for module, mode in training.items():
            module.training = mode


def _largest_error(policy: Policy) -> float:
    device = policy.model.device
    vocab_size = int(policy.bare_model.config.get_text_config().vocab_size)
    rows = _make_probe_rows(vocab_size, device)
    row_logits = []
    for row, prompt_of in enumerate(rows.prompt_of.tolist()):
        prompt = rows.prompt_ids[prompt_of][rows.prompt_mask[prompt_of]]
        completion = rows.completion_ids[row][rows.completion_mask[row]]
        ids = torch.cat([prompt, completion])[None]
        row_logits.append(policy.bare_model(input_ids=ids).logits[0, len(prompt) - 1 : -1])
    expected = widen(nn.utils.rnn.pad_sequence(row_logits, batch_first=True)).log_softmax(-1)
    mask = rows.completion_mask
    logprobs = widen(policy.head(policy.hidden(rows))).log_softmax(-1)  # [K, V]
    errors = [(logprobs - expected[mask]).abs().max()]
    with policy.decoding(len(mask), fused=False):
        group_size = len(mask) // len(rows.prompt_ids)
        capacity = mask.shape[1]
        logits, state = policy.prefill(rows.prompt_ids, rows.prompt_mask, group_size, capacity)
        logits, live = logits.repeat_interleave(group_size, 0), torch.arange(len(mask)).to(device)
        for column in range(capacity):
            logprobs = widen(logits).log_softmax(-1)
            errors.append((logprobs - expected[live, column]).abs().max())
            if column + 1 == capacity:
                break
            tokens = rows.completion_ids[live, column]
            remaining = mask[live, column + 1].nonzero().squeeze(1)
            state.select(remaining)
            live = live[remaining]
            logits = policy.decode_step(tokens[remaining], state)
    return float(torch.stack(errors).nan_to_num(torch.inf).max())


def _make_probe_rows(vocab_size: int, device: torch.device) -> TokenRows:
    """Return two prompts of unequal length with two completions each, of spread-out tokens."""
    total = sum(PROMPTS) + sum(COMPLETIONS)
    tokens = (torch.arange(total) * 7919 + 11).remainder(vocab_size).tolist()
    rows = [torch.tensor([tokens.pop() for _ in range(length)]) for length in PROMPTS + COMPLETIONS]
    pad = nn.utils.rnn.pad_sequence
    prompts = pad(rows[: len(PROMPTS)], batch_first=True, padding_side="left")
    prompt_mask = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
    completions = pad(rows[len(PROMPTS) :], batch_first=True)
    mask = torch.arange(completions.shape[1]) < torch.tensor(COMPLETIONS)[:, None]
    prompt_of = torch.arange(len(COMPLETIONS)) * len(PROMPTS) // len(COMPLETIONS)
    tensors = (prompts, prompt_mask, prompt_of, completions, mask)
    return TokenRows(*(tensor.to(device) for tensor in tensors))
