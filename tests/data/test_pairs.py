"""Pairs of rows: prompt and completion with one end token, padded on the right."""

import pytest
import torch

from litgrpo.data.pairs import PairBatch, PairStyle, padding_frac, tokenized_pairs
from litgrpo.data.rendering import LengthLimit, Template, prompt_style
from litgrpo.data.sources import read
from tests.conftest import byte_tokenizer


def test_a_batch_of_rows_marks_what_is_to_predict():
    rows = [{"prompt": "a", "completion": "bc"}, {"prompt": "de", "completion": "f<eos>"}]
    pairs = tokenized_pairs(
        read(rows),
        "train",
        style=PairStyle(prompt_style(None, chat=False), Template("completion")),
        limit=LengthLimit("max_len", 9, "drop"),
        tokenizer=byte_tokenizer(),
        pad_to_multiple=4,
    )
    batch = pairs[[1, 0]]
    assert len(pairs) == 2
    assert pairs.lengths.tolist() == [5, 5]
    assert byte_tokenizer().batch_decode(batch.input_ids) == [
        "<bos>def<eos><pad><pad><pad>",
        "<bos>abc<eos><pad><pad><pad>",
    ]
    assert batch.attention_mask.sum(1).tolist() == [5, 5]
    assert batch.loss_mask.sum(1).tolist() == [2, 3]


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
