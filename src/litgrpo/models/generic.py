"""Decoder-only models of any other kind, by the library's own forward pass, cache and attention.

No prompt is shared and nothing is padded on the left, so that recurrent models and any cache of the
library's serve. Slower, and as exact as the model itself: before it is used, a policy is tried
against plain forward passes, and the first of several ways that agrees is taken.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from litgrpo.arguments import require
from litgrpo.distributed.messages import rank_zero_info
from litgrpo.models.architectures import ARCHITECTURES, LAYER_TYPES, PADDED_ON_THE_RIGHT
from litgrpo.models.causal import CausalPolicy
from litgrpo.models.packing import pack_left
from litgrpo.models.policy import DecodeState, Policy
from litgrpo.models.static_decoder import StaticDecoder
from litgrpo.tensors import predicting, widened
from litgrpo.types import TokenRows

# Lengths of the prompts and completions that a policy is tried with; each prompt has two.
PROMPTS, COMPLETIONS = (5, 3), (3, 2, 3, 1)


@dataclass
class EqualRows:
    """Rows of the same length that decode together, by the library's own cache if it has one.

    Args:
        policy: whose model computes.
        ids: [n, t] tokens so far.
        inputs: what the library hands from one step to the next.
    """

    policy: LibraryPolicy
    ids: Tensor
    inputs: dict[str, Any] = field(default_factory=dict)

    def begin(self, capacity: int) -> Tensor:
        """Read the prompts; [n, V] logits of the first completion token.

        Args:
            capacity: most tokens that will be fed.
        """
        model: Any = self.policy.bare_model
        self.inputs = {"attention_mask": torch.ones_like(self.ids), "use_cache": True}
        longest = self.ids.shape[1] + capacity
        asked = (GenerationConfig(), self.inputs, GenerationMode.SAMPLE, len(self.ids), longest)
        model._prepare_cache_for_generation(*asked)
        return self._logits(is_first_iteration=True)

    def feed(self, tokens: Tensor) -> Tensor:
        """Feed one token [n] to every row; [n, V] logits of the next."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return self._logits(next_sequence_length=1)

    def _logits(self, **which: Any) -> Tensor:
        policy = self.policy
        if not policy.cached:
            return policy.plain_logits(self.ids, keep=1)[:, -1]
        model: Any = policy.bare_model
        asked = model.prepare_inputs_for_generation(self.ids, **which, **self.inputs)
        output = model(**asked, **policy.keeping(1), return_dict=True)
        self.inputs = model._update_model_kwargs_for_generation(output, self.inputs)
        return output.logits[:, -1]


class LibraryState(DecodeState):
    """Rows of several lengths. Rows that were dropped are fed on with the others of their part.

    Args:
        parts: rows of one length each.
        part_of: [n] which part a live row is in.
        slot_of: [n] which row of it.
    """

    def __init__(self, parts: list[EqualRows], part_of: Tensor, slot_of: Tensor) -> None:
        self.parts, self.part_of, self.slot_of = parts, part_of, slot_of

    def select(self, rows: Tensor) -> None:
        """Keep the given rows; a part without any is not computed any more."""
        self.part_of, self.slot_of = self.part_of[rows], self.slot_of[rows]

    def feed(self, tokens: Tensor) -> Tensor:
        """Feed one token [n] to every live row; [n, V] logits of the next."""
        found: list[Tensor] = []
        places: list[Tensor] = []
        for number in self.part_of.unique().tolist():
            rows = (self.part_of == number).nonzero().squeeze(1)
            slots = self.slot_of[rows]
            every = tokens.new_zeros(len(self.parts[number].ids))
            every[slots] = tokens[rows]
            found.append(self.parts[number].feed(every)[slots])
            places.append(rows)
        return torch.cat(found)[torch.cat(places).argsort()]


class NoStaticDecoder(StaticDecoder):
    """Refuses: what the library does in static shapes is not known."""

    def attending(self) -> Any:
        """Refuse; see `StaticDecoder.attending`."""
        raise ValueError(
            f"model type {self.policy.model.config.model_type!r} is computed by the library's own "
            "code, which cannot be done in static shapes. Use "
            "litgrpo.rollout.engines.local.LocalEngine on a CPU or GPU."
        )

    prefill = step = hidden = attending  # type: ignore[assignment]


