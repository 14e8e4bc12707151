"""Prompts with completions for supervised fine-tuning: conversations, tokenization, batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from litgrpo.arguments import require
from litgrpo.data.loader import compute_padded_length
from litgrpo.data.messages import (
    EXPECTED,
    Messages,
    check_fields,
    has_system,
    is_trained,
    looks_like_messages,
    read_messages,
    with_system,
)
from litgrpo.data.rendering import (
    Chat,
    ChatPromptFormat,
    LengthLimit,
    PromptFormat,
    TemplateFailure,
    TextTemplate,
    apply_chat_template,
)
from litgrpo.data.rows import RowScan
from litgrpo.data.sources import Rows, SourceRow
from litgrpo.data.tokenization import (
    TokenFingerprint,
    encode_pieces,
    special_token_texts,
    tokenize,
)

if TYPE_CHECKING:  # slow to import; used in annotations only
    from transformers import PreTrainedTokenizerBase

TrainOnTurns = Literal["all", "last"]
TextSpan = tuple[str, bool]  # a text, and whether the loss includes it
IdSpan = tuple[list[int], bool]  # token ids, and whether the loss includes them
COMPARED_CHARS = 20  # at the end of a text


@dataclass(frozen=True)
class PairBatch:
    """Prompts, each followed by its completion and the end token, padded on the right.

    Args:
        input_ids: [M, T] token ids.
        attention_mask: [M, T] bool, True marks a real token.
        loss_mask: [M, T] bool, True marks a token to predict: the completion and its end token.
        set_name: name of the set of all pairs, if there are several; else "".

    Example:
        The pair "ab" -> "c" of a byte tokenizer (1 begin, 2 end)::

            PairBatch(
                input_ids=torch.tensor([[1, 69, 70, 71, 2]]),
                attention_mask=torch.tensor([[True, True, True, True, True]]),
                loss_mask=torch.tensor([[False, False, False, True, True]]),
            )
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    set_name: str = ""

    def __post_init__(self) -> None:
        rows, length = self.input_ids.shape
        for mask in (self.attention_mask, self.loss_mask):
            assert mask.shape == (rows, length), f"a mask has shape {tuple(mask.shape)}"
            assert mask.dtype == torch.bool, f"a mask is {mask.dtype}"

    def __len__(self) -> int:
        """Number of pairs, M."""
        return self.input_ids.shape[0]

    def split(self, num_rows: int) -> list[PairBatch]:
        """Return parts of `num_rows` pairs in order; the last one may be smaller."""
        tensors = (self.input_ids, self.attention_mask, self.loss_mask)
        ids, masks, targets = (tensor.split(num_rows) for tensor in tensors)
        parts = zip(ids, masks, targets, strict=True)
        return [PairBatch(*part, set_name=self.set_name) for part in parts]

    def to(self, device: torch.device | str, **kwargs: Any) -> PairBatch:
        """Return the same batch on `device`."""
        return PairBatch(
            self.input_ids.to(device, **kwargs),
            self.attention_mask.to(device, **kwargs),
            self.loss_mask.to(device, **kwargs),
            self.set_name,
        )


