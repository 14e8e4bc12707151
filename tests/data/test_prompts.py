"""Prompts of rows: tokenized within a limit, padded on the left, columns beside them."""

import pytest
import torch

from litgrpo.data.prompts import PromptSet
from litgrpo.data.rendering import Chat, LengthLimit, build_prompt_format
from litgrpo.data.sources import read_rows
from litgrpo.types import pad_left
from tests.support.models import byte_tokenizer


def prompts_of(rows, template, chat):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.chat_template = template
    return PromptSet(
        read_rows(rows),
        "train",
        prompt_format=build_prompt_format(None, chat),
        limit=LengthLimit("max_prompt_length", 99, "drop"),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )


def test_a_chat_prompt_has_its_messages_as_a_column():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}?"
    prompts = prompts_of(["a"], template, Chat("be brief"))
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    assert prompts.columns == {"conversation": [said]}
    assert prompts.texts == ["be briefa?"]


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="row 1: the prompt has no tokens"):
        prompts_of(["a"], "{{ '' }}", Chat())


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