class LibraryPolicy(Policy):
    """A decoder-only model by the library's own code; its hidden states are the logits themselves.

    Attributes:
        cached: decode with the library's cache; else read the whole row for every token.
        batched: let rows of several lengths go through the model together, padded on the right.
    """

    static_decoder = NoStaticDecoder
    cached = True
    batched = True

    @property
    def vocab_size(self) -> int:
        """Number of logits, V."""
        return int(self.bare_model.config.get_text_config().vocab_size)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V], as they are."""
        return hidden

    def keeping(self, number: int) -> dict[str, int]:
        """What tells the model to compute the logits of the last positions only, if it can."""
        return {"logits_to_keep": number} if "logits_to_keep" in self._accepted else {}

    @property
    def _accepted(self) -> set[str]:
        return set(inspect.signature(self.bare_model.forward).parameters)

    def plain_logits(self, ids: Tensor, keep: int | None = None) -> Tensor:
        """[M, T, V] logits of rows [M, T] without any padding on the left.

        Args:
            ids: token ids.
            keep: how many of the last positions are needed; None: all.
        """
        kept = {} if keep is None else self.keeping(keep)
        no_cache = {"use_cache": False} if "use_cache" in self._accepted else {}
        return self.bare_model(input_ids=ids, **no_cache, **kept).logits

    def hidden(self, rows: TokenRows) -> Tensor:
        """[K, V] logits that predict the completion tokens; see `Policy.hidden`."""
        prompt_mask = rows.prompt_mask[rows.prompt_of]
        ids = torch.cat([rows.prompt_ids[rows.prompt_of], rows.completion_ids], 1)
        mask = torch.cat([prompt_mask, rows.completion_mask], 1)
        targets = torch.cat([torch.zeros_like(prompt_mask), rows.completion_mask], 1)
        targets = pack_left(targets.long(), mask)[0].bool()
        ids, mask = pack_left(ids, mask)
        if self.batched:
            return predicting(self.plain_logits(ids), targets)
        found = [
            predicting(self.plain_logits(ids[row, real][None]), targets[row, real][None])
            for row, real in enumerate(mask)
        ]
        return torch.cat(found)

    def prefill(
        self, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, capacity: int
    ) -> tuple[Tensor, DecodeState]:
        """Read the prompts, once for each completion; see `Policy.prefill`."""
        lengths = prompt_mask.sum(1)
        part_of, slot_of = torch.zeros_like(lengths), torch.zeros_like(lengths)
        parts, logits = [], []
        for number, length in enumerate(lengths.unique().tolist()):
            mine = (lengths == length).nonzero().squeeze(1)
            part_of[mine] = number
            slot_of[mine] = torch.arange(len(mine), device=mine.device)
            ids = prompt_ids[mine][prompt_mask[mine]].view(len(mine), length)
            parts.append(EqualRows(self, ids.repeat_interleave(group_size, 0)))
            logits.append(parts[-1].begin(capacity)[::group_size])
        order = torch.stack([part_of, slot_of], 1)
        places = sorted(range(len(order)), key=lambda row: order[row].tolist())
        first = torch.cat(logits)[torch.tensor(places, device=lengths.device).argsort()]
        copies = torch.arange(group_size, device=lengths.device)
        slots = (slot_of[:, None] * group_size + copies).flatten()
        return first, LibraryState(parts, part_of.repeat_interleave(group_size), slots)

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Feed one token to every live row; see `Policy.step`."""
        assert isinstance(state, LibraryState)
        return state.feed(tokens)

    def dense_logits(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor
    ) -> Tensor:
        """Logits by the model's own forward pass, row by row; see `Policy.dense_logits`."""
        rows = zip(prompt_ids, prompt_mask, completion_ids, strict=True)
        return torch.cat([self._row(ids[mask], said) for ids, mask, said in rows])

    def _row(self, prompt: Tensor, said: Tensor) -> Tensor:
        """[1, C + 1, V] logits after a prompt [P] and after each completion token [C]."""
        return self.plain_logits(torch.cat([prompt, said])[None])[:, len(prompt) - 1 :]


# --- which way is exact ---


@dataclass(frozen=True)
class Trial:
    """How a policy fared.

    Args:
        error: largest distance (nats) of its log-probabilities from those of plain forward passes;
            infinite where it could not compute them.
        reason: why not.
    """

    error: float
    reason: str = ""