@dataclass(frozen=True)
class PairSet(Dataset[PairBatch]):
    """Tokenized pairs; indexing with row numbers returns a batch."""

    ids: list[list[int]]  # token ids of each prompt with its completion
    # the tokens to predict of each pair, as half-open ranges (start, stop)
    loss_spans: list[list[tuple[int, int]]]
    pad_id: int
    pad_to_multiple_of: int
    set_names: Sequence[str] = ("",)  # name of each pair's set; "" for sets without names
    data_fingerprint: str = ""  # hash of the prompts of the data in their order

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest pair."""
        return max(map(len, self.ids), default=0)

    @property
    def token_fingerprint(self) -> str:
        """Hash of the token ids and of those to predict, in their order."""
        fingerprint = TokenFingerprint()
        for ids, spans in zip(self.ids, self.loss_spans, strict=True):
            fingerprint.add(ids, [*chain(*spans)])
        return str(fingerprint)

    @cached_property
    def lengths(self) -> Tensor:
        """[M] tokens of each pair."""
        return torch.tensor([len(ids) for ids in self.ids])

    def __getitem__(self, rows: list[int]) -> PairBatch:
        # Rows that an epoch repeats have numbers beyond the last (see `loader.mix_sources`).
        rows = [row % len(self) for row in rows]
        ids = [self.ids[row] for row in rows]
        slots = torch.arange(compute_padded_length(ids, self.pad_to_multiple_of))
        input_ids = torch.full((len(rows), len(slots)), self.pad_id)
        targets = torch.zeros_like(input_ids, dtype=torch.bool)
        for number, tokens in enumerate(ids):
            input_ids[number, : len(tokens)] = torch.tensor(tokens)
            for start, stop in self.loss_spans[rows[number]]:
                targets[number, start:stop] = True
        real = slots < self.lengths[rows][:, None]
        return PairBatch(input_ids, real, targets & real, self.set_names[rows[0]])


@dataclass(frozen=True)
class PairFormat:
    """Converts rows to token ids, split into parts with and without loss."""

    prompt: PromptFormat
    completion: TextTemplate
    train_on_turns: TrainOnTurns = "all"

    def conversation(self, row: SourceRow) -> Messages | None:
        """Return the messages of a row that is a conversation in chat format; else None.

        A template of the completion takes precedence over messages.
        """
        if self.completion.source is not None or not isinstance(self.prompt, ChatPromptFormat):
            return None
        return read_conversation(row, self.prompt)

    def completion_spans(self, row: SourceRow) -> list[TextSpan]:
        """Return the texts after a prompt, each with True if it is in the loss."""
        # A completion is a text, or a list of messages: the loss includes those of the assistant,
        # and excludes tool output between them.
        completion = row.values.get("completion")
        is_text = not isinstance(completion, list | tuple) and not looks_like_messages(completion)
        if self.completion.source is not None or is_text:
            return [(self.completion.render(row), True)]
        return message_spans(row, completion, self.train_on_turns)

    def count_systems(self, rows: list[SourceRow]) -> int:
        """Return how many rows have a system message that replaces `chat.system`."""
        if not isinstance(self.prompt, ChatPromptFormat) or self.prompt.chat.system is None:
            return 0
        return sum(has_system(self.conversation(row) or self.prompt.messages(row)) for row in rows)

    def plain_texts(self, rows: Iterable[SourceRow]) -> Iterator[str]:
        """Yield prompts and completions without any chat format, to train a tokenizer on."""
        for row in rows:
            conversation = self.conversation(row)
            if conversation is None:
                yield from self.prompt.plain_texts([row])
                yield from (text for text, _ in self.completion_spans(row))
            else:
                yield from (message["content"] for message in conversation)

    def spans(
        self, rows: list[SourceRow], tokenizer: PreTrainedTokenizerBase
    ) -> list[list[TextSpan]]:
        """Return the texts of each row, in parts with and without loss; the prompt is first."""
        spans = []
        for row in rows:
            messages = self.conversation(row)
            if messages is None:
                (prompt,) = self.prompt.texts([row], tokenizer)
                spans.append([(prompt, False), *self.completion_spans(row)])
            else:
                assert isinstance(self.prompt, ChatPromptFormat)
                chat, turns = self.prompt.chat, self.train_on_turns
                spans.append(conversation_spans(row, messages, turns, chat, tokenizer))
            several = [in_loss for _, in_loss in spans[-1]] != [False, True]
            require(
                not (self.prompt.encoder_decoder and several),
                f"{row.place}: has several answers, or text behind one; an encoder-decoder model "
                "reads one prompt and writes one answer: give each answer a separate row, or "
                "learn the last one of a conversation with `train_on_turns: last`",
            )
        return spans

    def encode(
        self,
        rows: list[SourceRow],
        spans: list[list[TextSpan]],
        tokenizer: PreTrainedTokenizerBase,
    ) -> list[list[IdSpan]]:
        """Return the token ids of each row's texts."""
        # A completion starts after the tokens of the prompt, as in generation, and tool output
        # after those of a turn: no token spans a boundary.
        pieces = [[text for text, _ in row] for row in spans]
        if self.prompt.encoder_decoder:  # the decoder does not see the prompt before its text
            encoded = [tokenize(tokenizer, row) for row in pieces]
        else:
            encoded = encode_pieces(pieces, tokenizer)
        special = tuple(special_token_texts(tokenizer))
        pairs = [n for n, row in enumerate(rows) if self.conversation(row) is None]
        prompts = self.prompt.encode(
            [pieces[n][0] for n in pairs], tokenizer, [rows[n] for n in pairs]
        )
        for n, prompt in zip(pairs, prompts, strict=True):
            encoded[n][0] = prompt
        is_pair = set(pairs)
        for n, (texts, ids) in enumerate(zip(pieces, encoded, strict=True)):
            # If the template writes no special token at the end of a turn, the end token ends it.
            ended = (
                ids[-1][-1:] == [tokenizer.eos_token_id]
                if n in is_pair
                else texts[-1].endswith(special)
            )
            if not ended:
                ids[-1] = [*ids[-1], tokenizer.eos_token_id]
        return [
            [(ids, in_loss) for ids, (_, in_loss) in zip(row, texts, strict=True)]
            for row, texts in zip(encoded, spans, strict=True)
        ]


