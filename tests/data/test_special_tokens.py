"""Special tokens in data are counted and said, and plain text where that is asked; unknown ones."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from litgrpo.data.prompts import tokenize_prompts
from litgrpo.data.rendering import LengthLimit, build_prompt_format
from litgrpo.data.sources import read_rows
from litgrpo.data.tokenization import special_token_texts
from tests.support.models import byte_tokenizer

FORMAT = "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}"


def prompts_of(rows, *, chat=False, split=False, template=None, tokenizer=None):
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = FORMAT
    return tokenize_prompts(
        read_rows(rows),
        "train",
        prompt_format=build_prompt_format(template, chat, split),
        limit=LengthLimit("max_prompt_length", 99, "drop"),
        tokenizer=tokenizer,
        pad_to_multiple_of=1,
    )


def plain(text):
    return byte_tokenizer()(text, add_special_tokens=False, split_special_tokens=True).input_ids


def test_the_special_tokens_of_a_tokenizer_are_known():
    assert set(special_token_texts(byte_tokenizer())) == {"<bos>", "<eos>", "<pad>"}


@pytest.mark.parametrize("chat", [False, True])
def test_special_tokens_in_prompts_are_counted(chat, caplog):
    with caplog.at_level("INFO"):
        prompts = prompts_of(["a<eos>b", "c"], chat=chat)
    said = "train: 1 of 2 prompts write special tokens as text ('<eos>'): read as those tokens"
    assert said in caplog.text
    assert 2 in prompts.ids[0][:-1]


def test_special_tokens_of_a_template_are_meant(caplog):
    with caplog.at_level("INFO"):
        prompts_of(["a", "b"], template="{{ prompt }}<eos>")
        prompts_of(["a"], chat=True)
    assert "special tokens" not in caplog.text


def test_split_special_tokens_reads_them_as_text(caplog):
    with caplog.at_level("INFO"):
        assert prompts_of(["a<eos>b"], split=True).ids == [[1, *plain("a<eos>b")]]
    assert "read as plain text (split_special_tokens)" in caplog.text
    # The chat format's special tokens stay special; a prompt that writes none is unchanged.
    chat = prompts_of(["a<eos>b", "c"], chat=True, split=True).ids
    assert chat == [[1, *plain("a<eos>b"), 2], [1, *plain("c"), 2]]


def test_the_share_of_unknown_tokens_is_said(caplog):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1, "one": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[PAD]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **marks)
    with caplog.at_level("INFO"):
        prompts_of(["one one one", "two"], tokenizer=tokenizer)
    assert (
        "train: 25.0% of the prompt tokens are unknown to the tokenizer ('[UNK]'), in 1 of 2"
        in (caplog.text)
    )
