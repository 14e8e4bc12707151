import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from litgrpo.rollout.turn_format import Inline
from tests.support.models import byte_tokenizer


def test_a_text_stands_as_it_is_and_its_special_tokens_only_on_demand():
    tokenizer = byte_tokenizer()
    ids = Inline(tokenizer, split_special_tokens=False).ids("a<eos>", ended=True)
    assert ids == [*tokenizer("a", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert Inline(tokenizer).ids("", ended=False) == []


def test_no_special_token_is_heard_and_the_environment_s_own_tags_stay_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<res>", "</res>"])
    heard = "<res>4<eos><bos>\n<pad></res>"
    ids = Inline(tokenizer).ids(heard, ended=True)
    assert tokenizer.decode(ids) == heard
    assert not {*ids} & {*tokenizer.all_special_ids}
    tags = tokenizer.convert_tokens_to_ids(["<res>", "</res>"])
    assert [ids[0], ids[-1]] == tags
    assert len(ids) == 2 + len(heard) - len("<res></res>")


def test_a_special_token_that_is_a_word_of_its_own_is_left_out():
    words = {"<unk>": 0, "<eos>": 1, "four": 2}
    fast = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, **named)
    assert Inline(tokenizer).ids("four <eos> five", ended=True) == [2, 0]


def test_messages_need_a_chat_format():
    with pytest.raises(ValueError, match=r"messages .* episode.turn_format is inline.* template"):
        Inline(byte_tokenizer()).ids([{"role": "tool", "content": "4"}], ended=True)
