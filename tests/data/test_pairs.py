"""Pairs of rows: prompt and completion with one end token, padded on the right."""

import pytest
import torch

from litgrpo.data.pairs import PairBatch, PairFormat, padding_frac, tokenize_pairs
from litgrpo.data.rendering import LengthLimit, TextTemplate, build_prompt_format
from litgrpo.data.sources import read_rows
from tests.support.models import byte_tokenizer


def test_a_batch_of_rows_marks_what_is_to_predict():
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "de", "completion": "f<eos>"}]
    pairs = tokenize_pairs(
        read_rows(rows),
        "train",
        pair_format=PairFormat(build_prompt_format(None, chat=False), TextTemplate("completion")),
        limit=LengthLimit("max_length", 9, "drop"),
        tokenizer=byte_tokenizer(),
        pad_to_multiple_of=4,
    )
    batch = pairs[[1, 0]]
    assert len(pairs) == 2
    assert pairs.lengths.tolist() == [4, 5]
    assert byte_tokenizer().batch_decode(batch.input_ids) == [
        "<bos>def<eos><pad><pad><pad>",
        "<bos>ab<eos><pad><pad><pad><pad>",
    ]
    assert batch.attention_mask.tolist() == [[True] * 5 + [False] * 3, [True] * 4 + [False] * 4]
    assert batch.loss_mask.nonzero().tolist() == [[0, 3], [0, 4], [1, 2], [1, 3]]


SAID = [
    {"role": "assistant", "content": "bc"},
    {"role": "tool", "content": "dd"},
    {"role": "assistant", "content": "e"},
]


def pairs_of(completion):
    return tokenize_pairs(
        read_rows([{"prompt": "a", "completion": completion}]),
        "train",
        pair_format=PairFormat(build_prompt_format(None, chat=False), TextTemplate("completion")),
        limit=LengthLimit("max_length", 9, "drop"),
        tokenizer=byte_tokenizer(),
        pad_to_multiple_of=1,
    )


def test_what_was_heard_in_a_completion_is_read_and_not_learned():
    batch = pairs_of(SAID)[[0]]
    assert byte_tokenizer().batch_decode(batch.input_ids) == ["<bos>abcdde<eos>"]
    assert batch.loss_mask.tolist() == [[False, False, True, True, False, False, True, True]]


@pytest.mark.parametrize(
    ("completion", "said"),
    [
        (SAID[:2], "the last message of the completion is of 'tool'"),
        ([], "row 1: the completion is empty"),
        ([{"role": "assistant"}], "row 1, completion, message 1: has no content"),
        (["bc"], "row 1, completion: messages are .*expected \\[{role: user"),
    ],
)
def test_a_completion_of_other_messages_is_refused(completion, said):
    with pytest.raises(ValueError, match=said):
        pairs_of(completion)


def test_padding_is_counted():
    assert padding_frac(torch.tensor([4, 2, 3]), [[0, 1], [2]]) == pytest.approx(2 / 11)


def test_a_batch_moves_to_a_device():
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch = PairBatch(torch.ones(1, 2, dtype=torch.long), mask, mask).to("meta")
    assert {t.device.type for t in (batch.input_ids, batch.attention_mask, batch.loss_mask)} == {
        "meta"
    }


def test_masks_of_another_shape_or_type_are_refused():
    ids = torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(AssertionError, match="a mask has shape"):
        PairBatch(ids, torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(AssertionError, match="a mask is"):
        PairBatch(ids, ids, ids)
