"""Behavior that PromptData and PairData share."""

import pytest

from litgrpo import PairData, PromptData
from tests.support.models import byte_tokenizer


@pytest.mark.parametrize("kind", [PromptData, PairData])
def test_without_a_trainer_the_data_need_a_tokenizer(kind, tmp_path):
    with pytest.raises(ValueError, match="set tokenizer"):
        kind(["a"]).find_tokenizer([])
    byte_tokenizer().save_pretrained(tmp_path)
    assert kind(["a"], tokenizer=str(tmp_path)).find_tokenizer([]).eos_token_id == 2


@pytest.mark.parametrize("kind", [PromptData, PairData])
def test_settings_that_make_no_sense_are_refused_by_both(kind):
    with pytest.raises(ValueError, match="pad_to_multiple_of is 0; it must be at least 1"):
        kind(["a"], pad_to_multiple_of=0)
    with pytest.raises(ValueError, match="val and val_fraction are both set"):
        kind(["a"], val=["b"], val_fraction=0.1)
