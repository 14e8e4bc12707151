"""Data that the model cannot read are refused before anything is computed."""

import pytest

from litgrpo.data.pair_data import PairData
from litgrpo.data.prompt_data import PromptData
from litgrpo.training.sft import SFT
from tests.support.models import tiny_policy
from tests.support.training import module, train

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.parametrize("long", ["train", "val"])
def test_prompts_beyond_learned_positions_are_refused_before_the_first_iteration(long):
    texts = {"train": ["a", "b"], "val": ["c", "d"]}
    texts[long] = [*texts[long], "x" * 60]
    grpo = module("gpt2", max_completion_length=12)
    grpo.policy = tiny_policy("gpt2", n_positions=64)
    with pytest.raises(ValueError, match=f"{long} data.*gpt2 has 64"):
        train(grpo, PromptData(**texts, batch_size=2))
    assert grpo.iteration == 0


def test_pairs_beyond_learned_positions_are_refused():
    rows = [{"prompt": "a" * 60, "completion": "b" * 9}] * 2
    sft = SFT("")
    sft.policy = tiny_policy("gpt2", n_positions=64)
    sft.tokenizer = sft.policy.tokenizer
    with pytest.raises(ValueError, match=r"71.*data\.max_length to at most 64"):
        train(sft, PairData(rows, batch_size=2))