def tokenize_pairs(
    rows: Rows,
    role: str,
    *,
    pair_format: PairFormat,
    limit: LengthLimit,
    tokenizer: PreTrainedTokenizerBase,
    pad_to_multiple_of: int,
) -> PairSet:
    """Tokenize pairs, each with one end token, without those that the limit drops.

    A truncated pair has no end token; it is an error if nothing is left to predict.
    """
    most, scan = limit.max_chars(tokenizer), RowScan(rows, role)
    pairs: list[list[int]] = []
    targets: list[list[tuple[int, int]]] = []
    for chunk in rows.chunks():
        scan.num_systems += pair_format.count_systems(chunk)
        spans = pair_format.spans(chunk, tokenizer)
        too_long = [sum(len(text) for text, _ in row) > most for row in spans]
        clipped = [
            clip_spans(row, most) if long else row
            for row, long in zip(spans, too_long, strict=True)
        ]
        encoded = pair_format.encode(chunk, clipped, tokenizer)
        for row, texts, parts, long in zip(chunk, spans, encoded, too_long, strict=True):
            ids = [token for ids, _ in parts for token in ids]
            prompt = tuple(text for text, _ in texts[:-1])
            scan.add(row, prompt, max(len(ids), limit.tokens + long))
            pairs.append(ids[: limit.tokens])
            targets.append(loss_spans(parts))
    fitting = scan.select(limit)
    for number in fitting:
        length = targets[number][0][0]
        if 0 < length < limit.tokens:
            continue
        place = rows[number].place
        require(
            length > 0,
            f"{place}: the prompt has no tokens, so nothing predicts the first token of the "
            "completion",
        )
        raise ValueError(
            f"{place}: the prompt alone has {length} tokens, max_length={limit.tokens} leaves none "
            "to learn; set `long_examples: drop`"
        )
    return PairSet(
        ids=[pairs[number] for number in fitting],
        loss_spans=[targets[number] for number in fitting],
        pad_id=tokenizer.pad_token_id,
        pad_to_multiple_of=pad_to_multiple_of,
        set_names=rows.select(fitting).set_names,
        data_fingerprint=scan.fingerprint,
    )


def clip_spans(spans: list[TextSpan], most: int) -> list[TextSpan]:
    """Return the first `most` characters of a row's texts."""
    starts = accumulate((len(text) for text, _ in spans), initial=0)
    return [
        (text[: max(0, most - start)], in_loss)
        for (text, in_loss), start in zip(spans, starts, strict=False)
    ]


def read_conversation(row: SourceRow, prompt_format: ChatPromptFormat) -> Messages | None:
    """Return all messages of a row that is a conversation; None for prompt and completion texts.

    A row has `messages`, or a `prompt` and a `completion` that is a list of messages.
    """
    messages, completion = row.values.get("messages"), row.values.get("completion")
    if messages is not None:
        require(
            "loss_mask" not in row.values,
            f"{row.place}: has a loss_mask of its messages, which litgrpo does not read: leave it "
            "out, and mark messages that are not trained on with `weight: 0`",
        )
        return read_messages(messages, row.place)
    if not isinstance(completion, list | tuple) and not looks_like_messages(completion):
        return None
    return [*prompt_format.messages(row), *read_messages(completion, row.place)]


def message_spans(
    row: SourceRow, messages: Any, train_on_turns: TrainOnTurns = "all"
) -> list[TextSpan]:
    """Return the texts of a completion of several messages without chat format."""
    # The assistant's are in the loss, unless they are marked as not to be trained on; with
    # `train_on_turns="last"` only the last one is.
    require(bool(messages), f"{row.place}: the completion is empty; {EXPECTED}")
    completion = read_messages(messages, f"{row.place}, completion")
    check_fields(completion, row.place)
    answer = completion[-1]
    require(
        is_trained(answer),
        f"{row.place}: the last message of the completion is of {answer['role']!r}, or not to be "
        "trained on",
    )
    all_turns = train_on_turns == "all"
    return [
        (message["content"], is_trained(message) and (all_turns or message is answer))
        for message in completion
    ]


