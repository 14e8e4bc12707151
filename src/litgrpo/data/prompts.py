"""Prompts for reinforcement learning: each row rendered and tokenized, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.loader import compute_padded_length
from litgrpo.data.rendering import LengthLimit, PromptFormat
from litgrpo.data.rows import RowScan, columns_of
from litgrpo.data.sources import EPISODE_NUMBER, Rows, SourceRow
from litgrpo.data.tokenization import TokenCounts, TokenFingerprint
from litgrpo.types import REFERENCE_PROMPT, TASK, PromptBatch, pad_left

if TYPE_CHECKING:  # slow to import; used in annotations only
    from transformers import PreTrainedTokenizerBase

MAX_KEPT = 16_384  # prompts that stay in memory; more are tokenized again with their batch


@dataclass(frozen=True)
class Prompt:
    """A row as the policy reads it."""

    row: SourceRow
    text: str
    ids: list[int]  # none of a text that is certainly too long
    # token ids of the prompt that the reference reads, if it reads another one
    reference: list[int] | None
    length: int  # number of tokens of the longer of the two, or a lower bound


class PromptSet(Dataset[PromptBatch]):
    """Tokenized prompts; indexing with row numbers returns a batch."""

    # All rows are read, rendered and tokenized once, to check and count them. The prompts of a
    # small set stay in memory. Of a larger one, evenly spaced prompts do, and those of a batch are
    # read again.

    def __init__(
        self,
        rows: Rows,
        role: str,
        *,
        prompt_format: PromptFormat,
        limit: LengthLimit,
        tokenizer: PreTrainedTokenizerBase,
        pad_to_multiple_of: int,
    ) -> None:
        self.prompt_format, self.tokenizer = prompt_format, tokenizer
        self.limit, self.pad_to_multiple_of = limit, pad_to_multiple_of
        # Tokenizing a text of many megabytes takes minutes and gigabytes, to find it too long.
        self.max_chars = limit.max_chars(tokenizer)
        scan, columns, tasks = RowScan(rows, role), dict[str, None](), dict[str, None]()
        tokens, counts = TokenFingerprint(), TokenCounts(tokenizer)
        in_memory, stride = dict[int, Prompt](), -(-len(rows) // MAX_KEPT)
        self.max_tokens = self.max_reference_tokens = 0
        for chunk in rows.chunks():
            scan.num_systems += prompt_format.count_systems(chunk)
            for prompt in self.encode(chunk):
                number, values = len(scan.lengths), prompt.row.values
                scan.add(prompt.row, (prompt.text, values.get(EPISODE_NUMBER)), prompt.length)
                counts.add(prompt_format.texts_of_data(prompt.row), prompt.ids)
                columns |= dict.fromkeys(values)
                if prompt.length > limit.tokens:
                    continue
                if values.get(TASK) is not None:
                    tasks[str(values[TASK])] = None
                reference = prompt.reference or []
                tokens.add(prompt.ids, reference)
                self.max_tokens = max(self.max_tokens, len(prompt.ids))
                self.max_reference_tokens = max(self.max_reference_tokens, len(reference))
                if number % stride == 0:
                    in_memory[number] = prompt
        counts.report(role, split=prompt_format.split_special_tokens)
        fitting = scan.select(limit)
        self.rows = rows.select(fitting)
        self.column_names, self.tasks = [*columns], [*tasks]
        self.data_fingerprint, self.token_fingerprint = scan.fingerprint, str(tokens)
        new_numbers = {old: new for new, old in enumerate(fitting)}
        self.in_memory = {new_numbers[old]: prompt for old, prompt in in_memory.items()}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def set_names(self) -> list[str]:
        """Name of each prompt's set; "" for sets without names."""
        return self.rows.set_names

    @property
    def index(self) -> list[int]:
        """Position of each prompt in its source."""
        index: list[int] = self.rows.indices.tolist()
        return index

    @property
    def num_indices(self) -> int:
        """A number above every position of a prompt in its source."""
        return int(self.rows.indices[-1]) + 1

    @property
    def ids(self) -> list[list[int]]:
        """Token ids of the prompts in memory."""
        return [prompt.ids for prompt in self.in_memory.values()]

    @property
    def texts(self) -> list[str]:
        """The prompts in memory."""
        return [prompt.text for prompt in self.in_memory.values()]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """{name: one value for each of the prompts in memory}."""
        return self._columns([*self.in_memory.values()])

    def index_of(self, row: int) -> int:
        """Return the position in its source of the prompt of a row."""
        return int(self.rows.indices[row % len(self)])

    def encode(self, rows: list[SourceRow]) -> list[Prompt]:
        """Render and tokenize rows."""
        prompt_format, tokenizer = self.prompt_format, self.tokenizer
        texts = prompt_format.texts(rows, tokenizer)
        fitting = [n for n, text in enumerate(texts) if len(text) <= self.max_chars]
        encoded = prompt_format.encode(
            [texts[n] for n in fitting], tokenizer, [rows[n] for n in fitting]
        )
        ids = dict(zip(fitting, encoded, strict=True))
        for n in fitting:
            require(bool(ids[n]), f"{rows[n].place}: the prompt has no tokens")
        hinted = prompt_format.encode_for_reference(rows, tokenizer)
        reference: Sequence[list[int] | None] = hinted or [None] * len(rows)
        lengths = [
            max(
                len(ids[n]) if n in ids else len(text) * (self.limit.tokens + 1) // self.max_chars,
                len(reference[n] or ()),
            )
            for n, text in enumerate(texts)
        ]
        return [
            Prompt(row, text, ids.get(n, []), reference[n], lengths[n])
            for n, (row, text) in enumerate(zip(rows, texts, strict=True))
        ]

    def __getitem__(self, rows: list[int]) -> PromptBatch:
        """Return the batch of these rows, padded to the longest of them."""
        # Row number n + k * len(self) is the k-th repetition of row n within an epoch (see
        # `loader.mix_sources`). Its index differs, so its completions use other random numbers.
        repetitions = torch.tensor([row // len(self) for row in rows])
        rows = [row % len(self) for row in rows]
        missing = [row for row in dict.fromkeys(rows) if row not in self.in_memory]
        read_again = self.encode([self.rows[row] for row in missing]) if missing else []
        read = dict(zip(missing, read_again, strict=True))
        prompts = [read[row] if row in read else self.in_memory[row] for row in rows]
        ids = [prompt.ids for prompt in prompts]
        length = compute_padded_length(ids, self.pad_to_multiple_of)
        prompt_ids, prompt_mask = pad_left(ids, self.tokenizer.pad_token_id, length)
        index = torch.tensor([prompt.row.index for prompt in prompts])
        names = {prompt.row.set_name for prompt in prompts}
        return PromptBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            prompts=[prompt.text for prompt in prompts],
            columns=self._columns(prompts),
            index=index + repetitions * self.num_indices,
            set_name=names.pop() if len(names) == 1 else "",
        )

    def _columns(self, prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
        rows = [prompt.row for prompt in prompts]
        columns = columns_of(rows, self.column_names) | self.prompt_format.reward_columns(rows)
        if self.prompt_format.reference is not None:
            columns[REFERENCE_PROMPT] = [prompt.reference for prompt in prompts]
        return columns
