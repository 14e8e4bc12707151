import pytest

from litgrpo.rollout.bridge import Inline
from tests.conftest import byte_tokenizer


def test_a_text_stands_as_it_is_with_its_special_tokens():
    tokenizer = byte_tokenizer()
    ids = Inline(tokenizer).ids("a<eos>", ended=True)
    assert ids == [*tokenizer("a", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert Inline(tokenizer).ids("", ended=False) == []


def test_messages_need_a_chat_format():
    with pytest.raises(ValueError, match=r"messages .* episode.between is inline.* template"):
        Inline(byte_tokenizer()).ids([{"role": "tool", "content": "4"}], ended=True)
