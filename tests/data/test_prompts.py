"""Prompts of rows: tokenized within a limit, padded on the left, columns beside them."""

import pytest
import torch

from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import Chat, LengthLimit, build_prompt_format
from litgrpo.data.sources import read_rows
from litgrpo.types import pad_left
from tests.support.models import byte_tokenizer


def prompts_of(rows, *, chat=False, limit=9, overlong="drop", multiple=1):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}?"
    return PromptSet(
        read_rows(rows),
        "train",
        prompt_format=build_prompt_format(None, chat),
        limit=LengthLimit("max_prompt_length", limit, overlong),
        tokenizer=tokenizer,
        pad_to_multiple_of=multiple,
    )


def test_rows_are_picked_with_their_columns_and_positions():
    prompts = prompts_of([{"prompt": "ab", "answer": 1}, {"prompt": "c", "answer": 2}])
    batch = prompts[[1, 0]]
    assert len(prompts) == 2
    assert (batch.prompts, batch.columns) == (["c", "ab"], {"answer": [2, 1]})
    assert batch.index.tolist() == [1, 0]
    assert batch.prompt_mask.tolist() == [[False, True, True], [True, True, True]]


def test_a_chat_prompt_has_its_messages_as_a_column():
    prompts = prompts_of(["a"], chat=Chat("be brief"), limit=99)
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert prompts.columns == {"conversation": [said]}
    assert prompts.texts == ["be briefa?"]


def test_a_prompt_without_tokens_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    style = build_prompt_format(None, chat=Chat())
    tokenizer.chat_template = "{{ '' }}"
    limit = LengthLimit("max_prompt_length", 3, "drop")
    with pytest.raises(ValueError, match="row 1: the prompt has no tokens"):
        PromptSet(
            read_rows(["a"]),
            "train",
            prompt_format=style,
            limit=limit,
            tokenizer=tokenizer,
            pad_to_multiple_of=1,
        )


def test_ids_are_long():
    assert prompts_of(["a"])[[0]].prompt_ids.dtype == torch.long


def test_rows_are_padded_on_the_left_to_the_longest_or_longer():
    ids, mask = pad_left([[5, 6], [], [7]], pad_id=9)
    assert ids.tolist() == [[5, 6], [9, 9], [9, 7]]
    assert mask.tolist() == [[True, True], [False, False], [False, True]]
    ids, mask = pad_left([[5, 6]], pad_id=0, length=4)
    assert ids.tolist() == [[0, 0, 5, 6]]
    assert mask.sum() == 2
    assert ids.dtype == torch.long


def test_a_pad_id_among_the_tokens_is_still_a_token():
    ids, mask = pad_left([[0, 5], [0]], pad_id=0)
    assert ids.tolist() == [[0, 5], [0, 0]]
    assert mask.tolist() == [[True, True], [False, True]]