def conversation_spans(
    row: SourceRow,
    messages: Messages,
    train_on_turns: TrainOnTurns,
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
) -> list[TextSpan]:
    """Render a conversation and split it where assistant turns begin and end."""
    # The loss of a turn covers the tokens that a model would generate there: everything between the
    # generation prompt and the special token that ends the turn, including that token. The
    # positions come from rendering the conversation up to each answer and after it. If a template
    # writes nothing behind a turn, as GLM's, the special token that opens the next one ends it.
    # Messages after the last answer are left out.
    check_fields(messages, row.place, tokenizer.chat_template)
    messages = with_system(messages, chat.system)
    answers = [number for number, message in enumerate(messages) if is_trained(message)]
    require(
        bool(answers),
        f"{row.place}: no message of the role assistant is to be trained on; there is nothing to "
        "learn",
    )
    answers = answers if train_on_turns == "all" else answers[-1:]
    require(
        answers[0] > 0,
        f"{row.place}: begins with a message of the assistant, which answers nothing: mark it with "
        "`weight: 0` to keep it without training on it, leave it out, or set `chat: {system: ...}`",
    )
    spans: list[TextSpan] = []
    done = ""

    def render(end: int, add_generation_prompt: bool = False) -> str:
        try:
            return apply_chat_template(
                messages[:end], chat, tokenizer, add_generation_prompt=add_generation_prompt
            )
        except TemplateFailure as error:
            raise ValueError(f"{row.place}, up to message {end}: {error}") from error

    for number in answers:
        prompt, answered = render(number, add_generation_prompt=True), render(number + 1)
        require(
            prompt.startswith(done) and answered.startswith(prompt),
            f"{row.place}: the tokenizer's chat template renders a turn differently if other turns "
            f"follow (at message {number + 1}), so the answers cannot be separated; set "
            "`train_on_turns: last`, or give the template what it needs in "
            "`chat: {template_kwargs: ...}`",
        )
        # Templates write a line break after the token that ends a turn; models do not generate it.
        turn = answered[len(prompt) :].rstrip()
        if not has_turn_end(turn, messages[number]["content"], tokenizer):
            followed = render(number + 2) if number + 1 < len(messages) else ""
            mark = opening_mark(followed, prompt + turn, tokenizer)
            require(
                bool(mark) or number == answers[-1],  # the end token ends the last one
                f"{row.place}: the tokenizer's chat template writes nothing that ends a turn "
                f"(behind message {number + 1}), so the model would not learn to stop there; set "
                "`train_on_turns: last`, or use a chat template that ends turns with a token",
            )
            turn += mark
        spans += [(prompt[len(done) :], False), (turn, True)]
        done = prompt + turn
    return spans


def has_turn_end(turn: str, content: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a chat template wrote something behind the content of a turn."""
    # Templates may leave out the beginning of a text, such as earlier reasoning.
    end_of_content = content.rstrip()[-COMPARED_CHARS:]
    return turn.endswith(tuple(special_token_texts(tokenizer))) or not turn.endswith(end_of_content)


def opening_mark(text: str, before: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the token that opens the next turn, and white space in front of it; or ""."""
    # "<|user|>hi<|assistant|>yo<|user|>bye" after "<|user|>hi<|assistant|>yo" has "<|user|>".
    behind = text[len(before) :] if text.startswith(before) else ""
    start = behind.lstrip()
    marks = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    mark = max(filter(start.startswith, marks), key=len, default="")
    return behind[: len(behind) - len(start)] + mark if mark else ""


def loss_spans(parts: list[IdSpan]) -> list[tuple[int, int]]:
    """Return the positions of the tokens in the loss, as half-open ranges."""
    ends = list(accumulate((len(ids) for ids, _ in parts), initial=0))
    return [(ends[n], ends[n + 1]) for n, (_, in_loss) in enumerate(parts) if in_loss]


def padding_frac(lengths: Tensor, batches: list[list[int]]) -> float:
    """Return the fraction of the token slots of all batches that are padding."""
    slots = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return 1 - sum(int(lengths[rows].sum()) for rows in batches) / slots