def decoder_only(*described: Any) -> Policy:
    """The fastest policy that is exact for a decoder-only model.

    Args:
        described: what a `Policy` takes: model, tokenizer, end tokens, dropout.

    Raises:
        ValueError: there is none: its tokens see later ones, or depend on the length of the text.
    """
    policy = CausalPolicy(*described)
    config = policy.bare_model.config
    if config.model_type in ARCHITECTURES:
        return policy
    tolerance = max(1e-3, 32 * torch.finfo(policy.bare_model.dtype).eps)
    layers = set(config.to_dict().get("layer_types") or ())
    suited = layers <= LAYER_TYPES and config.model_type not in PADDED_ON_THE_RIGHT
    if suited and tried(policy).error <= tolerance:
        return policy
    trials = []
    for cached, batched in ((True, True), (True, False), (False, True), (False, False)):
        other = LibraryPolicy(*described)
        other.cached, other.batched = cached, batched
        trials.append(tried(other))
        if trials[-1].error <= tolerance:
            rank_zero_info(
                f"Model type {config.model_type!r} is computed by transformers' own code, "
                f"{'with its cache' if cached else 'without a cache'}: exact, and slower than the "
                "types that share prompts (docs/models.md)."
            )
            return other
    require(False, _refusal(config.model_type, trials[-1]))
    return policy


def _refusal(model_type: str, trial: Trial) -> str:
    why = trial.reason or (
        "it does not predict a token from those before it alone (log-probabilities of the same "
        f"tokens differ by {trial.error:.1g} nats when others follow)"
    )
    return (
        f"A model of type {model_type!r} cannot be trained here: {why}. docs/models.md lists "
        + ("the types that can.")
    )


@torch.no_grad()
def tried(policy: Policy) -> Trial:
    """Decode and score a few tokens, and compare with a plain forward pass of each row."""
    training = {module: module.training for module in policy.modules()}
    policy.eval()
    try:
        with torch.autocast(policy.model.device.type, enabled=False):
            return Trial(_largest_gap(policy))
    except Exception as error:  # whatever a model's code does with what it was not made for
        return Trial(torch.inf, " ".join(str(error).split())[:200] or type(error).__name__)
    finally:
        for module, mode in training.items():
            module.training = mode


def _largest_gap(policy: Policy) -> float:
    device = policy.model.device
    vocabulary = int(policy.bare_model.config.get_text_config().vocab_size)
    rows = _few_rows(vocabulary, device)
    truth = [
        policy.bare_model(input_ids=torch.cat([prompt, said])[None]).logits[0, len(prompt) - 1 : -1]
        for prompt, said in _each(rows)
    ]
    expected = widened(nn.utils.rnn.pad_sequence(truth, batch_first=True)).log_softmax(-1)
    mask = rows.completion_mask
    scored = widened(policy.head(policy.hidden(rows))).log_softmax(-1)
    gaps = [(scored - expected[mask]).abs().max()]
    with policy.decoding(len(mask), fused=False):
        group_size = len(mask) // len(rows.prompt_ids)
        capacity = mask.shape[1]
        logits, state = policy.prefill(rows.prompt_ids, rows.prompt_mask, group_size, capacity)
        logits, live = logits.repeat_interleave(group_size, 0), torch.arange(len(mask)).to(device)
        for column in range(capacity):
            decoded = widened(logits).log_softmax(-1)
            gaps.append((decoded - expected[live, column]).abs().max())
            if column + 1 == capacity:
                break
            tokens, kept = rows.completion_ids[live, column], mask[live, column + 1].nonzero()
            state.select(kept.squeeze(1))
            live = live[kept.squeeze(1)]
            logits = policy.step(tokens[kept.squeeze(1)], state)
    return float(torch.stack(gaps).nan_to_num(torch.inf).max())


def _few_rows(vocabulary: int, device: torch.device) -> TokenRows:
    """Two prompts of unequal length and two completions of each, of tokens from all over."""
    total = sum(PROMPTS) + sum(COMPLETIONS)
    tokens = (torch.arange(total) * 7919 + 11).remainder(vocabulary).tolist()
    texts = [
        torch.tensor([tokens.pop() for _ in range(length)]) for length in PROMPTS + COMPLETIONS
    ]
    pad = nn.utils.rnn.pad_sequence
    prompts = pad(texts[: len(PROMPTS)], batch_first=True, padding_side="left")
    real = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
    said = pad(texts[len(PROMPTS) :], batch_first=True)
    mask = torch.arange(said.shape[1]) < torch.tensor(COMPLETIONS)[:, None]
    prompt_of = torch.arange(len(COMPLETIONS)) * len(PROMPTS) // len(COMPLETIONS)
    return TokenRows(*(each.to(device) for each in (prompts, real, prompt_of, said, mask)))


def _each(rows: TokenRows) -> list[tuple[Tensor, Tensor]]:
    """The prompt and the completion of every row, without padding."""
    return [
        (rows.prompt_ids[prompt][rows.prompt_mask[prompt]], said[mask])
        for prompt, said, mask in zip(
            rows.prompt_of, rows.completion_ids, rows.completion_mask, strict=True
        )
    ]
